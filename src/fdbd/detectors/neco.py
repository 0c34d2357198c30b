"""NECO: how much of a feature lies in the principal subspace of the training data."""

from typing import Annotated

import torch
from torch import Tensor

from fdbd.detectors.base import (
    Batch,
    Detector,
    Head,
    Needs,
    Paper,
    Passes,
    at_least_one,
    required_logits,
)
from fdbd.fitting.sample_size import warn_of_few_for_covariance
from fdbd.fitting.statistics import Moments

_NEGLIGIBLE = 1e-9
"""A spread below this share of the largest is rounding, not variation."""


class NECO(Detector):
    """Share of the feature in the principal subspace, times the largest logit (Ammar et al., 2024).

        score(z) = ‖V ẑ‖ / ‖ẑ‖ · max_c logits_c,   ẑ = (z − μ) / σ

    V holds the first principal directions of the standardised training features. O(P·dimension + C)
    per sample.

    Args:
        dimension: of the subspace; None is 100 as in the authors' code, but at most the number of
            classes, which is what collapsed features span, and less than P, since the share of the
            whole space is always 1.
        standardize: divide by the deviation σ of each feature (the authors' choice); False only
            centres.
        times_logit: False leaves out the largest logit. The authors' code multiplies by it for
            every network but ResNets: for a ResNet, False follows them, and the default does not.

    >>> features = 4 * torch.eye(3).repeat(20, 1) + torch.rand(60, 3)
    >>> detector = NECO().fit(Batch(features), Head(torch.eye(3)))
    >>> known_and_unknown = Batch(torch.tensor([[4.5, 0.5, 0.5], [1.5, 1.5, 1.5]]))
    >>> detector.score(known_and_unknown).argmax()
    tensor(0)
    """

    name = "neco"
    paper = Paper(
        "NECO: NEural Collapse Based Out-of-distribution detection", "Ammar et al.", "ICLR", 2024
    )
    needs = Needs(logits=True, passes=1)
    center: Annotated[Tensor, "P"]
    scale: Annotated[Tensor, "P"]
    directions: Annotated[Tensor, "D P"]

    def __init__(
        self, dimension: int | None = None, standardize: bool = True, times_logit: bool = True
    ) -> None:
        super().__init__()
        expected = "a number of directions, at least 1, or None"
        if dimension is not None:
            dimension = at_least_one("dimension", dimension, expected)
        self.dimension = dimension
        self.standardize = standardize
        self.times_logit = times_logit

    def passes(self, head: Head) -> Passes:
        width = head.num_features
        dimension = self.dimension or max(1, min(100, head.num_classes, width - 1))
        if dimension > width:
            raise ValueError(
                f"dimension is {dimension}, but features have only {width}: expected at most"
                f" {width}"
            )
        moments = yield Moments(width)
        warn_of_few_for_covariance(self.label, moments.count, width)
        covariance = moments.covariance()
        deviation = self._deviations(covariance, moments.mean())
        directions = _principal(covariance / torch.outer(deviation, deviation), dimension)
        self.set_buffers(center=moments.mean(), scale=deviation.reciprocal(), directions=directions)

    def _deviations(self, covariance: Tensor, mean: Tensor) -> Tensor:
        """(P,) what each feature is divided by; 1 for one that is constant but for rounding."""
        if not self.standardize:
            return torch.ones_like(mean)
        deviation = covariance.diagonal().clamp_min(0).sqrt()
        is_constant = deviation <= _NEGLIGIBLE * (deviation.amax() + mean.abs())
        return torch.where(is_constant, 1.0, deviation)

    def formula(self, batch: Batch) -> Tensor:
        standard = (batch.features - self.center) * self.scale
        tiny = torch.finfo(standard.dtype).tiny
        whole = torch.linalg.vector_norm(standard, dim=1).clamp_min(tiny)
        share: Tensor = torch.linalg.vector_norm(standard @ self.directions.T, dim=1) / whole
        if self.times_logit:
            return share * required_logits(batch).amax(dim=1)
        return share


def _principal(covariance: Tensor, dimension: int) -> Tensor:
    """(D, P) leading eigenvectors, the first first. Directions without variance are arbitrary, and
    so is every sign: neither may depend on how sums were rounded."""
    variances, directions = torch.linalg.eigh(covariance)
    directions = torch.where(variances > _NEGLIGIBLE * variances[-1], directions, 0)
    leading = directions[:, -dimension:]
    largest = leading.gather(0, leading.abs().argmax(dim=0, keepdim=True))
    return (leading * largest.sign()).T.flip(0)
