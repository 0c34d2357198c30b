"""Large inputs in CPU memory go to the compiled kernels, everything else (small inputs, gradients,
other devices, compiled and exported graphs) to their definitions in plain torch. The same call
takes the same path each time, and a service that scores a few samples at a time never waits for a
compiler. Both paths agree to rounding."""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fdbd.kernels.threads import share, spans
from fdbd.util.torch_compat import is_plain, tracing

Folded = tuple[Tensor, Tensor, Tensor, Tensor]
"""normals (C, P), offsets (C,), center (P,) and floor (), as `fdbd.geometry.Folded` has them."""
WORTH_A_KERNEL = 1 << 19
"""Elements from which on a compiled kernel is used: below, plain torch takes less than about a
millisecond."""
OVERFLOW = {torch.float32: 1e30, torch.float64: 1e290}
"""A row whose squared norm is not below this is not trusted: it scores NaN, and the caller finds
out why."""
_CHUNK = 1 << 18
"""Elements that a thread takes at once: some fifty microseconds of work."""


def folded_score(
    features: Tensor,
    folded: Folded,
    divide: bool,
    *,
    predicted: Tensor | None = None,
    logits: Tensor | None = None,
) -> Tensor:
    """(N,) folded scores; NaN for rows with a NaN, an infinity or a norm that overflows.

    The class of a row is taken from `predicted` (N,) or, where that is None, from the argmax of
    `logits` (N, C).
    """
    rows, (classes, width) = features.shape[0], folded[0].shape
    given = ("features", "offsets", "center", "floor", "logits", "predicted classes")
    shapes = ((rows, width), (classes,), (width,), (), (rows, classes), (rows,))
    for name, tensor, shape in zip(given, (features, *folded[1:], logits, predicted), shapes):
        if tensor is not None and tensor.shape != shape:
            sizes = f"N = {rows}, P = {width}, C = {classes}"
            raise ValueError(f"{name} have shape {tuple(tensor.shape)}, expected {shape}: {sizes}")
    if predicted is None:
        assert logits is not None
        predicted = argmax(logits)
    elif rows and not tracing() and not 0 <= int(predicted.min()) <= int(predicted.max()) < classes:
        raise IndexError(f"a predicted class is outside 0…{classes - 1}, the classes of the head")
    predicted = predicted.to(features.device, torch.int64)
    kernel = _kernel("score_rows", features, *folded)
    if kernel is None:
        scores = plain_score(features, predicted, folded, divide)
    else:
        scores = _run_score(kernel, features, predicted, folded, divide)
    # The norm tells at once whether all logits are finite; it may overflow, and no graph can look
    # at it.
    if logits is not None and (
        tracing() or not torch.isfinite(torch.linalg.vector_norm(logits.detach()))
    ):
        scores = torch.where(torch.isfinite(logits).all(dim=1), scores, torch.nan)
    return scores


def plain_score(features: Tensor, predicted: Tensor, folded: Folded, divide: bool) -> Tensor:
    """The definition of `folded_score` in plain torch: (N,) scores ``(normals[k]·d + offsets[k]) /
    max(‖d‖, floor)`` with d = features − center and k = predicted (N,), without the denominator
    where `divide` is False. NaN where d holds a NaN or an infinity, or is too large for the
    dtype."""
    normals, offsets, center, floor = folded
    deviation = features - center
    squares = deviation.square().sum(dim=1)
    score = (normals[predicted] * deviation).sum(dim=1) + offsets[predicted]
    if divide:
        score = score / torch.maximum(squares.sqrt(), floor)
    return torch.where(squares < OVERFLOW[features.dtype], score, torch.nan)


def column_sums(features: Tensor) -> Tensor:
    """(P,) float64 sums over the rows of (N, P), in one read of the features."""
    kernel = _kernel("add_rows", features)
    if kernel is None:
        return features.detach().to(torch.float64).sum(dim=0)
    rows, width = features.shape
    size = max(
        -(-rows // 32), _CHUNK // max(width, 1), 1
    )  # by N and P alone: the number of threads changes no digit
    values, sums = features.detach().contiguous().numpy(), np.zeros((-(-rows // size), width))
    share(spans(rows, size), lambda start, stop: kernel(values[start:stop], sums[start // size]))
    return torch.from_numpy(sums).sum(dim=0)


def compile_kernels(dtype: torch.dtype = torch.float32) -> None:
    """Compile the kernels for float32 or float64 ahead of their first use, or read them from
    numba's cache folder."""
    compiled = _compiled()
    if compiled is not None:
        one = torch.ones(1, 1, dtype=dtype, device="cpu")
        vector = one[0]
        _run_score(
            compiled.score_rows,
            one,
            torch.zeros(1, dtype=torch.int64),
            (one, vector, vector, vector[0]),
            True,
        )
        compiled.add_rows(one.numpy(), np.zeros(1))


def _run_score(
    kernel: Callable[..., None], features: Tensor, predicted: Tensor, folded: Folded, divide: bool
) -> Tensor:
    *arrays, floor = (tensor.detach().contiguous().numpy() for tensor in folded)
    values, classes = features.detach().contiguous().numpy(), predicted.contiguous().numpy()
    out = np.empty_like(values, shape=len(values))
    overflow = values.dtype.type(OVERFLOW[features.dtype])

    def score(start: int, stop: int) -> None:
        rows = slice(start, stop)
        kernel(values[rows], classes[rows], *arrays, floor[()], divide, overflow, out[rows])

    share(spans(len(values), max(1, _CHUNK // max(values.shape[1], 1))), score)
    return torch.from_numpy(out)


def argmax(logits: Tensor) -> Tensor:
    """(N,) index of a largest logit of each row; any index for a row with NaN. numpy's is
    vectorised, and three times as fast as torch's for many classes."""
    if not is_plain(logits) or logits.numel() < WORTH_A_KERNEL:
        return logits.argmax(dim=1)
    values = logits.detach().contiguous().numpy()
    out = np.empty(len(values), np.int64)
    parts = spans(len(values), max(1, _CHUNK // values.shape[1]))
    share(parts, lambda start, stop: np.argmax(values[start:stop], axis=1, out=out[start:stop]))
    return torch.from_numpy(out)


def _kernel(name: str, features: Tensor, *others: Tensor) -> Callable[..., None] | None:
    """A compiled kernel where these tensors are worth one and can be read by it, None otherwise."""
    if not is_plain(features, *others) or features.numel() < WORTH_A_KERNEL:
        return None
    compiled = _compiled()
    return None if compiled is None else getattr(compiled, name)


@cache
def _compiled() -> Any:
    """The module of compiled kernels, or None where ``NUMBA_DISABLE_JIT`` is set."""
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return None
    from fdbd.kernels import (
        compiled,  # numba takes a third of a second to import: only where it is used
    )

    return compiled
