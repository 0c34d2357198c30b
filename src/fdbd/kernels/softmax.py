"""Softmax's sums in one read of the logits: no exponential is stored, none underflows, and non-finite rows show.

Exponentials are polynomials here, which vectorise: those of a C library are called one by one.
"""

from __future__ import annotations

from functools import cache
from math import factorial, log
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic, overload

from fdbd.kernels.block import CHUNK, DIVIDE, FEATURES, FLOOR, LAYOUT, OUT, ROWS, UNTRUSTED, WIDTH
from fdbd.kernels.fused import at, compiled, jit, kernel_of, take
from fdbd.kernels.team import Kernel

_FEW, _ROWS = 16, 64
"""Classes up to which as many rows are worked on at once."""
_TOGETHER = 2048
"""Logits that are looked through for NaN and infinity at once: short rows do not vectorise one by one."""


@intrinsic  # type: ignore[untyped-decorator]
def _as_real(_: Any, bits: Any) -> Any:
    """The float whose bits an integer holds."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return (types.float32 if bits == types.int32 else types.float64)(bits), codegen


def _exponential(x: Any) -> Any:
    """eˣ for x ≤ 0 whose exponential is a normal number, to the last digit or two: 2ⁿ·p(r) with x = n·ln 2 + r,
    |r| ≤ ln 2 / 2, and p the Taylor polynomial whose next term is below a digit."""
    raise NotImplementedError("compiled code only")


@overload(_exponential)  # type: ignore[untyped-decorator]
def _exponential_of(x: Any) -> Any:
    single = x == types.float32
    real, integer = (np.float32, np.int32) if single else (np.float64, np.int64)
    digits, bias, mantissa, degree = (9, 127, 23, 7) if single else (32, 1023, 52, 13)
    high = real(round(log(2) * 2**digits) / 2**digits)  # of so few digits that n times it is exact
    low = real(log(2) - float(high))
    inverse, half = real(1 / log(2)), real(0.5)
    coefficients = tuple(real(1 / factorial(k)) for k in range(degree, -1, -1))

    def exponential(x: Any) -> Any:
        n = integer(x * inverse - half)  # towards zero, so to the nearest, since x is not positive
        r = (x - real(n) * high) - real(n) * low
        value = coefficients[0]
        for k in range(1, len(coefficients)):
            value = value * r + coefficients[k]
        return value * _as_real(integer(integer(n + integer(bias)) << integer(mantissa)))

    return exponential


def _strict(function: Any) -> Any:
    """Fused products are welcome, reassociation is not: it would melt the high and the low part of ln 2 into one."""
    return compiled(numba.njit, function, fastmath={"contract"})


def _finite(function: Any) -> Any:
    """For rows without NaN, which is what lets a maximum vectorise."""
    return compiled(numba.njit, function, fastmath={"reassoc", "nnan", "nsz"})


@jit
def _is_finite(row: Any) -> Any:
    zeros = row.dtype.type(0)
    for j in range(row.shape[0]):
        zeros += row[j] * row.dtype.type(0)  # NaN for NaN and infinity
    return zeros == 0


@_finite
def _largest(row: Any) -> Any:
    largest = row[0]
    for j in range(1, row.shape[0]):
        largest = row[j] if row[j] > largest else largest
    return largest


@_strict
def _power(x: Any) -> Any:
    return _exponential(x)


@jit
def _sums(row: Any, largest: Any, scale: Any, least: Any) -> Any:
    total = weighted = row.dtype.type(0)
    for j in range(row.shape[0]):
        exponent = max((row[j] - largest) * scale, least)
        power = _power(exponent)
        total += power
        weighted += power * exponent
    return total, weighted


@jit
def _few_classes(logits: Any, start: int, scale: Any, least: Any, out: Any, tile: Any) -> bool:
    """OUT of up to `_ROWS` rows of few classes from `start` on, and whether all are finite. They are turned first, so
    that neighbours in memory are samples, of which there are enough to vectorise."""
    count, classes = min(_ROWS, logits.shape[0] - start), logits.shape[1]
    largest, zeros, total, weighted = tile[classes], tile[classes + 1], tile[classes + 2], tile[classes + 3]
    for i in range(count):
        for c in range(classes):
            tile[c, i] = logits[start + i, c]
    for i in range(_ROWS):
        largest[i], zeros[i] = tile[0, i], tile[0, i] * 0
        total[i] = weighted[i] = 0
    for c in range(1, classes):
        for i in range(_ROWS):
            largest[i] = tile[c, i] if tile[c, i] > largest[i] else largest[i]
            zeros[i] += tile[c, i] * 0
    for c in range(classes):
        for i in range(_ROWS):
            exponent = max((tile[c, i] - largest[i]) * scale, least)
            power = _power(exponent)
            total[i] += power
            weighted[i] += power * exponent
    is_clean = True
    for i in range(count):
        if zeros[i] == 0:
            out[0, start + i], out[1, start + i], out[2, start + i] = largest[i], total[i], weighted[i]
        else:
            out[0, start + i] = out[1, start + i] = out[2, start + i] = np.nan
            is_clean = False
    return is_clean


@cache
def softmax(dtype: torch.dtype) -> Kernel:
    """OUT (3, N): of each row the largest logit m, Σ e^s and Σ s·e^s with s = (logit − m)·FLOOR; (N,) the first alone
    unless DIVIDE is set. NaN where a logit is not finite."""
    real = np.float32 if dtype == torch.float32 else np.float64
    least, nan = real(-86 if dtype == torch.float32 else -707), real(np.nan)
    layout = LAYOUT

    def kernel(block: Any) -> None:
        slots = numba.carray(block, len(layout))
        rows, width = slots[ROWS], slots[WIDTH]
        logits = numba.carray(at(slots[FEATURES]), (rows, width), real)
        values = numba.carray(at(slots[FEATURES]), rows * width, real)
        scale = numba.carray(at(slots[FLOOR]), 1, real)[0]
        out = numba.carray(at(slots[OUT]), (3, rows), real)
        has_sums, untrusted = slots[DIVIDE] != 0, False
        together = max(1, _TOGETHER // width)
        tile = np.zeros((_FEW + 4, _ROWS), real)
        while True:
            start = take(slots) * slots[CHUNK]
            if start >= rows:
                break
            stop = min(start + slots[CHUNK], rows)
            if has_sums and width <= _FEW:
                for i in range(start, stop, _ROWS):
                    untrusted |= not _few_classes(logits[:stop], i, scale, least, out, tile)
                continue
            for first in range(start, stop, together):
                last = min(first + together, stop)
                are_finite = _is_finite(values[first * width : last * width])
                for i in range(first, last):
                    is_finite = are_finite or _is_finite(logits[i])
                    untrusted |= not is_finite
                    out[0, i] = largest = _largest(logits[i]) if is_finite else nan
                    if has_sums:
                        out[1, i], out[2, i] = _sums(logits[i], largest, scale, least) if is_finite else (nan, nan)
        if untrusted:
            slots[UNTRUSTED] = 1

    return kernel_of(kernel)
