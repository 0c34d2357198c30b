"""The entropy of the predicted distribution."""

from __future__ import annotations

from torch import Tensor

from fdbd.detectors.base import Paper
from fdbd.detectors.exponentials import SoftmaxDetector, Sums


class Entropy(SoftmaxDetector):
    """Negative Shannon entropy of the softmax, in nats (Chan et al., 2021): Σ_c p_c log p_c. O(C) per sample.

    0 for a certain prediction, −log C for one that says nothing.

    >>> import torch
    >>> from fdbd import Batch, Head
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

    def of_sums(self, sums: Sums) -> Tensor:
        # Σ p log p with p = e^s / Σ e^s is Σ e^s s / Σ e^s − log Σ e^s: no p, no log p, and nothing to clip at 0
        return sums.weighted / sums.total - sums.total.log()
