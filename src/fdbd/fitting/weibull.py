"""The largest numbers of each class, and the extreme-value laws that they follow: what OpenMax is
fitted from."""

from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import Self

from fdbd.core.batch import Batch

_TRANSLATION = 1e4
"""LibMR, with which OpenMax was published, fits tails whose smallest value is moved here."""
_STEP = 1e-6
"""A tail narrower than this share of the largest number is a step, whatever its rounding."""


class Tails:
    """The `size` largest numbers of each class, in descending order: (C, size), −inf if a class has
    fewer.

    `value` maps a Batch to numbers (M,) and their classes (M,).
    """

    def __init__(
        self, num_classes: int, size: int, value: Callable[[Batch], tuple[Tensor, Tensor]]
    ) -> None:
        self.value = value
        self.largest = torch.full((num_classes, size), -torch.inf, dtype=torch.float64)

    def update(self, batch: Batch) -> None:
        numbers, classes = self.value(batch)
        num_classes, size = self.largest.shape
        # By class, and within a class by descending number.
        order = numbers.argsort(descending=True)
        order = order[classes[order].argsort(stable=True)]
        numbers = numbers[order]
        classes = classes[order]
        counts = torch.bincount(classes, minlength=num_classes)
        first_of_class = counts.cumsum(0) - counts
        rank = torch.arange(len(classes)) - first_of_class[classes]
        is_kept = rank < size
        table = torch.full_like(self.largest, -torch.inf)
        table[classes[is_kept], rank[is_kept]] = numbers[is_kept]
        self._add(table)

    def merge(self, other: Self) -> None:
        self._add(other.largest)

    def _add(self, table: Tensor) -> None:
        both = torch.cat([self.largest, table], dim=1)
        self.largest = both.topk(self.largest.shape[1], dim=1).values


def fit_weibull(tails: Tensor, rounding: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum-likelihood Weibull laws of (C, size) tails, −inf if one is shorter: location, scale
    and shape (C,) of

        F(d) = 1 − exp(−(1 + (d − location)/scale)^shape)

    which is the two-parameter law of d − (smallest of the tail) + 10⁴, written so that float32 can
    evaluate it. A tail narrower than `rounding`, by which equal numbers may differ, is a step of
    that width: rounding must not decide on which side of it a number lies.
    """
    is_there = torch.isfinite(tails)
    count = is_there.sum(dim=1)
    smallest = torch.where(is_there, tails, torch.inf).amin(dim=1)
    logs = torch.where(is_there, torch.log1p((tails - smallest[:, None]) / _TRANSLATION), 0)
    largest = logs.amax(dim=1)
    mean_log = logs.sum(dim=1) / count
    deviations = torch.where(is_there, logs - mean_log[:, None], 0)
    spread = (deviations.square().sum(dim=1) / count).sqrt()
    step = max(_STEP * tails.amax().clamp_min(_STEP).item(), rounding) / _TRANSLATION
    shape = _likeliest_shape(logs, is_there, spread.clamp_min(step))
    shape = torch.where(spread > step, shape, 1 / step)
    power = _powers(logs, largest, is_there, shape).sum(dim=1) / count
    # scale / 10⁴ − 1
    growth = torch.expm1(largest + power.log() / shape)
    return smallest + _TRANSLATION * growth, _TRANSLATION * (1 + growth), shape


def _likeliest_shape(logs: Tensor, is_there: Tensor, spread: Tensor) -> Tensor:
    """(C,) shapes k at which the likelihood's slope, Σ x^k log x / Σ x^k − 1/k − mean log x, is 0.
    The slope ascends with k and has one root, which lies within a factor of about √size of
    1/spread. It is found by bisection of log k."""
    largest = logs.amax(dim=1)
    mean_log = logs.sum(dim=1) / is_there.sum(dim=1)
    middle = spread.reciprocal().log()
    low = middle - 7.0
    high = middle + 7.0
    for _ in range(64):
        middle = (low + high) / 2
        weights = _powers(logs, largest, is_there, middle.exp())
        weighted_mean_log = (weights * logs).sum(dim=1) / weights.sum(dim=1)
        slope = weighted_mean_log - (-middle).exp() - mean_log
        # As the slope ascends, a negative one lies below the root.
        low = torch.where(slope < 0, middle, low)
        high = torch.where(slope < 0, high, middle)
    return middle.exp()


def _powers(logs: Tensor, largest: Tensor, is_there: Tensor, shape: Tensor) -> Tensor:
    """(C, size) x^k divided by the largest of each class, so that none overflows."""
    return torch.where(is_there, (shape[:, None] * (logs - largest[:, None])).exp(), 0)
