"""SHE, the simplified Hopfield energy."""

from typing import Annotated

import torch
from torch import Tensor

from fdbd import kernels
from fdbd.detectors.base import (
    Batch,
    Detector,
    Head,
    Needs,
    Paper,
    Passes,
    required_labels,
    required_logits,
)
from fdbd.fitting.statistics import ClassMeans, with_logits


class SHE(Detector):
    """Inner product with the stored pattern of the predicted class (Zhang et al., 2023).

        score(z) = z·s_k, k the predicted class, s_c the mean feature of the training samples
        correctly predicted as c

    O(P) per sample and one read of z. A class without a correctly predicted sample has the pattern
    0.

    >>> detector = SHE().fit(Batch(4 * torch.eye(3), None, torch.arange(3)), Head(torch.eye(3)))
    >>> detector.score(Batch(torch.tensor([[4.0, 0.0, 0.0], [1.0, 1.0, 1.0]])))
    tensor([16.,  4.])
    """

    name = "she"
    paper = Paper(
        "Out-of-Distribution Detection based on In-Distribution Data Patterns Memorization with"
        " Modern Hopfield Energy",
        "Zhang et al.",
        "ICLR",
        2023,
    )
    needs = Needs(logits=True, labels=True, passes=1)
    _notices_bad_rows = True
    patterns: Annotated[Tensor, "C P"]
    offsets: Annotated[Tensor, "C"]
    center: Annotated[Tensor, "P"]
    floor: Annotated[Tensor, ""]

    def passes(self, head: Head) -> Passes:
        # One class more than there are collects what is predicted wrongly.
        sums = yield from with_logits(
            ClassMeans(head.num_classes + 1, head.num_features, features_by_class), head
        )
        counts = sums.counts[:-1]
        means = sums.means()[:-1]
        if not counts.any():
            raise ValueError(
                "no training sample is predicted as its label, so SHE has no pattern to store:"
                " check that labels and head count the classes in the same order"
            )
        patterns = torch.where(counts[:, None] > 0, means, 0)
        zeros = patterns.new_zeros
        self.set_buffers(
            patterns=patterns,
            offsets=zeros(head.num_classes),
            center=zeros(head.num_features),
            floor=zeros(()),
        )

    def formula(self, batch: Batch) -> Tensor:
        # fDBD's kernel with the patterns in place of the folded normals and nothing to divide by.
        folded = (self.patterns, self.offsets, self.center, self.floor)
        return kernels.folded_score(batch.features, folded, False, logits=batch.logits)


def features_by_class(batch: Batch) -> tuple[Tensor, Tensor]:
    """Features (N, P) and classes (N,) of a batch: the label if it is predicted, C if it is
    not."""
    logits = required_logits(batch)
    labels = required_labels(batch)
    is_right = logits.argmax(dim=1).cpu() == labels
    return batch.features, torch.where(is_right, labels, logits.shape[1])
