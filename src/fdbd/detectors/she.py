"""SHE, the simplified Hopfield energy."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import kernels
from ..batch import Batch, Head
from ..statistics import ClassMeans, labels_of
from .base import Detector, Paper, Passes, closes_itself


class SHE(Detector):
    """Inner product with the stored pattern of the predicted class (Zhang et al., 2023).

        score(z) = z·s_k,   k the predicted class, s_c the mean feature of the training samples rightly predicted as c

    O(P) a sample and one read of z. A class without a rightly predicted sample has nothing stored: its pattern is 0.
    """

    name = "she"
    paper = Paper(
        "Out-of-Distribution Detection based on In-Distribution Data Patterns Memorization with Modern Hopfield Energy",
        "Zhang et al.",
        "ICLR",
        2023,
    )
    reads = ("features", "logits")
    needs_labels = True
    one_pass = True
    patterns: Tensor
    offsets: Tensor
    center: Tensor
    floor: Tensor

    def passes(self, head: Head) -> Passes:
        means = yield ClassMeans(head.num_classes, head.num_features, rightly_predicted)
        if not means.counts.any():
            raise ValueError(
                "no training sample is predicted as its label, so SHE has no pattern to store: check that labels and "
                "head count the classes in the same order"
            )
        patterns = torch.where(means.counts[:, None] > 0, means.means(), 0)
        zeros = patterns.new_zeros
        self.set(patterns=patterns, offsets=zeros(head.num_classes), center=zeros(head.num_features), floor=zeros(()))

    @closes_itself
    def score(self, batch: Batch) -> Tensor:
        prepared = self.prepare(batch)
        # fDBD's kernel with the patterns in place of the folded normals and nothing to divide by.
        scores, clean = kernels.folded_score(
            prepared.features, self.patterns, self.offsets, self.center, self.floor, False, logits=prepared.logits
        )
        if torch.compiler.is_compiling():
            return torch.where(scores.isnan(), -torch.inf, scores)
        return scores if clean else self._fail_closed(batch, prepared, scores)


def rightly_predicted(batch: Batch) -> tuple[Tensor, Tensor]:
    """Features and classes of those samples of a batch whose predicted class is their label."""
    assert batch.logits is not None
    labels = labels_of(batch)
    right = batch.logits.argmax(dim=1).cpu() == labels
    return batch.features[right.to(batch.features.device)], labels[right]
