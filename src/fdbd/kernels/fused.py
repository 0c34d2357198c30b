"""The folded score as one loop over each row: features are read once, nothing of their size is written.

Functions here take numpy arrays and a row range, and release the GIL; `dispatch` splits rows over threads.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

# Reassociation lets LLVM vectorise the sums. NaN and infinity keep their meaning (no nnan, no ninf): a row whose
# squared norm is not below `overflow` is handed back as NaN, and the caller finds out why.
_FASTMATH = {"reassoc", "contract", "arcp", "nsz"}

Array = NDArray[Any]


def _jit(function: Any) -> Any:
    return numba.njit(nogil=True, cache=True, fastmath=_FASTMATH, error_model="numpy")(function)


@_jit
def _row(row: Any, normal: Any, center: Any, offset: Any, floor: Any, divide: bool, overflow: Any) -> Any:
    distance = row[0] * 0
    squares = row[0] * 0
    for j in range(row.shape[0]):
        deviation = row[j] - center[j]
        distance += normal[j] * deviation
        squares += deviation * deviation
    if not squares < overflow:
        return squares * np.nan
    distance += offset
    if divide:
        return distance / max(np.sqrt(squares), floor)
    return distance


@_jit
def _argmax(row: Any) -> int:
    """Index of the first maximum; −1 when an entry is not finite."""
    poison = row[0] * 0
    for j in range(row.shape[0]):
        poison += row[j] * 0  # 0 for finite numbers, NaN for the rest
    if poison != 0:
        return -1
    best = 0
    largest = row[0]
    for j in range(1, row.shape[0]):
        if row[j] > largest:
            largest = row[j]
            best = j
    return best


@_jit
def score_predicted(
    features: Array,
    predicted: Array,
    normals: Array,
    offsets: Array,
    center: Array,
    floor: Any,
    divide: bool,
    overflow: Any,
    out: Array,
    start: int,
    stop: int,
) -> bool:
    """Fill out[start:stop] from predicted classes; False when a class index is out of range."""
    for i in range(start, stop):
        k = predicted[i]
        if k < 0 or k >= normals.shape[0]:
            return False
        out[i] = _row(features[i], normals[k], center, offsets[k], floor, divide, overflow)
    return True


@_jit
def score_logits(
    features: Array,
    logits: Array,
    normals: Array,
    offsets: Array,
    center: Array,
    floor: Any,
    divide: bool,
    overflow: Any,
    out: Array,
    start: int,
    stop: int,
) -> bool:
    """Fill out[start:stop], taking the argmax of each row of logits; NaN where a logit is not finite."""
    for i in range(start, stop):
        k = _argmax(logits[i])
        if k < 0:
            out[i] = np.nan
        else:
            out[i] = _row(features[i], normals[k], center, offsets[k], floor, divide, overflow)
    return True


@_jit
def sum_columns(features: Array, out: Array, start: int, stop: int) -> bool:
    """Add rows start to stop of features to out (P,), in float64."""
    i = start
    while i + 4 <= stop:  # four rows at a time: `out` is read and written once for all of them
        for j in range(features.shape[1]):
            out[j] += (
                np.float64(features[i, j])
                + np.float64(features[i + 1, j])
                + np.float64(features[i + 2, j])
                + np.float64(features[i + 3, j])
            )
        i += 4
    while i < stop:
        for j in range(features.shape[1]):
            out[j] += np.float64(features[i, j])
        i += 1
    return True
