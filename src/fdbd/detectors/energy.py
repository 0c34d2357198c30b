"""The energy score."""

from __future__ import annotations

from torch import Tensor

from fdbd.detectors.base import Paper
from fdbd.detectors.exponentials import SoftmaxDetector, Sums


class Energy(SoftmaxDetector):
    """Negative free energy (Liu et al., 2020): T · logsumexp(logits / T). O(C) per sample.

    The fDBD paper prints it with a minus sign, which would rank OOD samples first; the original has none.

    Args:
        temperature: T.
    """

    name = "energy"
    paper = Paper("Energy-based Out-of-distribution Detection", "Liu et al.", "NeurIPS", 2020)
    has_temperature = True

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}, expected a positive number")
        self.temperature = temperature

    def of_sums(self, sums: Sums) -> Tensor:
        return sums.largest + self.temperature * sums.total.log()
