"""SCALE: all activations scaled by the share of the largest."""

from torch import Tensor

from fdbd.core.configuration import Paper
from fdbd.detectors.shaping.top_share import TopShare


class SCALE(TopShare):
    """All activations scaled by exp(Σz / Σ of the k largest), none pruned (Xu et al., 2024). Made
    for features that are not negative, as those after a ReLU. O(P) per sample.

    Args:
        percentile: percent of the sample's P activations that are not among the k largest; 85 is
            the authors' for ImageNet.

    >>> import torch
    >>> SCALE(50)(torch.tensor([[1.0, 3.0]])) / torch.tensor(4 / 3).exp()
    tensor([[1., 3.]])
    """

    name = "scale"
    paper = Paper(
        "Scaling for Training Time and Post-hoc Out-of-distribution Detection Enhancement",
        "Xu et al.",
        "ICLR",
        2024,
    )

    def __init__(self, percentile: float = 85.0) -> None:
        super().__init__(percentile)

    def forward(self, features: Tensor) -> Tensor:
        return features * self.ratio(features).exp()
