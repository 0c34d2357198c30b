"""NAC: whether a sample's neurons are in states that the training data have covered."""

from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fdbd.core.linear_algebra import in_blocks
from fdbd.detectors.base import (
    Batch,
    Detector,
    Head,
    Needs,
    Paper,
    Passes,
    at_least_one,
    expect,
    positive,
    required_logits,
)
from fdbd.fitting.statistics import Additive, with_logits
from fdbd.util.torch_compat import tracing

_BASE = 1000.0
"""Of the logarithm that spaces the edges of the bins, in the authors' code."""


class NAC(Detector):
    """Coverage of the states of a sample's neurons by the training data (NAC-UE, Liu et al., 2024).

        score(z) = 1/P Σ_j min(n_j(b_j) / (fill · N), 1),   s_j = σ(steepness · z_j ∂L/∂z_j)

    L is the cross-entropy of the softmax against the uniform distribution, whose gradient is Wᵀ(p −
    1/C). s_j is the state of neuron j, b_j the bin it falls into, and n_j(b) the number of the N
    training samples whose state of neuron j is in bin b. Bins are finest around 0.5, the state of a
    neuron without influence. No labels are needed. O(CP) per sample.

    This is the score of the penultimate layer, the authors' default in their configurations for
    ResNets. Their code counts 1,000 training samples and takes a bin as full from 50 of them for
    CIFAR-10, the default here as a share, and from 10 with a steepness of 3,000 for ResNet-50 on
    ImageNet: ``NAC(fill=0.01, steepness=3000)``. These are tuned on validation data with outliers.

    Args:
        bins: number of edges of the bins (M), even.
        fill: share of the training samples that fills a bin (O/N).
        steepness: of the sigmoid (α).

    >>> import fdbd
    >>> features = 4 * torch.eye(3).repeat(20, 1) + torch.rand(60, 3)
    >>> detector = fdbd.create("nac").fit(Batch(features), Head(torch.eye(3)))
    >>> detector.score(Batch(torch.tensor([[4.5, 0.5, 0.5], [1.5, 1.5, 1.5]]))).argmax()
    tensor(0)
    """

    name = "nac"
    paper = Paper(
        "Neuron Activation Coverage: Rethinking Out-of-distribution Detection and Generalization",
        "Liu et al.",
        "ICLR",
        2024,
    )
    needs = Needs(logits=True, passes=1)
    edges: Annotated[Tensor, "E"]  #: upper ends of all bins but the last
    coverage: Annotated[Tensor, "P B"]  #: of each bin of each neuron, from 0 to 1

    def __init__(self, bins: int = 50, fill: float = 0.05, steepness: float = 100.0) -> None:
        super().__init__()
        bins = at_least_one("bins", bins, "an even number of edges, at least 4")
        self.bins = expect("bins", bins, bins >= 4 and bins % 2 == 0, "an even number, at least 4")
        self.fill = float(expect("fill", fill, 0 < fill <= 1, "a share above 0 and at most 1"))
        self.steepness = float(positive("steepness", steepness))

    def passes(self, head: Head) -> Passes:
        edges = torch.from_numpy(_inner_edges(self.bins))
        self.set_buffers(edges=edges)
        table = _Occupancy(self, head.num_features, len(edges) + 1)
        occupancy = yield from with_logits(table, head)
        shares = occupancy.counts / occupancy.count
        self.set_buffers(coverage=(shares / self.fill).clamp_max(1))

    def bins_of(self, features: Tensor, logits: Tensor) -> Tensor:
        """(N, P) index of the bin that each neuron's state falls into."""
        pull = logits.softmax(dim=1) - 1 / logits.shape[1]
        gradients = pull @ self.head_weight
        states = (self.steepness * features * gradients).sigmoid()
        if tracing():
            # ONNX has no search in sorted values.
            return (states.unsqueeze(2) >= self.edges).sum(dim=2)
        return torch.bucketize(states, self.edges, right=True)

    def formula(self, batch: Batch) -> Tensor:
        width = batch.features.shape[1]
        first = torch.arange(width, device=batch.features.device) * self.coverage.shape[1]
        coverage = self.coverage.flatten()

        def mean_coverage(features_and_logits: Tensor) -> Tensor:
            features = features_and_logits[:, :width]
            bins = self.bins_of(features, features_and_logits[:, width:])
            return coverage[first + bins].mean(dim=1)

        # One tensor, since `in_blocks` splits one.
        both = torch.cat([batch.features, required_logits(batch)], dim=1)
        return in_blocks(mean_coverage, both, 4 * width)


class _Occupancy(Additive):
    """How many samples have each neuron's state in each bin, (P, B); the detector says which."""

    sums = ("count", "counts")

    def __init__(self, detector: NAC, width: int, bins: int) -> None:
        self.detector = detector
        self.count = 0
        self.counts = torch.zeros(width, bins, dtype=torch.float64)

    def update(self, batch: Batch) -> None:
        dtype = self.detector.head_weight.dtype
        logits = required_logits(batch)
        bins = self.detector.bins_of(batch.features.to(dtype), logits.to(dtype)).cpu()
        width, num_bins = self.counts.shape
        places = bins + num_bins * torch.arange(width)
        found = torch.bincount(places.flatten(), minlength=width * num_bins)
        self.counts += found.reshape(width, num_bins)
        self.count += len(bins)


def _inner_edges(count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The edges between bins: the authors' `count` edges on [0, 1], finest around 0.5, without the
    first, which is 0, and the last two, which lie above all states."""
    half = count // 2
    lower = np.log(np.linspace(1, np.sqrt(_BASE), half)) / np.log(_BASE)
    upper = 1 - lower[::-1]
    inner: np.ndarray[tuple[int], np.dtype[np.float64]] = np.concatenate([lower[1:-1], upper[:-1]])
    return inner
