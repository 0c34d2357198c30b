"""The largest of many: each row is read once, and only what may belong to the largest is looked at again."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

GROUP = 16
"""Values that are first represented by their maximum."""


def largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of (N, M) and their columns, (N, k) each, in no particular order; by one thread. CPU
    tensors with at least k groups of `GROUP` values a row."""
    found, columns = values.new_empty(len(values), k), torch.empty(len(values), k, dtype=torch.int64)
    _kernels()[0](_kernels()[1], *[tensor.numpy() for tensor in (values, found, columns)])
    return found, columns


@cache
def _kernels() -> tuple[Any, Any]:
    import numba  # takes a third of a second to import: only where something is selected

    from .fused import compiled

    # No NaN and no −0 is what lets maxima vectorise; a row with NaN gives any of its columns.
    return compiled(numba.njit, _select), compiled(numba.njit, _maxima, fastmath={"nnan", "nsz"})


def _select(maxima: Any, values: Any, found: Any, columns: Any) -> None:
    k, width = found.shape[1], values.shape[1]
    groups = width // GROUP
    parties = groups // GROUP  # groups of groups
    best, leaders = np.empty(groups, values.dtype), np.empty(parties, values.dtype)
    candidates, places = np.empty(width, values.dtype), np.empty(width, np.int64)
    for i in range(values.shape[0]):
        row = values[i]
        maxima(row, best)
        # The k-th largest of the maxima of parties, where there are enough, or of groups: k values reach it.
        if parties >= 2 * k:
            maxima(best, leaders)
            bound = np.sort(leaders)[parties - k]
        else:
            bound = np.sort(best)[groups - k]
        count = 0
        for g in range(groups):
            if best[g] >= bound:
                for j in range(g, groups * GROUP, groups):
                    if row[j] >= bound:
                        candidates[count], places[count] = row[j], j
                        count += 1
        for j in range(groups * GROUP, width):
            if row[j] >= bound:
                candidates[count], places[count] = row[j], j
                count += 1
        if count < k:  # NaN
            for n in range(k):
                candidates[n], places[n] = row[n], n
            count = k
        chosen = np.argsort(candidates[:count])[count - k :]
        for n in range(k):
            found[i, n], columns[i, n] = candidates[chosen[n]], places[chosen[n]]


def _maxima(row: Any, best: Any) -> None:
    """Group g holds the columns g, g + groups, g + 2·groups, …, so that neighbours are worked on at once."""
    groups = best.shape[0]
    best[:] = row[:groups]
    for start in range(groups, groups * GROUP, groups):
        for g in range(groups):
            best[g] = max(best[g], row[start + g])
