"""A small summary of which samples were seen, to notice when the same ones are given again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from fdbd.fitting.statistics import row_hashes

_KEPT = 4096
_VALUES = 512
"""Entries of a sample that are hashed: enough to tell samples apart, cheap for large images."""


class Sketch:
    """The smallest hashes of all samples seen (bottom-k sampling): 32 kB, whatever the number of
    samples.

    >>> first, second = Sketch(), Sketch()
    >>> data = torch.randn(100, 8)
    >>> first.add(data)
    >>> second.add(data[:50])
    >>> second.overlap(first)
    1.0
    """

    def __init__(self, hashes: Tensor | None = None) -> None:
        self.hashes = torch.zeros(0, dtype=torch.int64, device="cpu") if hashes is None else hashes
        if self.hashes.dtype != torch.int64 or self.hashes.ndim != 1:
            raise ValueError(
                f"hashes are {self.hashes.dtype} {tuple(self.hashes.shape)}, expected int64 (N,)"
            )

    def add(self, inputs: Any) -> None:
        """Add a batch: a tensor (N, …), or a dict or tuple whose first tensor identifies the
        samples."""
        self.add_hashes(sample_hashes(inputs))

    def add_hashes(self, hashes: Tensor) -> None:
        """Add samples by their `sample_hashes`."""
        self.hashes = torch.cat([self.hashes, hashes]).unique()[:_KEPT]

    def merge(self, other: Self) -> None:
        self.add_hashes(other.hashes)

    def overlap(self, other: Sketch) -> float:
        """Share of these samples that `other` has seen too, estimated from the range in which both
        sketches are complete."""
        if not len(self.hashes) or not len(other.hashes):
            return 0.0
        limit = 2**62
        if len(other.hashes) >= _KEPT:
            # A full sketch knows only the hashes up to its largest.
            limit = int(other.hashes.max())
        comparable = self.hashes[self.hashes <= limit]
        if not len(comparable):
            return 0.0
        return float(torch.isin(comparable, other.hashes).double().mean())


def sample_hashes(inputs: Any) -> Tensor:
    """(N,) int64, one hash per sample of a batch; empty if there is no tensor in it."""
    found = _first_tensor(inputs)
    if found is None or not found.ndim or not found.shape[0]:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    samples = found.detach()
    rows = samples.flatten(1) if samples.ndim > 1 else samples[:, None]
    step = max(1, rows.shape[1] // _VALUES)
    return row_hashes(rows[:, ::step].cpu())


def _first_tensor(inputs: Any) -> Tensor | None:
    """The first tensor or array in a batch; None if there is none, or if that array does not hold
    numbers."""
    parts = [inputs]
    if isinstance(inputs, Mapping):
        parts = list(inputs.values())
    elif isinstance(inputs, (tuple, list)):
        parts = list(inputs)
    for part in parts:
        if isinstance(part, Tensor):
            return part
        if isinstance(part, np.ndarray):
            holds_numbers = part.dtype.kind in "biuf"
            return torch.from_numpy(part) if holds_numbers else None
    return None
