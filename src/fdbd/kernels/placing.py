"""Rows brought into another order, and divided on the way: read once and written once."""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from fdbd.kernels import dispatch
from fdbd.kernels.block import CHUNK, CLASSES, FEATURES, GIVEN, LAYOUT, OFFSETS, OUT, ROWS, SLOTS, WIDTH
from fdbd.kernels.fused import at, kernel_of, take
from fdbd.kernels.team import Kernel


def place_rows(out: Tensor, places: Tensor, rows: Tensor, divisors: Tensor) -> None:
    """out[places[i]] = rows[i] / divisors[i]; out (M, P), rows (N, P) and divisors (N,) are CPU tensors of one dtype,
    float32 or float64, and places (N,) int64 are distinct and within M."""
    tensors = [tensor.detach().contiguous() for tensor in (rows, places, divisors)]
    count, width = rows.shape
    assert rows.dtype in (torch.float32, torch.float64)
    assert rows.dtype == divisors.dtype == out.dtype
    assert out.shape[1:] == (width,)
    assert out.is_contiguous()
    block = [0, max(1, dispatch.CHUNK // max(width, 1)), count, width, out.shape[0], *[0] * (SLOTS - 5)]
    block[FEATURES], block[GIVEN], block[OFFSETS] = (tensor.data_ptr() for tensor in tensors)
    block[OUT] = out.data_ptr()
    dispatch.run(_place(rows.dtype), block, rows.numel())


@cache
def _place(dtype: torch.dtype) -> Kernel:
    real = np.float32 if dtype == torch.float32 else np.float64
    layout = LAYOUT

    def kernel(block: Any) -> None:
        slots = numba.carray(block, len(layout))
        rows, width = slots[ROWS], slots[WIDTH]
        features = numba.carray(at(slots[FEATURES]), (rows, width), real)
        places = numba.carray(at(slots[GIVEN]), rows, np.int64)
        divisors = numba.carray(at(slots[OFFSETS]), rows, real)
        out = numba.carray(at(slots[OUT]), (slots[CLASSES], width), real)
        while True:
            start = take(slots) * slots[CHUNK]
            if start >= rows:
                break
            for i in range(start, min(start + slots[CHUNK], rows)):
                row, place, divisor = features[i], out[places[i]], divisors[i]
                for j in range(width):
                    place[j] = row[j] / divisor

    return kernel_of(kernel, exact=True)  # what is looked up in a bank is divided by torch
