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

from .block import CHUNK, DIVIDE, FEATURES, FLOOR, OUT, ROWS, SLOTS, UNTRUSTED, WIDTH
from .fused import at, compiled, jit, kernel_of, take
from .team import Kernel


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
    for j in range(row.shape[0]):
        largest = max(largest, row[j])
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


@cache
def softmax(dtype: torch.dtype) -> Kernel:
    """OUT (3, N): of each row the largest logit m, Σ e^s and Σ s·e^s with s = (logit − m)·FLOOR; only the first unless
    DIVIDE is set. The largest is NaN where a logit is not finite."""
    real = np.float32 if dtype == torch.float32 else np.float64
    least = real(-86 if dtype == torch.float32 else -707)

    def kernel(block: Any) -> None:
        slots = numba.carray(block, SLOTS)
        rows, width = slots[ROWS], slots[WIDTH]
        logits = numba.carray(at(slots[FEATURES]), (rows, width), real)
        scale = numba.carray(at(slots[FLOOR]), 1, real)[0]
        out = numba.carray(at(slots[OUT]), (3, rows), real)
        has_sums, untrusted = slots[DIVIDE] != 0, False
        while True:
            start = take(slots) * slots[CHUNK]
            if start >= rows:
                break
            for i in range(start, min(start + slots[CHUNK], rows)):
                if not _is_finite(logits[i]):
                    untrusted = True
                    out[0, i] = out[1, i] = out[2, i] = np.nan
                    continue
                out[0, i] = _largest(logits[i])
                if has_sums:
                    out[1, i], out[2, i] = _sums(logits[i], out[0, i], scale, least)
        if untrusted:
            slots[UNTRUSTED] = 1

    return kernel_of(kernel)
