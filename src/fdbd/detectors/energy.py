"""The energy score."""

from torch import Tensor

from fdbd.detectors.base import Batch, Detector, Needs, Paper, positive, required_logits
from fdbd.detectors.softmax import logsumexp


class Energy(Detector):
    """Negative free energy (Liu et al., 2020): T · logsumexp(logits / T). O(C) per sample.

    The fDBD paper prints it with a minus sign, which would rank OOD samples first; the original has
    none.

    Args:
        temperature: T.

    >>> import fdbd, torch
    >>> detector = fdbd.Energy().fit(fdbd.Batch(torch.eye(3)), fdbd.Head(torch.eye(3)))
    >>> detector.score(fdbd.Batch(torch.tensor([[3.0, 0.0, 0.0], [1.0, 1.0, 1.0]])))
    tensor([3.0949, 2.0986])
    """

    name = "energy"
    paper = Paper("Energy-based Out-of-distribution Detection", "Liu et al.", "NeurIPS", 2020)
    needs = Needs(features=False, logits=True, passes=0)

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = positive("temperature", temperature)

    def formula(self, batch: Batch) -> Tensor:
        logits = required_logits(batch)
        if self.temperature == 1:
            return logsumexp(logits)
        return self.temperature * logsumexp(logits / self.temperature)
