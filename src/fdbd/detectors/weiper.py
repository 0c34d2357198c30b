"""WeiPer+KLD: histograms of a sample's features and of its logits under perturbed weights."""

from collections.abc import Iterator
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from fdbd.core.linear_algebra import in_blocks
from fdbd.detectors.base import Batch, Detector, Head, Needs, Paper, Passes, at_least_one, expect
from fdbd.detectors.softmax import largest_probability
from fdbd.fitting.statistics import LOGITS_AT_A_TIME, Range, Sum, Together, Transformed
from fdbd.util.torch_compat import tracing

_LOGITS_OF_A_SAMPLE = 2048
"""Perturbed logits of one sample that are computed at once: some copies of the head, so that many
samples share a product. All copies with few samples would take twice as long."""


class WeiPer(Detector):
    """Divergence of a sample's histograms from those of the training data (Granz et al., 2024).

        score(z) = λ₂ MSP_W̃(z) − KL_s(h_z, E h_z) − λ₁ KL_s(h_W̃z, E h_W̃z)

    W̃ are `copies` of the head, each row moved in a random direction by `distance` times its norm.
    h_z is the histogram of the sample's P activations, h_W̃z that of its perturbed logits, both
    smoothed by a moving average; KL_s is the symmetric divergence from the mean histogram of the
    training data, and MSP_W̃ the largest softmax probability, averaged over the copies. Directions
    come from a fixed seed, so that a fit gives the same detector every time.

    O(copies·C·P) per sample and as many numbers kept, which is large for many classes: with 100
    copies, 0.8 GB for 1,000 classes and 2,048 features. Defaults are those of the authors'
    function; they tune all of them for each network on validation data with outliers.

    Args:
        copies: number of perturbed copies of the head (r).
        distance: δ, length of the perturbation in units of a row's norm.
        bins: number of bins of the histograms.
        smoothing, smoothing_logits: bins that the moving averages take (s₁, s₂).
        weight_logits: λ₁.
        weight_msp: λ₂.

    >>> import fdbd
    >>> features = 4 * torch.eye(3).repeat(20, 1) + torch.rand(60, 3)
    >>> detector = fdbd.create("weiper", copies=10).fit(Batch(features), Head(torch.eye(3)))
    >>> detector.score(Batch(features)).shape
    torch.Size([60])
    """

    name = "weiper"
    paper = Paper(
        "WeiPer: OOD Detection using Weight Perturbations of Class Projections",
        "Granz et al.",
        "NeurIPS",
        2024,
    )
    needs = Needs(passes=2)
    perturbed_weight: Annotated[Tensor, "R P"]
    perturbed_bias: Annotated[Tensor, "R"]
    feature_range: Annotated[Tensor, "2"]
    logit_range: Annotated[Tensor, "2"]
    mean_of_features: Annotated[Tensor, "B"]
    mean_of_logits: Annotated[Tensor, "B"]

    _FLOOR_OF_FEATURES = 0.01
    """Added to histograms before a logarithm, in the authors' code."""
    _FLOOR_OF_LOGITS = 0.025

    def __init__(
        self,
        copies: int = 100,
        distance: float = 2.1,
        bins: int = 100,
        smoothing: int = 20,
        smoothing_logits: int = 20,
        weight_logits: float = 1.0,
        weight_msp: float = 1.0,
    ) -> None:
        super().__init__()
        self.copies = at_least_one("copies", copies, "a number of copies, at least 1")
        is_distance = 0 <= distance < float("inf")
        self.distance = expect("distance", distance, is_distance, "a number from 0")
        self.bins = at_least_one("bins", bins, "a number of bins, at least 1")
        expected = "a number of bins, at least 1"
        self.smoothing = at_least_one("smoothing", smoothing, expected)
        self.smoothing_logits = at_least_one("smoothing_logits", smoothing_logits, expected)
        for name, weight in (("weight_logits", weight_logits), ("weight_msp", weight_msp)):
            expect(name, weight, 0 <= weight < float("inf"), "a number from 0")
        self.weight_logits = weight_logits
        self.weight_msp = weight_msp

    def passes(self, head: Head) -> Passes:
        self._perturb(head)
        rows = max(1, LOGITS_AT_A_TIME // self._logits_at_once())
        both_ranges = Together([Range(), Range(self._extreme_logits)])
        ranges = yield Transformed(both_ranges, _unchanged, rows)
        of_features, of_logits = ranges.statistic.parts
        self.set_buffers(feature_range=_widened(of_features), logit_range=_widened(of_logits))
        sums = yield Transformed(Sum(self._both_histograms), _unchanged, rows)
        mean = sums.statistic.sum() / sums.statistic.count
        self.set_buffers(mean_of_features=mean[0], mean_of_logits=mean[1])

    def _perturb(self, head: Head) -> None:
        """Keep the copies of the head, one below the other."""
        generator = torch.Generator().manual_seed(0)
        weight = head.weight.to("cpu", torch.float64)
        reach = self.distance * torch.linalg.vector_norm(weight, dim=1, keepdim=True)
        # One copy at a time: in float64, all of them would take twice the memory of the result.
        perturbed = torch.empty(self.copies, *weight.shape, dtype=self.fit_dtype)
        for copy in perturbed:
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            copy.copy_(weight + reach * F.normalize(noise, dim=1))
        self.set_buffers(
            perturbed_weight=perturbed.flatten(0, 1),
            perturbed_bias=head.bias.to("cpu", torch.float64).repeat(self.copies),
        )

    def _logits_at_once(self) -> int:
        """How many perturbed logits of a sample are computed at once: those of one copy or more."""
        num_classes = len(self.perturbed_weight) // self.copies
        copies = max(1, _LOGITS_OF_A_SAMPLE // num_classes)
        return min(copies, self.copies) * num_classes

    def _perturbed_logits(self, features: Tensor) -> Iterator[Tensor]:
        """(N, K, C) logits under all copies of the head, K copies at a time."""
        num_classes = len(self.perturbed_weight) // self.copies
        # A graph has no loop.
        size = len(self.perturbed_weight) if tracing() else self._logits_at_once()
        features = features.to(self.perturbed_weight.dtype)
        for start in range(0, len(self.perturbed_weight), size):
            weight = self.perturbed_weight[start : start + size]
            bias = self.perturbed_bias[start : start + size]
            yield F.linear(features, weight, bias).unflatten(1, (-1, num_classes))

    def _extreme_logits(self, batch: Batch) -> Tensor:
        """(G, 2) the smallest and the largest perturbed logit of a batch, by group of copies."""
        extremes = []
        for logits in self._perturbed_logits(batch.features):
            extremes.append(torch.stack(logits.aminmax()))
        return torch.stack(extremes)

    def _both_histograms(self, batch: Batch) -> Tensor:
        """(N, 2, B) histograms of each sample's features and perturbed logits."""
        features = batch.features.to(self.perturbed_weight.dtype)
        of_features = self._histogram(features, self.feature_range)
        of_logits = torch.zeros_like(of_features)
        for logits in self._perturbed_logits(features):
            of_logits = of_logits + self._counts(logits.flatten(1), self.logit_range)
        of_logits = of_logits / len(self.perturbed_weight)
        return torch.stack([of_features, of_logits], dim=1)

    def _histogram(self, values: Tensor, span: Tensor) -> Tensor:
        """(N, B) shares of a row's values in each bin of the range; those outside are in none."""
        return self._counts(values, span) / values.shape[1]

    def _counts(self, values: Tensor, span: Tensor) -> Tensor:
        """(N, B) numbers of a row's values in each bin of the range."""
        position = ((values - span[0]) * (self.bins / (span[1] - span[0]))).floor()
        # One place more at either end takes what lies outside.
        places = (position + 1).clamp(0, self.bins + 1)
        # A NaN has no bin, and its row is closed in any case.
        places = torch.where(places.isnan(), 0, places).to(torch.int64)
        counts = values.new_zeros(values.shape[0], self.bins + 2)
        counts = counts.scatter_add(1, places, torch.ones_like(values))
        return counts[:, 1:-1]

    def formula(self, batch: Batch) -> Tensor:
        width = self._logits_at_once() + batch.features.shape[1]
        return in_blocks(self._score, batch.features, 2 * width)

    def _score(self, features: Tensor) -> Tensor:
        confidence = features.new_zeros(features.shape[0])
        counts = features.new_zeros(features.shape[0], self.bins)
        for logits in self._perturbed_logits(features):
            _, copies, num_classes = logits.shape
            probability = largest_probability(logits.reshape(-1, num_classes))
            confidence = confidence + probability.reshape(-1, copies).sum(dim=1)
            counts = counts + self._counts(logits.flatten(1), self.logit_range)
        confidence = confidence / self.copies
        of_features = _divergence(
            self._histogram(features, self.feature_range),
            self.mean_of_features,
            self.smoothing,
            self._FLOOR_OF_FEATURES,
        )
        of_logits = _divergence(
            counts / len(self.perturbed_weight),
            self.mean_of_logits,
            self.smoothing_logits,
            self._FLOOR_OF_LOGITS,
        )
        scores: Tensor = self.weight_msp * confidence - of_features
        return scores - self.weight_logits * of_logits


def _unchanged(batch: Batch) -> Batch:
    """The batch, for a statistic that takes it in pieces and as it is."""
    return batch


def _widened(span: Range) -> Tensor:
    """(2,) the range of the training data, wider on both sides by what one sample adds on average;
    never empty."""
    gap = (span.high - span.low) / max(span.count, 1)
    smallest = 1e-6 * max(1.0, abs(span.low), abs(span.high))
    gap = max(gap, smallest)
    return torch.tensor([span.low - gap, span.high + gap], dtype=torch.float64)


def _divergence(histograms: Tensor, mean: Tensor, smoothing: int, floor: float) -> Tensor:
    """(N,) symmetric Kullback-Leibler divergence between each smoothed histogram (N, B) and the
    mean one (B,)."""
    q = _smoothed(histograms, smoothing) + floor
    q = q / q.sum(dim=1, keepdim=True)
    p = mean + floor
    p = p / p.sum()
    return ((p - q) * (p.log() - q.log())).sum(dim=1)


def _smoothed(histograms: Tensor, size: int) -> Tensor:
    """(N, B) moving averages over `size` bins, the first and the last bin repeated at the ends."""
    before = (size - 1) // 2
    first = histograms[:, :1].expand(-1, before)
    last = histograms[:, -1:].expand(-1, size - 1 - before)
    padded = torch.cat([first, histograms, last], dim=1)
    return F.avg_pool1d(padded.unsqueeze(1), size, stride=1).squeeze(1)
