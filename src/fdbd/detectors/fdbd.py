"""fDBD, the detector of the paper, with the variants of its ablations."""

from typing import Annotated, Any

import torch
from torch import Tensor

from fdbd import geometry, kernels
from fdbd.detectors.base import Batch, Detector, Head, Needs, Paper, Passes, at_least_one, one_of
from fdbd.fitting.statistics import Mean

FDBD_PAPER = Paper(
    "Fast Decision Boundary based Out-of-Distribution Detector", "Liu and Qin", "ICML", 2024
)


class FDBD(Detector):
    """Average distance to the decision boundaries over the deviation from the training mean (Liu &
    Qin, 2024).

        score(z) = 1/(C−1) Σ_{c≠k} D̃(z, c) / ‖z − μ‖, D̃(z, c) = ((w_k − w_c)·z + b_k − b_c) / ‖w_k
        − w_c‖

    All boundaries of a class fold into one vector (`geometry.Folded`), so a score costs O(P) and
    one read of z. Rows too large for float32 are scored in float64; in compiled and exported
    graphs, which cannot look at a number, they score −inf.

    Args:
        normalizer: "deviation" divides by ‖z − μ‖ (the paper), "norm" by ‖z‖ (OpenOOD's variant),
            None not at all (avgDistDB of the ablation).
        nearest: average only the k smallest distances (the ablation on individual distances): O(C)
            per sample and a (C, C) table; None averages all.

    >>> FDBD().fit(Batch(torch.eye(3)), Head(torch.eye(3))).score(Batch(torch.eye(3)))
    tensor([0.8660, 0.8660, 0.8660])
    """

    name = "fdbd"
    paper = FDBD_PAPER
    needs = Needs(logits=True, passes=1)
    normals: Annotated[Tensor, "C P"]
    offsets: Annotated[Tensor, "C"]
    center: Annotated[Tensor, "P"]
    floor: Annotated[Tensor, ""]
    norms: Annotated[Tensor, "C C"]

    def __init__(
        self, normalizer: geometry.Normalizer = "deviation", nearest: int | None = None
    ) -> None:
        super().__init__()
        self.normalizer = one_of("normalizer", normalizer, "deviation", "norm", None)
        expected = "a number of distances, at least 1, or None for all"
        self.nearest = None if nearest is None else at_least_one("nearest", nearest, expected)
        self._notices_bad_rows = nearest is None
        self._few_rows = kernels.FewRows()

    def passes(self, head: Head) -> Passes:
        training = yield Mean(head.num_features)
        self.set_mean(training.mean())

    def set_mean(self, mean: Tensor) -> None:
        """Fold the head around a training mean (P,); `Shaped` gives a shaped one."""
        folded = geometry.Folded(self.head, mean, self.normalizer, self.fit_dtype)
        self.set_buffers(
            normals=folded.normals, offsets=folded.offsets, center=folded.center, floor=folded.floor
        )
        if self.nearest is not None:
            self.set_buffers(norms=geometry.pairwise_norms(self.head))

    def formula(self, batch: Batch) -> Tensor:
        if self.nearest is None:
            return kernels.folded_score(
                batch.features, self._folded(), self.normalizer is not None, logits=batch.logits
            )
        distances = geometry.distances(
            batch.features, self.head, logits=batch.logits, norms=self.norms
        )
        average = geometry.mean_of_nearest(distances, self.nearest)
        if self.normalizer is None:
            return average
        deviation = torch.linalg.vector_norm(batch.features - self.center, dim=1)
        return average / torch.maximum(deviation, self.floor)

    def _score_of_few(self, batch: Batch) -> Tensor | None:
        has_own_formula = type(self).formula is not FDBD.formula
        is_on_sphere = "head_is_cosine" in self._buffers
        if self.nearest is not None or has_own_formula or is_on_sphere or not self.is_fitted:
            return None
        if batch.logits is None:
            return None
        divide = self.normalizer is not None
        return self._few_rows.score(batch.features, batch.logits, self._folded(), divide)

    def _folded(self) -> Any:
        # As attributes of a module they would cost a microsecond each.
        buffers = self._buffers
        return buffers["normals"], buffers["offsets"], buffers["center"], buffers["floor"]


class Deviation(Detector):
    """Distance of a feature from the training mean: ‖z − μ‖, the regularisation term of fDBD alone.
    O(P) per sample.

    Here for the paper's ablation, which finds that the term hardly separates ID from OOD by itself.
    Its sign depends on the network: OOD features lie nearer to the mean than ID ones in CIFAR-10
    ResNets, so the distance is not negated, but further away in ResNet-50 and EfficientNet on
    ImageNet, where this score ranks them the wrong way round.

    >>> detector = Deviation().fit(
    ...     Batch(torch.tensor([[0.0, 0.0], [2.0, 0.0]])), Head(torch.eye(2))
    ... )
    >>> detector.score(Batch(torch.tensor([[1.0, 0.0], [4.0, 4.0]])))
    tensor([0., 5.])
    """

    name = "deviation"
    paper = FDBD_PAPER
    has_known_direction = False
    needs = Needs(passes=1)
    center: Annotated[Tensor, "P"]

    def passes(self, head: Head) -> Passes:
        training = yield Mean(head.num_features)
        self.set_buffers(center=training.mean())

    def formula(self, batch: Batch) -> Tensor:
        deviation: Tensor = torch.linalg.vector_norm(batch.features - self.center, dim=1)
        return deviation
