"""The arithmetic of the kernels: features are read once, nothing of their size is written.

Each kernel is a C function of one pointer, compiled by numba on first use and kept on disk. The pointer leads to
the slots that `block` names and `dispatch` fills.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from fdbd.kernels import twin
from fdbd.kernels.block import (
    CENTER,
    CHUNK,
    CLASSES,
    DIVIDE,
    FEATURES,
    FLOOR,
    FROM_LOGITS,
    GIVEN,
    LAYOUT,
    NORMALS,
    OFFSETS,
    OUT,
    OUT_OF_RANGE,
    ROWS,
    UNTRUSTED,
    WIDTH,
)
from fdbd.kernels.team import Kernel

# Reassociation lets LLVM vectorise the sums. NaN and infinity keep their meaning (no nnan, no ninf): a row whose
# squared norm is not below `overflow` is handed back as NaN, and the caller finds out why.
_FASTMATH = {"reassoc", "contract", "arcp", "nsz"}

_CACHED = 16 << 20  # bytes of normals that stay in a processor's cache
_PIECE = 128  # logits searched at once: enough to vectorise, few enough to go through the best piece again


def compiled(decorator: Any, function: Any, **options: Any) -> Any:
    """`function` under a decorator of numba's, its machine code kept on disk."""
    options |= {"nogil": True, "error_model": "numpy"}
    try:
        return decorator(cache=True, **options)(function)
    except (RuntimeError, OSError):  # no folder that can be written to: compile in each process
        return decorator(**options)(function)


def jit(function: Any) -> Any:
    """A function for kernels to call."""
    return compiled(numba.njit, function, fastmath=_FASTMATH)


def kernel_of(function: Any, exact: bool = False) -> Kernel:
    """A function of one pointer, compiled; `exact` where each operation must be rounded as torch rounds it."""

    def decorator(**options: Any) -> Any:
        return numba.cfunc(types.void(types.CPointer(types.int64)), **options)

    return Kernel(compiled(decorator, function, **({} if exact else {"fastmath": _FASTMATH})))


@intrinsic  # type: ignore[untyped-decorator]
def take(_: Any, slots: Any) -> Any:
    """slots[0], which is NEXT, and add one to it: atomically, so that each chunk goes to one thread."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.atomic_rmw("add", array.data, context.get_constant(types.int64, 1), "monotonic")

    return types.int64(slots), codegen


@intrinsic  # type: ignore[untyped-decorator]
def at(_: Any, address: Any) -> Any:
    """The pointer that an address stands for."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(address), codegen


@jit
def _row(row: Any, normal: Any, center: Any) -> Any:
    """Of a row less the center: the inner product with its normal, and the squared norm."""
    inner = squares = row.dtype.type(0)
    for j in range(row.shape[0]):
        deviation = row[j] - center[j]
        inner += normal[j] * deviation
        squares += deviation * deviation
    return inner, squares


@jit
def _four_rows(a: Any, b: Any, c: Any, d: Any, u: Any, v: Any, w: Any, x: Any, center: Any) -> Any:
    """`_row` of four rows a to d, whose normals are u to x."""
    ua = vb = wc = xd = aa = bb = cc = dd = a.dtype.type(0)
    for j in range(a.shape[0]):
        aj, bj, cj, dj = a[j] - center[j], b[j] - center[j], c[j] - center[j], d[j] - center[j]
        ua += u[j] * aj
        vb += v[j] * bj
        wc += w[j] * cj
        xd += x[j] * dj
        aa += aj * aj
        bb += bj * bj
        cc += cj * cj
        dd += dj * dj
    return (ua, vb, wc, xd), (aa, bb, cc, dd)


@jit
def _argmax(row: Any, bits: Any, integer: Any, sign: Any, mask: Any, infinity: Any) -> int:
    """Index of the first maximum of a row; −1 when an entry is not finite. `bits` is the row as integers.

    Floats are ordered like their bits, once those of negative numbers are flipped, and unlike a maximum of floats,
    where NaN has no place in the order, one of integers vectorises.
    """
    width = row.shape[0]
    best = 0
    if width <= _PIECE // 2:
        value = row[0]
        for j in range(width):
            if not abs(row[j]) < np.inf:
                return -1
            if row[j] > value:
                value, best = row[j], j
        return best
    largest = integer(~mask)
    for start in range(0, width, _PIECE):
        top, extreme = integer(~mask), integer(0)
        for j in range(start, min(start + _PIECE, width)):
            extreme = max(extreme, integer(bits[j] & mask))
            top = max(top, integer(bits[j] ^ integer(integer(bits[j] >> sign) & mask)))
        if extreme >= infinity:
            return -1
        if top > largest:
            largest, best = top, start
    if largest == 0:
        best, largest = 0, integer(-1)  # +0 wins: a −0 before it is as large
    while integer(bits[best] ^ integer(integer(bits[best] >> sign) & mask)) < largest:
        best += 1
    return best


@cache
def score(dtype: torch.dtype) -> Kernel:
    """Scores of rows whose class is given, or is the argmax of their logits."""
    real, integer = (np.float32, np.int32) if dtype == torch.float32 else (np.float64, np.int64)
    sign = np.iinfo(integer).bits - 1
    mask, infinity = integer(np.iinfo(integer).max), real(np.inf).view(integer)
    overflow, nan, zero = real(twin.OVERFLOW[dtype]), real(np.nan), real(0)
    far = _CACHED // np.dtype(real).itemsize
    layout = LAYOUT

    def kernel(block: Any) -> None:
        slots = numba.carray(block, len(layout))
        rows, width, classes = slots[ROWS], slots[WIDTH], slots[CLASSES]
        features = numba.carray(at(slots[FEATURES]), (rows, width), real)
        given = numba.carray(at(slots[GIVEN]), rows, np.int64)
        logits = numba.carray(at(slots[GIVEN]), (rows, classes), real)
        bits = numba.carray(at(slots[GIVEN]), (rows, classes), integer)
        normals = numba.carray(at(slots[NORMALS]), (classes, width), real)
        offsets = numba.carray(at(slots[OFFSETS]), classes, real)
        center = numba.carray(at(slots[CENTER]), width, real)
        floor = numba.carray(at(slots[FLOOR]), 1, real)[0]
        out = numba.carray(at(slots[OUT]), rows, real)
        from_logits, divide = slots[FROM_LOGITS] != 0, slots[DIVIDE] != 0
        untrusted = out_of_range = False
        # Normals that no cache holds come from memory in no order: with four rows at once, more are on their way.
        # Otherwise features are there soonest one after the other. A row's digits depend on the head alone.
        is_far = classes * width > far
        predicted, found = np.zeros(4, np.int64), ((zero, zero, zero, zero), (zero, zero, zero, zero))
        while True:
            start = take(slots) * slots[CHUNK]
            if start >= rows:
                break
            stop = min(start + slots[CHUNK], rows)
            for first in range(start, stop, 4):
                last = min(4, stop - first) - 1
                for i in range(last + 1):
                    row = first + i
                    k = _argmax(logits[row], bits[row], integer, sign, mask, infinity) if from_logits else given[row]
                    predicted[i] = k if 0 <= k < classes else -1
                if is_far:
                    # Where fewer than four are left, the last one stands in for the others.
                    r0, r1, r2, r3 = first, first + min(1, last), first + min(2, last), first + last
                    k0, k1, k2, k3 = predicted[0], predicted[r1 - first], predicted[r2 - first], predicted[last]
                    found = _four_rows(
                        features[r0], features[r1], features[r2], features[r3],
                        normals[max(k0, 0)], normals[max(k1, 0)], normals[max(k2, 0)], normals[max(k3, 0)], center,
                    )  # fmt: skip
                for i in range(last + 1):
                    k = predicted[i]
                    if is_far:
                        inner, squares = found[0][i], found[1][i]
                    else:
                        inner, squares = _row(features[first + i], normals[max(k, 0)], center)
                    if k < 0:
                        out_of_range = not from_logits
                    is_right = k >= 0 and squares < overflow
                    distance = inner + offsets[max(k, 0)]
                    score = distance / max(np.sqrt(squares), floor) if divide else distance
                    out[first + i] = score if is_right else nan
                    untrusted = untrusted or np.isnan(out[first + i])
        if untrusted:  # several threads may write, but all write the same
            slots[UNTRUSTED] = 1
        if out_of_range:
            slots[OUT_OF_RANGE] = 1

    return kernel_of(kernel)


@cache
def column_sums(dtype: torch.dtype) -> Kernel:
    """Float64 sums over the rows of each chunk, added to OUT."""
    real = np.float32 if dtype == torch.float32 else np.float64
    layout = LAYOUT

    def kernel(block: Any) -> None:
        slots = numba.carray(block, len(layout))
        rows, width, size = slots[ROWS], slots[WIDTH], slots[CHUNK]
        features = numba.carray(at(slots[FEATURES]), (rows, width), real)
        totals = numba.carray(at(slots[OUT]), ((rows + size - 1) // size, width), np.float64)
        while True:
            chunk = take(slots)
            if chunk * size >= rows:
                break
            _add_rows(features[chunk * size : min(chunk * size + size, rows)], totals[chunk])

    return kernel_of(kernel)


@jit
def _add_rows(rows: Any, out: Any) -> None:
    i = 0
    while i + 8 <= rows.shape[0]:  # eight rows at a time: `out` is read and written once for all of them
        for j in range(rows.shape[1]):
            first = np.float64(rows[i, j]) + np.float64(rows[i + 1, j])
            second = np.float64(rows[i + 2, j]) + np.float64(rows[i + 3, j])
            third = np.float64(rows[i + 4, j]) + np.float64(rows[i + 5, j])
            fourth = np.float64(rows[i + 6, j]) + np.float64(rows[i + 7, j])
            out[j] += (first + second) + (third + fourth)
        i += 8
    while i < rows.shape[0]:
        for j in range(rows.shape[1]):
            out[j] += np.float64(rows[i, j])
        i += 1
