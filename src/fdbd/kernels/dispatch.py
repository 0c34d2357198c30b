"""Which path scores a tensor, and the threads that share its rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import twin

# Fewer elements than this take less time to score than a second thread takes to wake.
_ELEMENTS_WORTH_A_THREAD = 1 << 18

_pools: dict[int, ThreadPoolExecutor] = {}


def folded_score(
    features: Tensor,
    normals: Tensor,
    offsets: Tensor,
    center: Tensor,
    floor: Tensor,
    divide: bool,
    *,
    predicted: Tensor | None = None,
    logits: Tensor | None = None,
) -> Tensor:
    """(N,) folded scores, the class taken from `predicted` (N,) or, where that is None, from the argmax of `logits`
    (N, C). Rows with a NaN, an infinity or a norm that overflows come back as NaN."""
    tensors = [features, normals, offsets, center]
    if logits is not None:
        tensors.append(logits)
    if not fits_kernel(*tensors):
        if predicted is not None:
            return twin.folded_score(features, predicted, normals, offsets, center, floor, divide)
        assert logits is not None
        return twin.folded_score_of_logits(features, logits, normals, offsets, center, floor, divide)
    fused = _fused()
    rows = _array(features)
    if predicted is not None:
        kernel, classes = fused.score_predicted, _array(predicted.to(torch.int64))
    else:
        assert logits is not None
        kernel, classes = fused.score_logits, _array(logits)
    out = np.empty(rows.shape[0], rows.dtype)
    kind = rows.dtype.type
    arguments = (
        rows,
        classes,
        _array(normals),
        _array(offsets),
        _array(center),
        kind(float(floor)),
        divide,
        kind(twin.OVERFLOW[features.dtype]),
        out,
    )
    if not all(over_rows(rows.shape[0], rows.size, lambda start, stop: kernel(*arguments, start, stop))):
        raise IndexError(f"a predicted class is outside 0…{normals.shape[0] - 1}, the classes of the head")
    return torch.from_numpy(out)


def column_sums(features: Tensor) -> Tensor:
    """(P,) float64 sums over the rows of (N, P), in one read of the features."""
    if not fits_kernel(features):
        return features.detach().to(torch.float64).sum(dim=0)
    fused = _fused()
    rows = _array(features)

    def partial(start: int, stop: int) -> Any:
        total = np.zeros(rows.shape[1], np.float64)
        fused.sum_columns(rows, total, start, stop)
        return total

    return torch.from_numpy(sum(over_rows(rows.shape[0], rows.size, partial), np.zeros(rows.shape[1])))


def warm_up(dtype: torch.dtype = torch.float32) -> None:
    """Compile the kernels for `dtype` (or read them from the disk cache), so that no later call pays for it."""
    features, logits = torch.zeros(2, 2, dtype=dtype), torch.zeros(2, 2, dtype=dtype)
    offsets, floor = features[0], torch.tensor(1.0, dtype=dtype)
    folded_score(features, features, offsets, offsets, floor, True, logits=logits)
    folded_score(features, features, offsets, offsets, floor, True, predicted=torch.zeros(2, dtype=torch.int64))
    column_sums(features)


def fits_kernel(*tensors: Tensor) -> bool:
    """Whether plain CPU arrays of one supported dtype lie behind these tensors and no gradient is asked for."""
    if torch.compiler.is_compiling():
        return False
    dtype = tensors[0].dtype
    if dtype not in (torch.float32, torch.float64):
        return False
    recording = torch.is_grad_enabled()
    for tensor in tensors:
        if type(tensor) is not Tensor and not isinstance(tensor, torch.nn.Parameter):
            return False  # subclasses: fake tensors, functional tensors, distributed tensors
        if tensor.device.type != "cpu" or tensor.dtype != dtype or (recording and tensor.requires_grad):
            return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensors[0])


def over_rows(rows: int, elements: int, work: Callable[[int, int], Any]) -> list[Any]:
    """Results of work(start, stop) over ranges that cover all rows, one range a thread of torch's.

    Plain threads, since the kernels release the GIL: OpenMP pools of two libraries fight over the cores, do not
    survive a fork, and some refuse calls from several threads.
    """
    threads = max(1, min(torch.get_num_threads(), elements // _ELEMENTS_WORTH_A_THREAD, rows))
    if threads == 1:
        return [work(0, rows)]
    bounds = [rows * i // threads for i in range(threads + 1)]
    pool = _pool()
    futures = [pool.submit(work, start, stop) for start, stop in zip(bounds[1:-1], bounds[2:])]
    first = work(0, bounds[1])
    return [first, *(future.result() for future in futures)]


def _pool() -> ThreadPoolExecutor:
    pid = os.getpid()  # a forked child has none of its parent's threads and needs a pool of its own
    if pid not in _pools:
        _pools[pid] = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="fdbd")
    return _pools[pid]


@cache
def _fused() -> Any:
    from . import fused  # numba takes a third of a second to import: only where a score is computed

    return fused


def _array(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().numpy()
