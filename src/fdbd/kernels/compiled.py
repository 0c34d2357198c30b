"""The kernels that numba compiles: each reads the features once and writes nothing of their size.

Compilation happens at the first call and takes about a second per kernel and dtype; the machine
code is kept in numba's cache folder (``NUMBA_CACHE_DIR``). If that folder cannot be written, each
process compiles again.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

# Reassociation lets LLVM vectorise the sums. NaN and infinity keep their meaning: neither `nnan`
# nor `ninf`.
_FASTMATH = {"reassoc", "contract", "arcp", "nsz"}
_MAGNITUDE = np.int32(0x7FFFFFFF)
"""All bits of a float32 but its sign."""
_INFINITY = np.int32(0x7F800000)
"""The bits of infinity; those of NaN are above."""
_POSITION = np.int64(0xFFFFFFFF)
_LEAST = np.iinfo(np.int64).min


class Kernel:
    """A Python function that runs as machine code, without the GIL."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        try:
            self.compiled = self._compile(cache=True)
        except RuntimeError:
            # numba finds no folder to cache in.
            self.compiled = self._compile(cache=False)

    def _compile(self, cache: bool) -> Any:
        return numba.njit(nogil=True, error_model="numpy", fastmath=_FASTMATH, cache=cache)(
            self.function
        )

    def __call__(self, *arguments: Any) -> None:
        try:
            self.compiled(*arguments)
        except OSError:
            # The cache folder is full or went away.
            self.compiled = self._compile(cache=False)
            self.compiled(*arguments)


@Kernel
def score_rows(
    features: Any,
    predicted: Any,
    logits: Any,
    normals: Any,
    offsets: Any,
    center: Any,
    floor: Any,
    divide: bool,
    overflow: Any,
    out: Any,
) -> None:
    """`dispatch.plain_score` of (N, P) features, written to `out` (N,).

    The class of a row is that of its first largest logit. `logits` (N, C) are the bits of float32
    numbers as int32; if there are no columns, the class is in `predicted` (N,).
    """
    zero = features.dtype.type(0)
    num_logits = logits.shape[1]
    for i in range(features.shape[0]):
        largest_magnitude = np.int32(0)
        if num_logits == 0:
            k = predicted[i]
        else:
            # The largest pair of a logit and its position from the end, as one integer: the maximum
            # of integers is vectorised, and a search for the largest float is not.
            largest = np.int64(_LEAST)
            for c in range(num_logits):
                # The bits of a float are a sign and a magnitude. As an integer with this sign they
                # are in the order of the floats, and both zeros are equal.
                magnitude = logits[i, c] & _MAGNITUDE
                value = magnitude if logits[i, c] >= 0 else -magnitude
                largest = max(largest, (np.int64(value) << 32) | np.int64(num_logits - c))
                largest_magnitude = max(largest_magnitude, magnitude)
            k = num_logits - (largest & _POSITION)
        row = features[i]
        normal = normals[k]
        inner = zero
        squares = zero
        for j in range(row.shape[0]):
            deviation = row[j] - center[j]
            inner += normal[j] * deviation
            squares += deviation * deviation
        score = inner + offsets[k]
        if divide:
            score /= max(np.sqrt(squares), floor)
        is_trusted = squares < overflow and largest_magnitude < _INFINITY
        out[i] = score if is_trusted else np.nan


@Kernel
def add_rows(features: Any, out: Any) -> None:
    """Add the rows of (N, P) features to `out` (P,) float64."""
    for i in range(features.shape[0]):
        for j in range(features.shape[1]):
            out[j] += np.float64(features[i, j])
