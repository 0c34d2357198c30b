"""Softmax's sums, and the detectors that are functions of them.

No exponential underflows, since subnormal numbers take processors ten times as long; and rows of few classes lie in
memory by class, so that sums run over many samples at once.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fdbd.core.batch import Batch
from fdbd.detectors.base import Detector, Needs

_NORMAL = {dtype: math.log(torch.finfo(dtype).tiny) + 1 for dtype in (torch.float32, torch.float64)}
"""Exponents from here on give a normal number with room to spare; e^−86 or e^−707 changes no sum that holds a 1."""
_FEW_CLASSES = 16


class Sums(NamedTuple):
    """Of each row of logits, s being a logit less the largest, over the temperature."""

    largest: Tensor
    """(N,) the largest logit itself."""
    total: Tensor
    """(N,) Σ e^s."""
    weighted: Tensor
    """(N,) Σ s·e^s."""


class SoftmaxDetector(Detector):
    """A score that follows from softmax's `Sums`: a subclass writes `of_sums`."""

    needs = Needs(features=False, logits=True, passes=0)
    largest_alone: ClassVar[bool] = False
    """Whether `of_sums` looks at the largest logit only."""
    has_temperature: ClassVar[bool] = False
    """Whether `temperature` divides the logits."""
    temperature: float | Tensor

    def of_sums(self, sums: Sums) -> Tensor:
        """(N,) scores."""
        raise NotImplementedError(f"{type(self).__name__} defines no of_sums")

    def score(self, batch: Batch) -> Tensor:
        assert batch.logits is not None
        return self.of_logits(batch.logits)

    def of_logits(self, logits: Tensor) -> Tensor:
        """(N,) scores of logits (N, C)."""
        temperature = self.temperature if self.has_temperature else 1.0
        return self.of_sums(softmax_sums(logits, temperature, self.largest_alone))


def softmax_sums(logits: Tensor, temperature: float | Tensor = 1.0, largest_alone: bool = False) -> Sums:
    """The sums of (N, C) logits, by torch; without the exponentials where nobody looks at them."""
    largest = logits.amax(dim=1)
    if largest_alone:
        return Sums(largest, largest, largest)
    exponents = gaps(logits)
    exponents = bound_(exponents if isinstance(temperature, float) and temperature == 1 else exponents / temperature)
    weights = exponents.exp()
    return Sums(largest, weights.sum(dim=1), (weights * exponents).sum(dim=1))


def gaps(logits: Tensor) -> Tensor:
    """(N, C) logits less the largest of their row, a new tensor."""
    if logits.shape[1] <= _FEW_CLASSES:
        logits = logits.t().contiguous().t()
    return logits - logits.amax(dim=1, keepdim=True)


def bound_(exponents: Tensor) -> Tensor:
    """The same exponents, those raised in place whose exponential would underflow."""
    return exponents.clamp_min_(_NORMAL[exponents.dtype])


def logsumexp(logits: Tensor) -> Tensor:
    """(N,) log Σ_c exp(logits_c)."""
    return bound_(gaps(logits)).exp_().sum(dim=1).log_() + logits.amax(dim=1)
