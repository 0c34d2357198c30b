"""NAC: whether a sample's neurons are in states that the training data have covered."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from fdbd.core.linear_algebra import in_blocks
from fdbd.detectors.base import (
    Batch,
    Detector,
    Head,
    Inputs,
    Needs,
    Paper,
    Passes,
    at_least_one,
    expect,
    positive,
    required_logits,
)
from fdbd.fitting.statistics import Additive, Together, check_finite, with_logits
from fdbd.util.torch_compat import tracing

_BASE = 1000.0
"""Base of the logarithm that spaces the edges of the bins, in the authors' code."""


class NAC(Detector):
    """Coverage of the states of a sample's neurons by the training data (NAC-UE, Liu et al., 2024).

        score(z) = 1/P Σ_j min(n_j(b_j) / (fill · N), 1),   s_j = σ(steepness · z_j ∂L/∂z_j)

    L is the cross-entropy of the softmax against the uniform distribution, whose gradient is Wᵀ(p −
    1/C). s_j is the state of neuron j, b_j the bin it falls into, and n_j(b) the number of the N
    training samples whose state of neuron j is in bin b. Bins are finest around 0.5, the state of a
    neuron without influence. No labels are needed. O(CP) per sample.

    Without `layers` this is the score of the penultimate layer. With them it is the mean over the
    penultimate layer and these, where z and ∂L/∂z of a layer are pooled over its positions. It then
    works only in a Guard, which lets `observe` run the network: a forward pass, and a backward one
    down to the earliest layer.

    The authors' code counts 1,000 training samples and takes a bin as full from 50 of them for
    CIFAR-10, the default here as a share, and from 10 with a steepness of 3,000 for ResNet-50 on
    ImageNet: ``NAC(fill=0.01, steepness=3000)``. These are tuned on validation data with outliers.

    The edges are those of the authors' code for OpenOOD, which has finer bins around 0.5. Others
    differ: the code of their paper spaces the edges evenly, and pytorch-ood 0.4 has the finest bins
    at 0 and 1, so that its AUROC may be points above or below this one.

    Args:
        bins: number of edges of the bins (M), even.
        fill: share of the training samples that fills a bin (O/N).
        steepness: of the sigmoid (α); one number, or one for each layer, the penultimate first:
            gradients of earlier layers are of other sizes, and the authors tune it for each.
        layers: names of modules of the network whose states count besides the penultimate features.

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
    #: upper ends of all bins but the last
    edges: Annotated[Tensor, "E"]
    #: coverage of each bin of each neuron, from 0 to 1
    coverage: Annotated[Tensor, "P B"]

    def __init__(
        self,
        bins: int = 50,
        fill: float = 0.05,
        steepness: float | Sequence[float] = 100.0,
        layers: Sequence[str] = (),
    ) -> None:
        super().__init__()
        names = (layers,) if isinstance(layers, str) else tuple(layers)
        self.layers = expect("layers", names, len(set(names)) == len(names), "each name once")
        if self.layers:
            self.needs = Needs(logits=True, network=True, layers=self.layers, passes=1)
        bins = at_least_one("bins", bins, "an even number of edges, at least 4")
        self.bins = expect("bins", bins, bins >= 4 and bins % 2 == 0, "an even number, at least 4")
        self.fill = float(expect("fill", fill, 0 < fill <= 1, "a share above 0 and at most 1"))
        self.steepness = _checked_steepness(steepness, 1 + len(self.layers))

    def observe(
        self, images: Inputs, classifier: Callable[[Inputs], Batch], labels: Tensor | None = None
    ) -> Batch:
        """The model's batch; with `layers`, these hold their outputs times the gradient of L with
        respect to them, both pooled."""
        if not self.layers:
            return classifier(images)
        network: Any = classifier
        batch, gradients = network.with_gradients(images, _distance_from_uniform)
        influences = {}
        for name in self.layers:
            influences[name] = batch.layers[name] * gradients[name]
        observed: Batch = batch._replace(layers=influences)
        return observed

    def example(self) -> Batch:
        example = super().example()
        if not self.layers:
            return example
        layers = {}
        for number, name in enumerate(self.layers, start=1):
            coverage = self._coverage_of(number)
            layers[name] = coverage.new_zeros(2, coverage.shape[0])
        return example._replace(layers=layers)

    def buffer_shape(self, name: str) -> str | None:
        _, _, number = name.partition("coverage_")
        if not number.isdigit():
            return super().buffer_shape(name)
        # Each layer has its own width.
        return f"P{number} B"

    def passes(self, head: Head) -> Passes:
        edges = torch.from_numpy(_inner_edges(self.bins))
        self.set_buffers(edges=edges)
        tables = [_Occupancy(self, number) for number in range(1 + len(self.layers))]
        occupied = yield from with_logits(Together(tables), head)
        for number, table in enumerate(occupied.parts):
            shares = table.counts / table.count
            self.set_buffers(**{_buffer_of(number): (shares / self.fill).clamp_max(1)})

    def influences(self, batch: Batch, number: int) -> Tensor:
        """(N, P) z · ∂L/∂z of the neurons of the penultimate layer, number 0, or of another."""
        if number > 0:
            assert batch.layers is not None
            return batch.layers[self.layers[number - 1]].to(self.edges.dtype)
        logits = required_logits(batch).to(self.edges.dtype)
        pull = logits.softmax(dim=1) - 1 / logits.shape[1]
        return batch.features.to(self.edges.dtype) * (pull @ self.head_weight)

    def bins_of(self, influences: Tensor, number: int) -> Tensor:
        """(N, P) index of the bin that each neuron's state falls into."""
        steepness = self.steepness
        if isinstance(steepness, tuple):
            steepness = steepness[number]
        states = (steepness * influences).sigmoid()
        if tracing():
            # ONNX has no search in sorted values.
            return (states.unsqueeze(2) >= self.edges).sum(dim=2)
        return torch.bucketize(states, self.edges, right=True)

    def formula(self, batch: Batch) -> Tensor:
        scores = []
        for number in range(1 + len(self.layers)):
            influences = self.influences(batch, number)
            mean_coverage = partial(self._mean_coverage, number=number)
            scores.append(in_blocks(mean_coverage, influences, 4 * influences.shape[1]))
        return torch.stack(scores).mean(dim=0)

    def _mean_coverage(self, influences: Tensor, number: int) -> Tensor:
        """(N,) mean coverage of the states of one layer's neurons."""
        coverage = self._coverage_of(number)
        width, num_bins = coverage.shape
        first = torch.arange(width, device=influences.device) * num_bins
        places = first + self.bins_of(influences, number)
        return coverage.flatten()[places].mean(dim=1)

    def _coverage_of(self, number: int) -> Tensor:
        coverage: Tensor = getattr(self, _buffer_of(number))
        return coverage


class _Occupancy(Additive):
    """Counts (P, B) for one layer: the number of samples whose state of a neuron falls into a bin,
    by the detector's definition of states and bins."""

    sums = ("count", "counts")

    def __init__(self, detector: NAC, number: int) -> None:
        self.detector = detector
        self.number = number
        self.count = 0
        # The width of a layer is known from the first batch.
        self.counts = torch.zeros(1, len(detector.edges) + 1, dtype=torch.float64)

    def update(self, batch: Batch) -> None:
        influences = self.detector.influences(batch, self.number)
        if self.number > 0:
            name = self.detector.layers[self.number - 1]
            check_finite(influences, f"what goes through its layer {name!r}")
        bins = self.detector.bins_of(influences, self.number).cpu()
        width = bins.shape[1]
        num_bins = self.counts.shape[1]
        places = bins + num_bins * torch.arange(width)
        found = torch.bincount(places.flatten(), minlength=width * num_bins)
        self.counts = self.counts + found.reshape(width, num_bins)
        self.count += len(bins)


def _distance_from_uniform(batch: Batch) -> Tensor:
    """(N,) L: the cross-entropy of the uniform distribution and the softmax."""
    return -required_logits(batch).log_softmax(dim=1).mean(dim=1)


def _checked_steepness(
    steepness: float | Sequence[float], num_layers: int
) -> float | tuple[float, ...]:
    """One positive number, or one for each layer."""
    if not isinstance(steepness, Sequence):
        return float(positive("steepness", steepness))
    if len(steepness) != num_layers:
        raise ValueError(
            f"steepness has {len(steepness)} numbers, expected one, or {num_layers}: one for each "
            "layer, the penultimate first"
        )
    return tuple(float(positive("steepness", value)) for value in steepness)


def _buffer_of(number: int) -> str:
    """The buffer with a layer's coverage; that of the penultimate layer, 0, has the plain name."""
    return f"coverage_{number}" if number > 0 else "coverage"


def _inner_edges(count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The edges between bins: the authors' `count` edges on [0, 1], finest around 0.5, without the
    first, which is 0, and the last two, which lie above all states."""
    half = count // 2
    lower = np.log(np.linspace(1, np.sqrt(_BASE), half)) / np.log(_BASE)
    upper = 1 - lower[::-1]
    inner: np.ndarray[tuple[int], np.dtype[np.float64]] = np.concatenate([lower[1:-1], upper[:-1]])
    return inner
