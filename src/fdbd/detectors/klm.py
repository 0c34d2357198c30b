"""KL matching: how far a prediction is from the typical predictions of every class."""

from typing import Annotated

import torch
from torch import Tensor

from fdbd.detectors.base import Batch, Detector, Head, Needs, Paper, Passes, required_logits
from fdbd.detectors.softmax import bound_, gaps
from fdbd.fitting.statistics import ClassMeans, with_logits


class KLMatching(Detector):
    """Divergence from the nearest class's average prediction (Hendrycks et al., 2022).

        score = −min_c KL(p ‖ d_c),   d_c = mean softmax of the training samples predicted as c

    KL(p ‖ d_c) = Σ p log p − p·log d_c, so all classes cost one matrix product: O(C²) per sample. A
    class that no training sample is predicted as has no d_c and is left out. No labels are needed.

    >>> features = 4 * torch.eye(3).repeat(20, 1) + torch.rand(60, 3)
    >>> detector = KLMatching().fit(Batch(features), Head(torch.eye(3)))
    >>> known_and_unknown = Batch(torch.tensor([[4.5, 0.5, 0.5], [1.5, 1.5, 1.5]]))
    >>> detector.score(known_and_unknown).argmax()
    tensor(0)
    """

    name = "klm"
    paper = Paper(
        "Scaling Out-of-Distribution Detection for Real-World Settings",
        "Hendrycks et al.",
        "ICML",
        2022,
    )
    needs = Needs(features=False, logits=True, passes=1)
    log_templates: Annotated[Tensor, "M C"]

    def passes(self, head: Head) -> Passes:
        means = yield from with_logits(
            ClassMeans(head.num_classes, head.num_classes, predictions), head
        )
        templates = means.means()[means.counts > 0]
        # A probability that underflowed is not impossible, only smaller than any number: keep its
        # logarithm finite.
        self.set_buffers(log_templates=templates.clamp_min(torch.finfo(self.fit_dtype).tiny).log())

    def formula(self, batch: Batch) -> Tensor:
        # p = e^s / Σ e^s; dividing after the sums leaves out p and log p, each as large as the
        # logits.
        exponents = bound_(gaps(required_logits(batch)))
        weights = exponents.exp()
        total = weights.sum(dim=1)
        match = (weights @ self.log_templates.T).amax(dim=1)
        weighted_exponents = exponents.mul_(weights).sum(dim=1)
        return (match - weighted_exponents) / total + total.log()


def predictions(batch: Batch) -> tuple[Tensor, Tensor]:
    """Softmax (N, C) and predicted class (N,) of a batch."""
    logits = required_logits(batch)
    return logits.softmax(dim=1), logits.argmax(dim=1)
