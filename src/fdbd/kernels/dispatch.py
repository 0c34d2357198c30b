"""Which path a tensor takes, and what the kernels are handed."""

from __future__ import annotations

from array import array
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fdbd.kernels import team, twin
from fdbd.kernels.block import DIVIDE, FEATURES, FLOOR, NORMALS, OFFSETS, OUT, OUT_OF_RANGE, SLOTS, UNTRUSTED

CHUNK = 1 << 16
"""Elements that a thread takes at once: some ten microseconds of work."""
_WORTH_A_TEAM = 1 << 17
"""Fewer elements than this are done before a second thread has woken up."""
_PARTS = 32
"""A sum over rows is that of at most so many parts, which depend on N alone: the number of threads changes no digit."""

_FEW_CLASSES = 16
"""Up to so many inner products a row are faster one by one than as a matrix product."""

_compiled: dict[torch.dtype, tuple[team.Kernel, team.Kernel, team.Kernel]] = {}
"""The score, softmax's sums and a head's product, once they are warm."""


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
) -> tuple[Tensor, bool]:
    """(N,) folded scores, and whether all of them are numbers: rows with a NaN, an infinity or a norm that overflows
    come back as NaN. While a graph is recorded nobody can look, and the second value is False.

    The class of a row is taken from `predicted` (N,) or, where that is None, from the argmax of `logits` (N, C).
    """
    from_logits = predicted is None
    given = logits if predicted is None else predicted
    assert given is not None
    rows, (classes, width) = features.shape[0], normals.shape
    if features.shape != (rows, width):
        raise ValueError(f"features have shape {tuple(features.shape)}, expected (N, {width}): the head's input")
    if given.shape != ((rows, classes) if from_logits else (rows,)):
        expected = f"logits of shape ({rows}, {classes})" if from_logits else f"predicted classes of shape ({rows},)"
        raise ValueError(f"{rows} rows of features need {expected}, got {tuple(given.shape)}")
    kernel = _warm(features.dtype, 0)
    if kernel is None or not fits_kernel(features, normals, offsets, center, floor, given if from_logits else features):
        twin_score = twin.folded_score_of_logits if from_logits else twin.folded_score
        scores = twin_score(features, given, normals, offsets, center, floor, divide)
        return scores, not tracing() and not bool(scores.isnan().any())
    if offsets.shape != (classes,) or center.shape != (width,) or floor.shape != ():  # the kernel cannot tell
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (offsets, center, floor))
        raise ValueError(f"offsets, center and floor have shapes {shapes}, expected ({classes},), ({width},), ()")
    if not from_logits and not (given.dtype is torch.int64 and given.is_cpu):
        given = given.to("cpu", torch.int64)
    out = features.new_empty(rows)
    tensors = [tensor.contiguous() for tensor in (features, given, normals, offsets, center, floor)]
    block = [0, _rows_of_chunk(width), rows, width, classes, from_logits, divide, 0, 0]
    block += [tensor.data_ptr() for tensor in tensors]
    block.append(out.data_ptr())
    slots = run(kernel, block, rows * (width + classes * from_logits))
    if slots[OUT_OF_RANGE]:
        raise IndexError(f"a predicted class is outside 0…{classes - 1}, the classes of the head")
    return out, not slots[UNTRUSTED]


def softmax_sums(
    logits: Tensor, temperature: float | Tensor = 1.0, largest_alone: bool = False
) -> tuple[tuple[Tensor, Tensor, Tensor], bool] | None:
    """(N,) each: the largest logit m of each row, Σ e^s and Σ s·e^s with s = (logit − m) / temperature; and whether all
    rows are finite: the others are NaN. Where only the largest is wanted, it stands for the sums too. None where the
    kernel cannot look at these logits (N, C)."""
    kernel = _warm(logits.dtype, 1)
    if kernel is None or not logits.shape[1] or not fits_kernel(logits):
        return None
    rows, classes = logits.shape
    logits = logits.contiguous()
    out = logits.new_empty(rows if largest_alone else (3, rows))
    scale = array("f" if logits.dtype is torch.float32 else "d", (1 / float(temperature),))
    block = [0, max(1, CHUNK // classes), rows, classes, *[0] * (SLOTS - 4)]
    block[DIVIDE] = not largest_alone
    block[FEATURES], block[FLOOR], block[OUT] = logits.data_ptr(), scale.buffer_info()[0], out.data_ptr()
    is_clean = not run(kernel, block, rows * classes)[UNTRUSTED]
    largest, total, weighted = (out, out, out) if largest_alone else out.unbind()
    return (largest, total, weighted), is_clean


def linear(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(N, C) features (N, P) · weightᵀ (C, P) + bias (C,)."""
    kernel = _warm(features.dtype, 2)
    if (
        kernel is None
        or not 0 < weight.shape[0] <= _FEW_CLASSES
        or features.ndim != 2
        or features.shape[1] != weight.shape[1]
        or bias.shape != weight.shape[:1]
        or not fits_kernel(features, weight, bias)
    ):
        return torch.nn.functional.linear(features, weight, bias)
    rows, (classes, width) = features.shape[0], weight.shape
    tensors = [tensor.contiguous() for tensor in (features, weight, bias)]
    out = features.new_empty(rows, classes)
    block = [0, max(1, CHUNK // max(width, 1)), rows, width, classes, *[0] * (SLOTS - 5)]
    block[FEATURES], block[NORMALS], block[OFFSETS] = (tensor.data_ptr() for tensor in tensors)
    block[OUT] = out.data_ptr()
    run(kernel, block, features.numel())
    return out


def column_sums(features: Tensor) -> Tensor:
    """(P,) float64 sums over the rows of (N, P), in one read of the features."""
    if not fits_kernel(features):
        return features.detach().to(torch.float64).sum(dim=0)
    rows, width = features.shape
    features = features.contiguous()
    chunk = max(-(-rows // _PARTS), CHUNK // max(width, 1), 1)
    out = torch.zeros(-(-rows // chunk), width, dtype=torch.float64, device="cpu")
    block = [0, chunk, rows, width, *[0] * (SLOTS - 4)]
    block[FEATURES], block[OUT] = features.data_ptr(), out.data_ptr()
    run(_fused().column_sums(features.dtype), block, features.numel())
    return out.sum(dim=0)


def warm_up(dtype: torch.dtype = torch.float32) -> None:
    """Compile the kernels for `dtype`, or read them from the disk cache. What was never warmed up takes the twin's
    path."""
    if dtype not in _compiled:
        fused = _fused()
        fused.column_sums(dtype)
        from fdbd.kernels import product, softmax

        _compiled[dtype] = fused.score(dtype), softmax.softmax(dtype), product.linear(dtype)


def tracing() -> bool:
    """Whether tensors stand for others now, so that no number can be looked at: under compile, export, vmap, jit.trace,
    make_fx and every other mode that watches the operations."""
    if torch.compiler.is_compiling():
        return True
    c = torch._C
    return (
        c._len_torch_dispatch_stack() > 0
        or c._functorch.peek_interpreter_stack() is not None
        or c._get_tracing_state() is not None
    )


def fits_kernel(*tensors: Tensor) -> bool:
    """Whether plain CPU memory of one supported dtype lies behind these tensors, and no derivative is asked for."""
    dtype = tensors[0].dtype
    if (dtype is not torch.float32 and dtype is not torch.float64) or tracing() or forward_ad._current_level >= 0:
        return False
    recording = torch.is_grad_enabled()
    for tensor in tensors:
        if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
            return False  # subclasses: fake tensors, distributed tensors
        if tensor.dtype is not dtype or not tensor.is_cpu or tensor.is_neg() or (recording and tensor.requires_grad):
            return False
    return True


def _rows_of_chunk(width: int) -> int:
    return max(4, CHUNK // max(width, 1) // 4 * 4)


def run(kernel: team.Kernel, block: list[int], elements: int) -> Any:
    """The block as the kernel left it."""
    slots = array("q", block)
    team.share(kernel, slots.buffer_info()[0], torch.get_num_threads() if elements >= _WORTH_A_TEAM else 1)
    return slots


def _warm(dtype: torch.dtype, number: int) -> team.Kernel | None:
    """One of the compiled kernels, or None: no user's call waits for a compiler."""
    kernels = _compiled.get(dtype)
    return None if kernels is None else kernels[number]


@cache
def _fused() -> Any:
    from fdbd.kernels import fused  # numba takes a third of a second to import: only where a score is computed

    return fused
