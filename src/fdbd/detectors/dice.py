"""DICE: energy from the weights that matter."""

from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fdbd.detectors.base import Batch, Detector, Head, Needs, Paper, Passes, expect
from fdbd.detectors.softmax import logsumexp
from fdbd.fitting.statistics import Mean


class DICE(Detector):
    """Energy of a head that keeps only its largest contributions (Sun & Li, 2022).

        score(z) = logsumexp((M ⊙ W) z + b), M = 1 if w_cj · E[z_j] is above the percentile of
        all C·P of them

    One matrix product with the sparsified weights: O(C·P) per sample.

    Args:
        percentile: share of the weights that are set to zero, in percent; 90 is the paper's for
            CIFAR, 70 for ImageNet.

    >>> detector = DICE(percentile=50).fit(Batch(4 * torch.eye(3)), Head(torch.eye(3)))
    >>> detector.score(Batch(torch.tensor([[4.0, 0.0, 0.0], [1.0, 1.0, 1.0]])))
    tensor([4.0360, 2.0986])
    """

    name = "dice"
    paper = Paper(
        "DICE: Leveraging Sparsification for Out-of-Distribution Detection",
        "Sun and Li",
        "ECCV",
        2022,
    )
    needs = Needs(passes=1)
    sparse_weight: Annotated[Tensor, "C P"]

    def __init__(self, percentile: float = 90.0) -> None:
        super().__init__()
        expected = "percent of weights to drop, from 0 to below 100"
        self.percentile = expect("percentile", percentile, 0 <= percentile < 100, expected)

    def passes(self, head: Head) -> Passes:
        mean = (yield Mean(head.num_features)).mean()
        weight = head.weight.to("cpu", torch.float64)
        contributions = weight * mean
        threshold = -np.inf
        if self.percentile:
            # numpy's, since torch.quantile refuses more than 16 million numbers.
            threshold = np.percentile(contributions.numpy(), self.percentile)
        self.set_buffers(sparse_weight=torch.where(contributions > threshold, weight, 0))

    def formula(self, batch: Batch) -> Tensor:
        logits = torch.nn.functional.linear(batch.features, self.sparse_weight, self.head_bias)
        return logsumexp(logits)
