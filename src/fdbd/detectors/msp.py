"""Maximum softmax probability."""

from torch import Tensor

from fdbd.detectors.base import Batch, Detector, Needs, Paper, positive, required_logits
from fdbd.detectors.softmax import largest_probability


class MSP(Detector):
    """Probability of the predicted class (Hendrycks & Gimpel, 2017): max_c softmax(logits / T)_c.
    O(C) per sample.

    Args:
        temperature: divides the logits; 1 is the original, 1000 is ODIN's.

    >>> import fdbd, torch
    >>> detector = fdbd.MSP().fit(fdbd.Batch(torch.eye(3)), fdbd.Head(torch.eye(3)))
    >>> detector.score(fdbd.Batch(torch.tensor([[3.0, 0.0, 0.0], [1.0, 1.0, 1.0]])))
    tensor([0.9094, 0.3333])
    """

    name = "msp"
    paper = Paper(
        "A Baseline for Detecting Misclassified and Out-of-Distribution Examples in Neural"
        " Networks",
        "Hendrycks and Gimpel",
        "ICLR",
        2017,
    )
    needs = Needs(features=False, logits=True, passes=0)

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = positive("temperature", temperature)

    def formula(self, batch: Batch) -> Tensor:
        logits = required_logits(batch)
        if self.temperature != 1:
            logits = logits / self.temperature
        return largest_probability(logits)
