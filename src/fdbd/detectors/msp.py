"""Maximum softmax probability."""

from __future__ import annotations

from torch import Tensor

from ..batch import Batch
from .base import Detector, Paper
from .exponentials import bound_, gaps


class MSP(Detector):
    """Probability of the predicted class (Hendrycks & Gimpel, 2017): max_c softmax(logits / T)_c. O(C) a sample.

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
    reads = ("logits",)
    one_pass = True

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}, expected a positive number")
        self.temperature = temperature

    def score(self, batch: Batch) -> Tensor:
        assert batch.logits is not None
        # e^max / Σ e^logit = 1 / Σ e^gap
        scaled = batch.logits if self.temperature == 1 else batch.logits / self.temperature
        return bound_(gaps(scaled)).exp_().sum(dim=1).reciprocal_()
