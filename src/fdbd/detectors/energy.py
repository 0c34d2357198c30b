"""The energy score."""

from __future__ import annotations

from torch import Tensor

from fdbd.core.batch import Batch
from fdbd.detectors.base import Detector, Needs, Paper
from fdbd.detectors.softmax import logsumexp


class Energy(Detector):
    """Negative free energy (Liu et al., 2020): T · logsumexp(logits / T). O(C) per sample.

    The fDBD paper prints it with a minus sign, which would rank OOD samples first; the original has none.

    Args:
        temperature: T.

    >>> import fdbd, torch
    >>> head = fdbd.Head(torch.eye(3))
    >>> detector = fdbd.Energy().fit(fdbd.Batch(torch.eye(3)), head)
    >>> detector.score(fdbd.Batch(torch.tensor([[3.0, 0.0, 0.0], [1.0, 1.0, 1.0]])))
    tensor([3.0949, 2.0986])
    """

    name = "energy"
    paper = Paper("Energy-based Out-of-distribution Detection", "Liu et al.", "NeurIPS", 2020)
    needs = Needs(features=False, logits=True, passes=0)

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}, expected a positive number")
        self.temperature = temperature

    def score(self, batch: Batch) -> Tensor:
        assert batch.logits is not None
        if self.temperature == 1:
            return logsumexp(batch.logits)
        return self.temperature * logsumexp(batch.logits / self.temperature)
