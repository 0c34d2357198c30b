"""fDBD, the detector of the paper, with the variants of its ablations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fdbd import kernels
from fdbd.core import geometry
from fdbd.core.batch import Batch, Head
from fdbd.core.configuration import at_least_one
from fdbd.detectors.base import Detector, Paper, Passes, closes_itself
from fdbd.fitting.statistics import Mean

FDBD_PAPER = Paper("Fast Decision Boundary based Out-of-Distribution Detector", "Liu and Qin", "ICML", 2024)


class FDBD(Detector):
    """Average distance to the decision boundaries over the deviation from the training mean (Liu & Qin, 2024).

        score(z) = 1/(C−1) Σ_{c≠k} D̃(z, c) / ‖z − μ‖,   D̃(z, c) = ((w_k − w_c)·z + b_k − b_c) / ‖w_k − w_c‖

    All boundaries of a class fold into one vector (`geometry.Folded`), so a sample costs O(P) and one read of z. Rows
    too large for float32 are scored in float64; in compiled and exported graphs, which cannot look at a number, they
    score −inf.

    Args:
        normalizer: "deviation" divides by ‖z − μ‖ (the paper), "norm" by ‖z‖ (OpenOOD's variant), None not at all
            (avgDistDB of the ablation).
        nearest: average only the k smallest distances (the ablation on individual distances): O(C) a sample and a
            (C, C) table; None averages all.

    >>> from fdbd import Batch, Head
    >>> head = Head(torch.eye(3), torch.zeros(3))
    >>> detector = FDBD().fit(Batch(torch.eye(3)), head)
    >>> detector.score(Batch(torch.eye(3)))
    tensor([0.8660, 0.8660, 0.8660])
    """

    name = "fdbd"
    paper = FDBD_PAPER
    reads = ("features", "logits")
    fit_reads = ("features",)
    one_pass = True
    center: Tensor
    floor: Tensor
    norms: Tensor

    def __init__(self, normalizer: geometry.Normalizer = "deviation", nearest: int | None = None) -> None:
        super().__init__()
        if normalizer not in ("deviation", "norm", None):
            raise ValueError(f"normalizer is {normalizer!r}, expected 'deviation', 'norm' or None")
        self.normalizer: geometry.Normalizer = normalizer
        expected = "a number of distances, at least 1, or None for all"
        self.nearest = None if nearest is None else at_least_one("nearest", nearest, expected)

    def passes(self, head: Head) -> Passes:
        mean = yield Mean(head.num_features)
        self.set_mean(mean.mean())

    def set_mean(self, mean: Tensor) -> None:
        """Fold the head around a training mean (P,)."""
        folded = geometry.Folded(self.head, mean, self.normalizer, self.fit_dtype)
        self.set(normals=folded.normals, offsets=folded.offsets, center=folded.center, floor=folded.floor)
        if self.nearest is not None:
            self.set(norms=geometry.pairwise_norms(self.head))

    @closes_itself
    def score(self, batch: Batch) -> Tensor:
        prepared = self.prepare(batch)
        if self.nearest is not None:
            return self._fail_closed(batch, prepared, self._score_nearest(prepared))
        folded: dict[str, Any] = self._buffers  # as attributes of a module they would cost a microsecond each
        scores, clean = kernels.folded_score(
            prepared.features,
            folded["normals"],
            folded["offsets"],
            folded["center"],
            folded["floor"],
            self.normalizer is not None,
            logits=prepared.logits,
        )
        if kernels.tracing():
            return torch.where(scores.isnan(), -torch.inf, scores)
        # Rows with non-finite or huge numbers come back as NaN, so the others need no second look.
        return scores if clean else self._fail_closed(batch, prepared, scores)

    def _score_nearest(self, batch: Batch) -> Tensor:
        distances = geometry.distances(batch.features, self.head, logits=batch.logits, norms=self.norms)
        assert self.nearest is not None
        average = geometry.mean_of_nearest(distances, self.nearest)
        if self.normalizer is None:
            return average
        deviation = torch.linalg.vector_norm(batch.features - self.center, dim=1)
        return average / torch.maximum(deviation, self.floor)


class Deviation(Detector):
    """How far a feature deviates from the training mean: ‖z − μ‖, the regularisation term of fDBD alone. O(P) a sample.

    Not negated: a network that ends in a ReLU answers unfamiliar input weakly, so OOD features lie nearer to the mean
    than ID ones (measured on a CIFAR-10 ResNet-20). The paper finds that the term hardly separates at all on ImageNet;
    it is here for that ablation.
    """

    name = "deviation"
    paper = FDBD_PAPER
    one_pass = True
    center: Tensor

    def passes(self, head: Head) -> Passes:
        mean = yield Mean(head.num_features)
        self.set(center=mean.mean())

    def score(self, batch: Batch) -> Tensor:
        deviation: Tensor = torch.linalg.vector_norm(batch.features - self.center, dim=1)
        return deviation
