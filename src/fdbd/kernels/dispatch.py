"""Large inputs in CPU memory go to the compiled kernels, everything else (small inputs, gradients,
other devices, compiled and exported graphs) to their definitions in plain torch. The same call
takes the same path each time, and a service that scores a few samples at a time never waits for a
compiler. Both paths agree to rounding."""

import math
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fdbd.kernels.few import OVERFLOW, FewRows, Folded
from fdbd.kernels.threads import share, spans
from fdbd.util.torch_compat import is_out_of_sight, is_plain, tracing

WORTH_A_KERNEL = 1 << 19
"""Elements from which on a compiled kernel is used: below, plain torch takes less than about a
millisecond."""
_CHUNK = 1 << 19
"""Elements that a thread takes at once: some hundred microseconds of work, to which a call adds
little."""


def folded_score(
    features: Tensor,
    folded: Folded,
    divide: bool,
    *,
    predicted: Tensor | None = None,
    logits: Tensor | None = None,
) -> Tensor:
    """(N,) folded scores; NaN for rows with a NaN, an infinity or a norm that overflows.

    The class of a row is taken from `predicted` (N,) or, if that is None, from the argmax of
    `logits` (N, C).
    """
    _check_shapes(features, folded, predicted, logits)
    if predicted is None:
        assert logits is not None
        scores = _score_in_one_go(features, logits, folded, divide)
        if scores is not None:
            return scores
    classes, logits_are_finite = _classes(features, folded, predicted, logits)
    kernel = _score_kernel(features, folded)
    if kernel is None:
        scores = plain_score(features, classes, folded, divide)
    else:
        scores = _run_score(kernel, features, classes, None, folded, divide)
    if logits is not None and not logits_are_finite:
        scores = torch.where(torch.isfinite(logits).all(dim=1), scores, torch.nan)
    return scores


def _score_in_one_go(
    features: Tensor, logits: Tensor, folded: Folded, divide: bool
) -> Tensor | None:
    """The scores, if one program finds both the classes and the scores: numpy for few rows, the
    compiled kernel for many; else None."""
    # Only numbers that can be looked at can go to numpy.
    if not is_out_of_sight(features) and features.numel() < WORTH_A_KERNEL:
        return FewRows().score(features, logits, folded, divide)
    kernel = _score_kernel(features, folded)
    # The kernel finds the largest of float32 numbers alone.
    can_find_classes = logits.dtype is torch.float32 and logits.shape[1] > 0
    if kernel is None or not can_find_classes or not is_plain(features, logits):
        return None
    return _run_score(kernel, features, None, logits, folded, divide)


def _score_kernel(features: Tensor, folded: Folded) -> Callable[..., None] | None:
    """The compiled kernel of the score, if these tensors are worth one and can be read by it."""
    # A graph is for any number of rows, so their number must not decide.
    if tracing():
        return None
    return _kernel("score_rows", features, *folded)


def _classes(
    features: Tensor, folded: Folded, predicted: Tensor | None, logits: Tensor | None
) -> tuple[Tensor, bool]:
    """(N,) the class of each row, on the features' device, and whether all logits that were given
    are known to be finite."""
    is_hidden = is_out_of_sight(features)
    if predicted is None:
        assert logits is not None
        classes = argmax(logits)
    else:
        classes = predicted
        if logits is None and not is_hidden:
            _check_classes(predicted, len(folded[1]))
    # Logits that cannot be looked at count as not finite: they are checked row by row.
    are_finite = logits is None or (not is_hidden and _is_finite(logits))
    return classes.to(features.device, torch.int64), are_finite


def _check_shapes(
    features: Tensor, folded: Folded, predicted: Tensor | None, logits: Tensor | None
) -> None:
    """A ValueError that names the tensor whose shape does not fit."""
    rows = features.shape[0]
    classes, width = folded[0].shape
    _, offsets, center, floor = folded
    fits = (
        features.shape == (rows, width)
        and offsets.shape == (classes,)
        and center.shape == (width,)
        and floor.shape == ()
        and (logits is None or logits.shape == (rows, classes))
        and (predicted is None or predicted.shape == (rows,))
    )
    if fits:
        return
    # Only now, since a score of a few rows takes less time than making this table.
    expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "features": (features, (rows, width)),
        "offsets": (offsets, (classes,)),
        "center": (center, (width,)),
        "floor": (floor, ()),
        "logits": (logits, (rows, classes)),
        "predicted classes": (predicted, (rows,)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{name} have shape {tuple(tensor.shape)}, expected {shape}: "
                f"N = {rows}, P = {width}, C = {classes}"
            )


def _check_classes(predicted: Tensor, classes: int) -> None:
    """An IndexError for classes that the head does not have."""
    if not len(predicted):
        return
    if int(predicted.min()) < 0 or int(predicted.max()) >= classes:
        raise IndexError(f"a predicted class is outside 0…{classes - 1}, the classes of the head")


def plain_score(features: Tensor, predicted: Tensor, folded: Folded, divide: bool) -> Tensor:
    """The definition of `folded_score` in plain torch: (N,) scores ``(normals[k]·d + offsets[k]) /
    max(‖d‖, floor)`` with d = features − center and k = predicted (N,), without the denominator
    if `divide` is False. NaN for a row whose d holds a NaN or an infinity, or is too large for the
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
    # The size of a part depends on N and P alone, so that the number of threads changes no digit.
    size = max(math.ceil(rows / 32), _CHUNK // max(width, 1), 1)
    values = features.detach().contiguous().numpy()
    sums = np.zeros((math.ceil(rows / size), width))

    def add(start: int, stop: int) -> None:
        kernel(values[start:stop], sums[start // size])

    share(spans(rows, size), add)
    return torch.from_numpy(sums).sum(dim=0)


def compile_kernels(dtype: torch.dtype = torch.float32) -> None:
    """Compile the kernels for float32 or float64 ahead of their first use, or read them from
    numba's cache folder."""
    compiled = _compiled()
    if compiled is None:
        return
    one = torch.ones(1, 1, dtype=dtype, device="cpu")
    vector = one[0]
    scalar = vector[0]
    first_class = torch.zeros(1, dtype=torch.int64)
    folded = (one, vector, vector, scalar)
    _run_score(compiled.score_rows, one, first_class, None, folded, True)
    compiled.add_rows(one.numpy(), np.zeros(1))


def _run_score(
    kernel: Callable[..., None],
    features: Tensor,
    predicted: Tensor | None,
    logits: Tensor | None,
    folded: Folded,
    divide: bool,
) -> Tensor:
    """The kernel's scores, of predicted classes or, if these are None, of float32 logits."""
    arrays = [tensor.detach().contiguous().numpy() for tensor in folded]
    normals, offsets, center, floor = arrays
    values = features.detach().contiguous().numpy()
    # The kernel is given both, so that it is compiled once: what is not there is empty.
    classes = np.empty(0, np.int64)
    if predicted is not None:
        classes = predicted.contiguous().numpy()
    bits = np.empty((len(values), 0), np.int32)
    if logits is not None:
        bits = logits.detach().contiguous().numpy().view(np.int32)
    out = np.empty_like(values, shape=len(values))
    smallest = floor[()]
    overflow = values.dtype.type(OVERFLOW[features.dtype])

    def score(start: int, stop: int) -> None:
        rows = slice(start, stop)
        kernel(
            values[rows], classes[rows], bits[rows],
            normals, offsets, center, smallest, divide, overflow, out[rows],
        )  # fmt: skip

    size_of_row = values.shape[1] + bits.shape[1]
    share(spans(len(values), max(1, _CHUNK // max(size_of_row, 1))), score)
    return torch.from_numpy(out)


def argmax(logits: Tensor) -> Tensor:
    """(N,) index of a largest logit of each row; any index for a row with NaN. numpy's is
    vectorised, and three times as fast as torch's for many classes."""
    if not is_plain(logits) or logits.numel() < WORTH_A_KERNEL:
        return logits.argmax(dim=1)
    values = logits.detach().contiguous().numpy()
    classes = np.empty(len(values), np.int64)

    def find(start: int, stop: int) -> None:
        np.argmax(values[start:stop], axis=1, out=classes[start:stop])

    share(spans(len(values), max(1, _CHUNK // values.shape[1])), find)
    return torch.from_numpy(classes)


def _is_finite(logits: Tensor) -> bool:
    """Whether all logits are finite, and of moderate size: the norm of all is found ten times as
    fast as a mask, and is finite only then."""
    return bool(torch.isfinite(torch.linalg.vector_norm(logits.detach())))


def _kernel(name: str, features: Tensor, *others: Tensor) -> Callable[..., None] | None:
    """A compiled kernel if these tensors are worth one and can be read by it, None otherwise."""
    # The size first: it is found a hundred times as fast as the rest.
    if features.numel() < WORTH_A_KERNEL or not is_plain(features, *others):
        return None
    compiled = _compiled()
    return None if compiled is None else getattr(compiled, name)


@cache
def _compiled() -> Any:
    """The module of compiled kernels, or None if ``NUMBA_DISABLE_JIT`` is set."""
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return None
    # numba takes a third of a second to import: only when it is used.
    from fdbd.kernels import compiled

    return compiled
