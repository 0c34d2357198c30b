"""Float32 bit patterns: counts, from which quantiles over training data are read, and hashes.

The leading bits of a float32, with negative numbers mirrored, ascend with its value; numba counts them ten times faster
than ``torch.bincount``, which would need an int64 index for each value.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fdbd.kernels import team


def count_leading_bits(values: Tensor, counts: Tensor) -> None:
    """Add 1 to counts (2^b,) int64, at the first b bits of each of the values (any shape)."""
    _kernels()[0](_bits(values).reshape(-1), counts.numpy(), 33 - counts.shape[0].bit_length())


def count_feature_bits(features: Tensor, counts: Tensor, skip: int, cells: Tensor | None = None) -> None:
    """Add 1 to counts[l, j] (2^b,) int64, at the b bits after the first `skip` of each features[i, j] (N, P); with
    `cells` (L, P) int64 only for those whose first `skip` bits are cells[l, j]."""
    shift = 33 - skip - counts.shape[2].bit_length()
    cells = torch.zeros(counts.shape[:2], dtype=torch.int64, device="cpu") if cells is None else cells.contiguous()
    _kernels()[1](_bits(features), counts.numpy(), shift, 32 - skip, cells.numpy())


def multilinear(bits: Tensor, keys: Tensor) -> tuple[Tensor, bool]:
    """(N,) int64 Σ_j bits[i, j]·keys[j] modulo 2^64, a hash of each row, and whether all bits are those of finite
    float32 numbers; bits (N, P) int32, keys (P,) int64."""
    out = torch.empty(bits.shape[0], dtype=torch.int64, device="cpu")
    arrays = [tensor.numpy() for tensor in (bits, keys, out)]
    findings = []

    def sum_up(start: int, stop: int) -> None:
        findings.append(_kernels()[2](arrays[0][start:stop], arrays[1], arrays[2][start:stop]))

    team.over_rows(len(out), sum_up)
    return out, all(findings)


def _bits(values: Tensor) -> Any:
    return values.detach().to("cpu", torch.float32).contiguous().view(torch.int32).numpy()


@cache
def _kernels() -> tuple[Any, Any, Any]:
    import numba  # takes a third of a second to import: only where something is counted

    from fdbd.kernels.fused import compiled

    return compiled(numba.njit, _count), compiled(numba.njit, _count_features), compiled(numba.njit, _multilinear)


def _count(bits: Any, counts: Any, shift: int) -> None:
    middle = counts.shape[0] >> 1
    for i in range(bits.shape[0]):
        word = bits[i]
        counts[(word >> shift) + middle if word >= 0 else ~word >> shift] += 1


def _count_features(bits: Any, counts: Any, shift: int, upper: int, cells: Any) -> None:
    mask = counts.shape[2] - 1
    for first in range(0, bits.shape[1], 16):  # a cache line of each row, so that counts stay in the cache
        for i in range(bits.shape[0]):
            for j in range(first, min(first + 16, bits.shape[1])):
                word = bits[i, j]
                key = (word + 2147483648) if word >= 0 else ~word  # int64: numba widens
                for level in range(counts.shape[0]):
                    if key >> upper == cells[level, j]:
                        counts[level, j, (key >> shift) & mask] += 1


def _multilinear(bits: Any, keys: Any, out: Any) -> bool:
    largest = np.int32(0)
    for i in range(bits.shape[0]):
        total = np.int64(0)
        for j in range(bits.shape[1]):
            total += np.int64(bits[i, j]) * keys[j]  # int64 wraps around
            largest = max(largest, np.int32(bits[i, j] & 0x7FFFFFFF))
        out[i] = total
    return bool(largest < 0x7F800000)  # NaN and infinity have the largest exponent
