"""The entropy of the predicted distribution."""

from __future__ import annotations

from torch import Tensor

from ..batch import Batch
from .base import Detector, Paper
from .exponentials import bound_, gaps


class Entropy(Detector):
    """Negative Shannon entropy of the softmax, in nats (Chan et al., 2021): Σ_c p_c log p_c. O(C) a sample.

    0 for a certain prediction, −log C for one that says nothing.

    >>> import torch
    >>> from fdbd import Head
    >>> detector = Entropy().fit(Batch(torch.eye(2)), Head(torch.eye(2)))
    >>> detector.score(Batch(torch.zeros(1, 2)))
    tensor([-0.6931])
    """

    name = "entropy"
    paper = Paper(
        "Entropy Maximization and Meta Classification for Out-of-Distribution Detection in Semantic Segmentation",
        "Chan et al.",
        "ICCV",
        2021,
    )
    reads = ("logits",)
    one_pass = True

    def score(self, batch: Batch) -> Tensor:
        assert batch.logits is not None
        # Σ p log p with p = e^s / Σ e^s is Σ e^s s / Σ e^s − log Σ e^s: no p, no log p, and nothing to clip at 0
        exponents = bound_(gaps(batch.logits))
        weights = exponents.exp()
        total = weights.sum(dim=1)
        return exponents.mul_(weights).sum(dim=1) / total - total.log()
