"""GROOD: nearest neighbours among gradients with respect to a prototype of outliers."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from fdbd.core.linear_algebra import in_blocks, unit
from fdbd.detectors.base import (
    Batch,
    Head,
    Needs,
    Paper,
    Passes,
    expect,
    required_labels,
    required_logits,
)
from fdbd.detectors.knn import Banked
from fdbd.fitting.statistics import Bank, ClassMeans, with_logits
from fdbd.geometry import nearest_squared_distance, squared_distances


class GROOD(Banked):
    """Distance of a sample's gradient to the nearest gradient of the training data (ElAraby et al.,
    2025).

        score(z) = −min_i ‖g(z) − g(z_i)‖²,   g(z) = p(z) (z − o)/‖z − o‖

    g is the gradient, with respect to a prototype o of outliers, of the loss of a classifier whose
    logits are the negated distances to the class means and to o; p is the probability that this
    classifier gives to o. Training samples that the network predicts wrongly are left out. O(CP +
    MP) per sample for M samples kept.

    Args:
        prototype: o, P numbers. The authors' choice is the mean feature of 100 outliers of a
            validation set, and then results are tuned on outliers:
            ``GROOD(prototype=features.mean(0).tolist())``. None: the mean of the class means, which
            their code has as an option and which needs no outliers.
        alpha: fraction of the training samples to keep, chosen by a hash of each sample.

    >>> import fdbd
    >>> features = 4 * torch.eye(3).repeat(20, 1) + torch.rand(60, 3)
    >>> batch = Batch(features, None, torch.arange(3).repeat(20))
    >>> detector = fdbd.create("grood").fit(batch, Head(torch.eye(3)))
    >>> detector.score(
    ...     Batch(torch.tensor([[4.5, 0.5, 0.5], [1.5, 1.5, 1.5]]))
    ... ).argmax()  # the first is known
    tensor(0)
    """

    name = "grood"
    paper = Paper(
        "GROOD: GRadient-Aware Out-of-Distribution Detection", "ElAraby et al.", "TMLR", 2025
    )
    needs = Needs(labels=True, passes=2)
    #: mean features of the classes with training samples
    class_means: Annotated[Tensor, "S P"]
    #: the prototype o
    outlier: Annotated[Tensor, "P"]

    def __init__(self, prototype: Sequence[float] | None = None, alpha: float = 1.0) -> None:
        super().__init__(k=1, alpha=alpha)
        if prototype is not None:
            prototype = tuple(float(value) for value in prototype)
            is_finite = all(abs(value) < float("inf") for value in prototype)
            expect("prototype", prototype, is_finite, "finite numbers, one per feature")
        self.prototype = prototype

    def passes(self, head: Head) -> Passes:
        sums = yield ClassMeans(head.num_classes, head.num_features)
        means = sums.means()[sums.counts > 0]
        self.set_buffers(class_means=means, outlier=self._outlier(means))
        bank = yield from with_logits(Bank(self.alpha, self._gradients_of_predicted), head)
        gradients = bank.samples(self.fit_dtype)
        if not len(gradients):
            raise ValueError(
                "no training sample is predicted as its label, so GROOD has no gradient to keep: "
                "check that labels and head count the classes in the same order"
            )
        self.keep(gradients)

    def _outlier(self, means: Tensor) -> Tensor:
        """(P,) float64, the prototype of outliers."""
        if self.prototype is None:
            return means.mean(dim=0)
        outlier = torch.tensor(self.prototype, dtype=torch.float64)
        if len(outlier) != means.shape[1]:
            raise ValueError(
                f"prototype has {len(outlier)} numbers, expected one per feature: {means.shape[1]}"
            )
        return outlier

    def _gradients_of_predicted(self, batch: Batch) -> Tensor:
        """(M, P) gradients of the samples that are predicted as their label."""
        predicted = required_logits(batch).argmax(dim=1).cpu()
        is_right = predicted == required_labels(batch).cpu()
        features = batch.features.to(self.class_means)
        return self._gradients(features[is_right.to(features.device)])

    def _gradients(self, features: Tensor) -> Tensor:
        """(N, P) g of each sample."""
        width = max(len(self.class_means), features.shape[1])
        return in_blocks(self._gradients_of_block, features, width)

    def _gradients_of_block(self, features: Tensor) -> Tensor:
        from_outlier = features - self.outlier
        to_outlier: Tensor = torch.linalg.vector_norm(from_outlier, dim=1, keepdim=True)
        # About the prototype, since squares of features far from 0 lose what tells means apart.
        means = self.class_means - self.outlier
        to_means = squared_distances(from_outlier, means).sqrt()
        logits = -torch.cat([to_means, to_outlier], dim=1)
        probability = logits.softmax(dim=1)[:, -1:]
        return probability * unit(from_outlier)

    def formula(self, batch: Batch) -> Tensor:
        def distance(gradients: Tensor) -> Tensor:
            return nearest_squared_distance(gradients, self.bank)

        gradients = self._gradients(batch.features)
        return -in_blocks(distance, gradients, self.bank.shape[0])
