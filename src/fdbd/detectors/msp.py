"""Maximum softmax probability."""

from __future__ import annotations

from torch import Tensor

from fdbd.detectors.base import Paper
from fdbd.detectors.exponentials import SoftmaxDetector, Sums


class MSP(SoftmaxDetector):
    """Probability of the predicted class (Hendrycks & Gimpel, 2017): max_c softmax(logits / T)_c. O(C) per sample.

    Args:
        temperature: divides the logits; 1 is the original, 1000 is ODIN's.
    """

    name = "msp"
    paper = Paper(
        "A Baseline for Detecting Misclassified and Out-of-Distribution Examples in Neural Networks",
        "Hendrycks and Gimpel",
        "ICLR",
        2017,
    )
    has_temperature = True

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}, expected a positive number")
        self.temperature = temperature

    def of_sums(self, sums: Sums) -> Tensor:
        return sums.total.reciprocal()  # the largest logit's own term of the sum is e⁰
