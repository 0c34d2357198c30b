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

from fdbd.kernels import team
from fdbd.kernels.blas import share_products

_ELEMENTS_OF_ALL = 1 << 23
"""Of the products of all threads, in float64: 64 MB."""


def products(rows: Tensor, pivot: Tensor, elements: int = 1 << 21) -> tuple[Tensor, Tensor]:
    """Σ(z − pivot) (P,) and Σ(z − pivot)(z − pivot)ᵀ (P, P) over rows z (N, P), of which each thread has about so many
    elements in float64 at a time."""
    count, width = rows.shape
    at_a_time = max(1, elements // width)
    values, around = _array(rows), pivot.numpy()
    centre = _kernels()[0]
    parts: dict[int, tuple[Any, Any]] = {}

    def sum_up(start: int, stop: int) -> None:
        buffer, product = np.empty((min(stop - start, at_a_time), width)), np.empty((width, width))
        total, squares = np.zeros(width), np.zeros((width, width))
        for first in range(start, stop, at_a_time):
            piece = values[first : min(first + at_a_time, stop)]
            centred = buffer[: len(piece)]
            centre(piece, around, centred, total)
            squares += np.matmul(centred.T, centred, out=product)
        parts[start] = total, squares

    # Each thread has (P, P) arrays of its own: where those are large, the library's threads share one.
    least = max(1, width // 2) if team.size() * width**2 <= _ELEMENTS_OF_ALL else count + 1
    share_products(count, sum_up, least)
    (total, squares), *others = (parts[start] for start in sorted(parts))  # always added in the same order
    for other_total, other_squares in others:
        total += other_total
        squares += other_squares
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

    from fdbd.kernels.fused import compiled

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
