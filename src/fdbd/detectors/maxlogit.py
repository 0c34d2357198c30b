"""The largest logit."""

from torch import Tensor

from fdbd.detectors.base import Batch, Detector, Needs, Paper, required_logits
from fdbd.detectors.softmax import by_class


class MaxLogit(Detector):
    """Largest logit, before softmax divides its size away (Hendrycks et al., 2022): max_c logits_c.
    O(C) per sample.

    >>> import fdbd, torch
    >>> detector = MaxLogit().fit(Batch(torch.eye(2)), fdbd.Head(torch.eye(2)))
    >>> detector.score(Batch(torch.tensor([[3.0, 1.0]])))
    tensor([3.])
    """

    name = "maxlogit"
    paper = Paper(
        "Scaling Out-of-Distribution Detection for Real-World Settings",
        "Hendrycks et al.",
        "ICML",
        2022,
    )
    needs = Needs(features=False, logits=True, passes=0)

    def formula(self, batch: Batch) -> Tensor:
        return by_class(required_logits(batch)).amax(dim=1)
