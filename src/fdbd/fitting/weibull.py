"""The largest numbers of each class, and the extreme-value laws that they follow: what OpenMax is
fitted from."""

from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import Self

from fdbd.core.batch import Batch

_TRANSLATION = (
    1e4  # LibMR, with which OpenMax was published, fits tails whose smallest value is moved here
)
_STEP = (
    1e-6  # a tail narrower than this share of the largest number is a step, whatever its rounding
)


class Tails:
    """The `size` largest numbers of each class, in descending order: (C, size), −inf where a class
    has fewer.

    `value` maps a Batch to numbers (M,) and their classes (M,).
    """

    def __init__(
        self, num_classes: int, size: int, value: Callable[[Batch], tuple[Tensor, Tensor]]
    ) -> None:
        self.value = value
        self.largest = torch.full((num_classes, size), -torch.inf, dtype=torch.float64)

    def update(self, batch: Batch) -> None:
        numbers, classes = self.value(batch)
        order = numbers.argsort(descending=True)
        order = order[classes[order].argsort(stable=True)]
        numbers, classes = numbers[order], classes[order]
        counts = torch.bincount(classes, minlength=self.largest.shape[0])
        rank = torch.arange(len(classes)) - (counts.cumsum(0) - counts)[classes]
        kept = rank < self.largest.shape[1]
        table = torch.full_like(self.largest, -torch.inf)
        table[classes[kept], rank[kept]] = numbers[kept]
        self._add(table)

    def merge(self, other: Self) -> None:
        self._add(other.largest)

    def _add(self, table: Tensor) -> None:
        self.largest = (
            torch.cat([self.largest, table], dim=1).topk(self.largest.shape[1], dim=1).values
        )


def fit_weibull(tails: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum-likelihood Weibull laws of (C, size) tails, −inf where one is shorter: location,
    scale and shape (C,) of

        F(d) = 1 − exp(−(1 + (d − location)/scale)^shape)

    which is the two-parameter law of d − (smallest of the tail) + 10⁴, written so that float32 can
    evaluate it.
    """
    there = torch.isfinite(tails)
    count = there.sum(dim=1)
    smallest = torch.where(there, tails, torch.inf).amin(dim=1)
    logs = torch.where(there, torch.log1p((tails - smallest[:, None]) / _TRANSLATION), 0)
    largest = logs.amax(dim=1)
    average = logs.sum(dim=1) / count
    spread = (torch.where(there, logs - average[:, None], 0).square().sum(dim=1) / count).sqrt()
    step = _STEP * tails.amax().clamp_min(_STEP) / _TRANSLATION
    # The likelihood's slope in the shape k, Σ x^k log x / Σ x^k − 1/k − mean log x, ascends and has
    # one root, which lies within a factor of about √size of 1/spread.
    low, high = (spread.clamp_min(step).reciprocal().log() + bound for bound in (-7.0, 7.0))
    for _ in range(64):
        middle = (low + high) / 2
        weights = _powers(logs, largest, there, middle.exp())
        slope = (weights * logs).sum(dim=1) / weights.sum(dim=1) - (-middle).exp() - average
        low, high = torch.where(slope < 0, middle, low), torch.where(slope < 0, high, middle)
    shape = torch.where(spread > step, middle.exp(), 1 / step)
    power = _powers(logs, largest, there, shape).sum(dim=1) / count
    growth = torch.expm1(largest + power.log() / shape)  # scale / 10⁴ − 1
    return smallest + _TRANSLATION * growth, _TRANSLATION * (1 + growth), shape


def _powers(logs: Tensor, largest: Tensor, there: Tensor, shape: Tensor) -> Tensor:
    return torch.where(there, (shape[:, None] * (logs - largest[:, None])).exp(), 0)
