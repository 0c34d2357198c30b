"""Logits of a head with few classes: one read of the features, where a matrix product of that shape takes several."""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
import torch

from fdbd.kernels.block import CHUNK, CLASSES, FEATURES, LAYOUT, NORMALS, OFFSETS, OUT, ROWS, WIDTH
from fdbd.kernels.fused import at, jit, kernel_of, take
from fdbd.kernels.team import Kernel


@jit
def _four(row: Any, first: Any, second: Any, third: Any, fourth: Any) -> Any:
    """Inner products of a row with four others, which load it once."""
    a = b = c = d = row.dtype.type(0)
    for j in range(row.shape[0]):
        a += row[j] * first[j]
        b += row[j] * second[j]
        c += row[j] * third[j]
        d += row[j] * fourth[j]
    return a, b, c, d


@jit
def _one(row: Any, other: Any) -> Any:
    total = row.dtype.type(0)
    for j in range(row.shape[0]):
        total += row[j] * other[j]
    return total


@cache
def linear(dtype: torch.dtype) -> Kernel:
    """OUT (N, C) = FEATURES (N, P) NORMALSᵀ (C, P) + OFFSETS (C,)."""
    real = np.float32 if dtype == torch.float32 else np.float64
    layout = LAYOUT

    def kernel(block: Any) -> None:
        slots = numba.carray(block, len(layout))
        rows, width, classes = slots[ROWS], slots[WIDTH], slots[CLASSES]
        features = numba.carray(at(slots[FEATURES]), (rows, width), real)
        weight = numba.carray(at(slots[NORMALS]), (classes, width), real)
        bias = numba.carray(at(slots[OFFSETS]), classes, real)
        out = numba.carray(at(slots[OUT]), (rows, classes), real)
        while True:
            start = take(slots) * slots[CHUNK]
            if start >= rows:
                break
            for i in range(start, min(start + slots[CHUNK], rows)):
                c = 0
                while c + 4 <= classes:
                    found = _four(features[i], weight[c], weight[c + 1], weight[c + 2], weight[c + 3])
                    for k in range(4):
                        out[i, c + k] = found[k] + bias[c + k]
                    c += 4
                while c < classes:
                    out[i, c] = _one(features[i], weight[c]) + bias[c]
                    c += 1

    return kernel_of(kernel)
