"""LTS: logits scaled by the share of the largest activations."""

from torch import Tensor

from fdbd.core.batch import Batch, required_logits
from fdbd.core.configuration import Needs, Paper
from fdbd.detectors.shaping.top_share import TopShare


class LTS(TopShare):
    """Logits scaled by (Σz / Σ of the k largest)², over the positive activations (Djurisic et al.,
    2024).

    Features stay as they are, so it means something only for detectors that read the logits' size
    (Energy, MSP, …), not for those that take just the predicted class from them, such as fDBD. O(P)
    per sample.

    Args:
        percentile: percent of the sample's P activations that are not among the k largest; the
            paper's top 5 % is 95.

    >>> import fdbd, torch
    >>> detector = fdbd.create("lts+energy", percentile=50).fit(
    ...     fdbd.Batch(torch.eye(3)), fdbd.Head(torch.eye(3))
    ... )
    >>> detector.score(fdbd.Batch(torch.tensor([[3.0, 1.0, 0.0]])))
    tensor([5.3662])
    """

    name = "lts"
    paper = Paper(
        "Logit Scaling for Out-of-Distribution Detection", "Djurisic et al.", "arXiv", 2024
    )
    needs = Needs(logits=True, passes=0)
    touches = "logits"

    def __init__(self, percentile: float = 95.0) -> None:
        super().__init__(percentile)

    def forward(self, features: Tensor) -> Tensor:
        return features

    def shape(self, batch: Batch) -> Batch:
        return batch._replace(
            logits=required_logits(batch) * self.ratio(batch.features.relu()).square()
        )
