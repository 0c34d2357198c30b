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
    bits: Any,
    positions: Any,
    normals: Any,
    offsets: Any,
    center: Any,
    floor: Any,
    divide: bool,
    overflow: Any,
    out: Any,
) -> None:
    """`dispatch.plain_score` of (N, P) features, written to `out` (N,).

    The class of a row is that of its first largest logit, of (N, C) logits; `bits` are the same
    memory as signed integers, `positions` the integers 0…C−1. If there are no columns of logits,
    the class is in `predicted` (N,).

    The largest logit is found among the bits, because LLVM vectorises the maximum of integers, but
    that of floats only where NaN has no meaning. Two positive floats are in the order of their
    bits, two negative ones in the opposite order, and the bits of negative ones are negative.
    """
    zero = features.dtype.type(0)
    num_logits = logits.shape[1]
    # One number as bits and as a float.
    largest_bits = np.empty(1, bits.dtype)
    largest = largest_bits.view(logits.dtype)
    for i in range(features.shape[0]):
        # Zero times a number is 0 if it is finite, else NaN.
        not_finite = zero
        if num_logits == 0:
            k = predicted[i]
        else:
            most = bits[i, 0]
            least = bits[i, 0]
            for c in range(num_logits):
                not_finite += zero * logits[i, c]
                most = max(most, bits[i, c])
                least = min(least, bits[i, c])
            largest_bits[0] = most if most >= 0 else least
            # Without a way out of the loop, LLVM vectorises the search, too. Floats are compared,
            # since zero has two patterns of bits.
            first = positions[-1]
            for c in range(num_logits):
                first = min(first, positions[c] if logits[i, c] == largest[0] else first)
            k = np.int64(first)
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
        is_trusted = squares < overflow and not_finite == zero
        out[i] = score if is_trusted else np.nan


@Kernel
def add_rows(features: Any, out: Any) -> None:
    """Add the rows of (N, P) features to `out` (P,) float64."""
    for i in range(features.shape[0]):
        for j in range(features.shape[1]):
            out[j] += np.float64(features[i, j])
