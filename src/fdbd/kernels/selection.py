"""The largest of many, block by block: what cannot be among them is passed over at the speed of reading."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from fdbd.kernels.fused import compiled

_AT_ONCE = 32
"""Values that are compared with the bound together."""
_ROOM = 64
"""Candidates beyond 2k that a row takes before the k largest of them are kept."""


class Largest:
    """The k largest values of each of N rows, and their columns, which come in blocks of columns; CPU. Several threads
    may each look at rows of their own.

    >>> largest = Largest(1, 2, torch.float32)
    >>> largest.add(torch.tensor([[3.0, 5.0, 1.0]]), 0)
    >>> largest.add(torch.tensor([[4.0, 2.0, 0.0]]), 3)
    >>> values, columns = largest.result()
    >>> sorted(zip(columns[0].tolist(), values[0].tolist()))
    [(1, 5.0), (3, 4.0)]
    """

    def __init__(self, rows: int, k: int, dtype: torch.dtype) -> None:
        self.k = k
        self.values = torch.empty(rows, 2 * k + _ROOM, dtype=dtype, device="cpu")
        self.columns = torch.empty(rows, 2 * k + _ROOM, dtype=torch.int64, device="cpu")
        self.counts = torch.zeros(rows, dtype=torch.int64, device="cpu")
        self.bounds = torch.full((rows,), -torch.inf, dtype=dtype, device="cpu")
        self._state = [tensor.numpy() for tensor in (self.values, self.columns, self.counts, self.bounds)]

    def add(self, block: Tensor, first: int, row: int = 0) -> None:
        """Look at a block (n, W) of columns that starts at column `first`, and holds the rows from `row` on."""
        _add(block.numpy(), first, self.k, *(part[row : row + len(block)] for part in self._state))

    def result(self) -> tuple[Tensor, Tensor]:
        """Values and columns, (N, k) each, in no particular order. A row with NaN or −∞ may have any columns."""
        _finish(self.k, *self._state)
        return self.values[:, : self.k], self.columns[:, : self.k]


def _jit(function: Any) -> Any:
    return compiled(numba.njit, function)


@_jit
def _keep(values: Any, columns: Any, count: int, k: int) -> Any:
    """Bring the k largest of the first `count` values to the front, with their columns; returns the smallest of them.
    Hoare's selection."""
    low, high = 0, count - 1
    while low < high:
        pivot = values[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while values[i] > pivot:
                i += 1
            while values[j] < pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                columns[i], columns[j] = columns[j], columns[i]
                i += 1
                j -= 1
        if k - 1 <= j:
            high = j
        elif k - 1 >= i:
            low = i
        else:
            break
    return values[:k].min()


@_jit
def _add(block: Any, first: int, k: int, values: Any, columns: Any, counts: Any, bounds: Any) -> None:
    width, room = block.shape[1], values.shape[1]
    for i in range(block.shape[0]):
        row, found, places, count, bound = block[i], values[i], columns[i], counts[i], bounds[i]
        for start in range(0, width, _AT_ONCE):
            stop = min(start + _AT_ONCE, width)
            above = np.int32(0)  # as wide as a float32, so that as many fit a vector
            for j in range(start, stop):
                above = np.int32(above + np.int32(row[j] > bound))
            if above:
                if count + above >= room:
                    bound = _keep(found, places, count, k)
                    count = k
                for j in range(start, stop):  # a branch would be guessed wrongly: what is not kept is written over
                    found[count], places[count] = row[j], first + j
                    count += row[j] > bound
        counts[i], bounds[i] = count, bound


@_jit
def _finish(k: int, values: Any, columns: Any, counts: Any, bounds: Any) -> None:
    for i in range(values.shape[0]):
        if counts[i] > k:
            _keep(values[i], columns[i], counts[i], k)
        for n in range(counts[i], k):  # NaN and −∞ are above nothing
            values[i, n], columns[i, n] = -np.inf, n
