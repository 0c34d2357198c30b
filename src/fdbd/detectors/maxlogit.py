"""The largest logit."""

from __future__ import annotations

from torch import Tensor

from fdbd.detectors.base import Paper
from fdbd.detectors.exponentials import SoftmaxDetector, Sums


class MaxLogit(SoftmaxDetector):
    """Largest logit, before softmax divides its size away (Hendrycks et al., 2022): max_c logits_c. O(C) per sample.

    >>> import torch
    >>> from fdbd import Batch, Head
    >>> detector = MaxLogit().fit(Batch(torch.eye(2)), Head(torch.eye(2)))
    >>> detector.score(Batch(torch.tensor([[3.0, 1.0]])))
    tensor([3.])
    """

    name = "maxlogit"
    paper = Paper("Scaling Out-of-Distribution Detection for Real-World Settings", "Hendrycks et al.", "ICML", 2022)
    largest_alone = True

    def of_sums(self, sums: Sums) -> Tensor:
        return sums.largest
