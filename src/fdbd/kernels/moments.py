"""Sums over rows, in float64, for training statistics.

numpy's matrix product sees that both factors are one array and does half the work; and between products no torch
operation wakes torch's threads, which would go on to keep the cores from numpy's for milliseconds.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor


def products(rows: Tensor, pivot: Tensor, elements: int = 1 << 21) -> tuple[Tensor, Tensor]:
    """Σ(z − pivot) (P,) and Σ(z − pivot)(z − pivot)ᵀ (P, P) over rows z (N, P), of which about so many elements are in
    float64 at a time."""
    count, width = rows.shape
    at_a_time = max(1, elements // width)
    values, around = _array(rows), pivot.numpy()
    buffer = np.empty((min(count, at_a_time), width))
    total, squares = np.zeros(width), np.zeros((width, width))
    for start in range(0, count, at_a_time):
        piece = values[start : start + at_a_time]
        centred = buffer[: len(piece)]
        _kernels()[0](piece, around, centred, total)
        squares += centred.T @ centred
    return torch.from_numpy(total), torch.from_numpy(squares)


def add_by_class(totals: Tensor, classes: Tensor, values: Tensor) -> None:
    """totals[c] += values of class c, in place; totals (C, D) float64, classes (N,), values (N, D)."""
    _kernels()[1](totals.numpy(), classes.numpy(), _array(values))


def _array(rows: Tensor) -> Any:
    rows = rows.detach().cpu()
    return (rows if rows.dtype in (torch.float32, torch.float64) else rows.double()).contiguous().numpy()


@cache
def _kernels() -> tuple[Any, Any]:
    import numba  # takes a third of a second to import: only where something is summed

    from .fused import compiled

    return compiled(numba.njit, _centre), compiled(numba.njit, _add_by_class)


def _centre(rows: Any, pivot: Any, out: Any, total: Any) -> None:
    for i in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            value = np.float64(rows[i, j]) - pivot[j]
            out[i, j] = value
            total[j] += value


def _add_by_class(totals: Any, classes: Any, values: Any) -> None:
    for i in range(values.shape[0]):
        row = totals[classes[i]]
        for j in range(values.shape[1]):
            row[j] += np.float64(values[i, j])
