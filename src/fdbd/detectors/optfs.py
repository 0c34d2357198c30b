"""OptFS: the shape of activations that raises the training data's logits most."""

from typing import Annotated

import torch
from torch import Tensor

from fdbd import kernels
from fdbd.core.linear_algebra import in_blocks
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
from fdbd.fitting.statistics import Histogram, Sum, with_logits

_ENDS = (0.001, 0.999)
"""Quantiles of all activations between which the bins lie (the authors')."""
_NORM = 1000.0
"""Norm of the vector of bin weights in the authors' code; it scales all scores alike."""


class OptFS(Detector):
    """Predicted class's logit of optimally shaped features (Zhao et al., 2024).

        score(z) = Σ_j θ(z_j) w_kj z_j,   θ_b ∝ E[Σ_j 1(z_j ∈ bin b) w_kj z_j]

    with k the predicted class and E the mean over training data. θ is one weight per bin of equal
    width between the 0.1 % and the 99.9 % quantile of all activations, and 0 outside; this is the
    closed form of the shaping of unit norm that raises the mean training score most, so nothing is
    tuned and no labels are needed. O(P) per sample.

    Args:
        bins: number of bins; 100 is the authors'.

    >>> import fdbd
    >>> features = 4 * torch.eye(3).repeat(20, 1) + torch.rand(60, 3)
    >>> detector = fdbd.create("optfs").fit(Batch(features), Head(torch.eye(3)))
    >>> known_and_unknown = Batch(torch.tensor([[4.5, 0.5, 0.5], [1.5, 1.5, 1.5]]))
    >>> detector.score(known_and_unknown).argmax()
    tensor(0)
    """

    name = "optfs"
    paper = Paper(
        "Towards Optimal Feature-Shaping Methods for Out-of-Distribution Detection",
        "Zhao et al.",
        "ICLR",
        2024,
    )
    needs = Needs(logits=True, passes=2)
    #: one weight per bin, between two zeros for what lies outside
    theta: Annotated[Tensor, "T"]
    low: Annotated[Tensor, ""]
    bins_per_unit: Annotated[Tensor, ""]

    def __init__(self, bins: int = 100) -> None:
        super().__init__()
        self.bins = at_least_one("bins", bins, "a number of bins, at least 1")

    def passes(self, head: Head) -> Passes:
        histogram = yield Histogram()
        low, high = histogram.quantiles(_ENDS)
        if not high > low:
            raise ValueError(
                f"the training features are all about {low:.4g}, expected features that differ: "
                "OptFS learns a weight for each bin between their smallest and largest"
            )
        self.set_buffers(low=low, bins_per_unit=self.bins / (high - low))
        sums = yield from with_logits(Sum(self._contributions_by_bin), head)
        gains = sums.sum() / sums.count
        length = torch.linalg.vector_norm(gains)
        if length > 0:
            # Divided first: their inverse would overflow if they are tiny.
            gains = gains / length * _NORM
        outside = gains.new_zeros(1)
        self.set_buffers(theta=torch.cat([outside, gains, outside]))

    def _contributions_by_bin(self, batch: Batch) -> Tensor:
        """(N, B) Σ_j 1(z_j ∈ bin b) w_kj z_j of each sample."""
        features = batch.features.to(self.low.dtype)
        contributions = features * self._predicted_weights(required_logits(batch))
        table = features.new_zeros(len(features), self.bins + 2, dtype=torch.float64)
        table.scatter_add_(1, self._bins_of(features), contributions.double())
        return table[:, 1:-1]

    def _predicted_weights(self, logits: Tensor) -> Tensor:
        """(N, P) weights w_k of each sample's predicted class."""
        predicted = kernels.argmax(logits)
        return self.head_weight[predicted.to(self.head_weight.device)]

    def _bins_of(self, features: Tensor) -> Tensor:
        """(N, P) indices into theta: 1 to B within the range, 0 below it, B + 1 from its end on."""
        position = (features - self.low) * self.bins_per_unit
        place = (position.floor() + 1).clamp(0, self.bins + 1)
        # A NaN has no bin, and its row is closed in any case.
        return torch.where(place.isnan(), 0, place).to(torch.int64)

    def formula(self, batch: Batch) -> Tensor:
        logits = required_logits(batch)
        width = batch.features.shape[1]

        def shaped_logit(features_and_logits: Tensor) -> Tensor:
            features = features_and_logits[:, :width]
            weights = self._predicted_weights(features_and_logits[:, width:])
            shaped = self.theta[self._bins_of(features)] * features
            return (shaped * weights).sum(dim=1)

        # One tensor, since `in_blocks` splits one.
        both = torch.cat([batch.features, logits], dim=1)
        return in_blocks(shaped_logit, both, 4 * width)
