"""ASH, in its three variants: all but a sample's largest activations are pruned."""

from torch import Tensor

from fdbd.core.configuration import Paper
from fdbd.detectors.shaping.top_share import TopShare, prune

ASH_PAPER = Paper(
    "Extremely Simple Activation Shaping for Out-of-Distribution Detection",
    "Djurisic et al.",
    "ICLR",
    2023,
)


class ASHP(TopShare):
    """All but a sample's largest activations pruned to 0, the rest kept (ASH-P, Djurisic et al.,
    2023). O(P) per sample.

    Args:
        percentile: percent of the sample's P activations to prune; 65 is that of the authors' code.
            Ties go to the lower index.

    >>> import torch
    >>> ASHP(50)(torch.tensor([[1.0, 4.0, 3.0, 2.0]]))
    tensor([[0., 4., 3., 0.]])
    """

    name = "ash-p"
    paper = ASH_PAPER

    def forward(self, features: Tensor) -> Tensor:
        return prune(features, self.top(features))


class ASHB(TopShare):
    """All but a sample's k largest activations pruned to 0, the rest set to one value that keeps
    the sum: Σz / k (ASH-B, Djurisic et al., 2023). O(P) per sample.

    Args:
        percentile: as in `ASHP`.

    >>> import torch
    >>> ASHB(50)(torch.tensor([[1.0, 4.0, 3.0, 2.0]]))
    tensor([[0., 5., 5., 0.]])
    """

    name = "ash-b"
    paper = ASH_PAPER

    def forward(self, features: Tensor) -> Tensor:
        top = self.top(features)
        return prune(features, top, features.sum(dim=1, keepdim=True) / top.shape[1])


class ASHS(TopShare):
    """All but a sample's k largest activations pruned to 0, the rest scaled by exp(Σz / Σ of the k
    largest) (ASH-S, Djurisic et al., 2023). Made for features that are not negative, as those after
    a ReLU. O(P) per sample.

    Args:
        percentile: percent of the sample's P activations to prune; 90 is that of the authors'
            configs.

    >>> import fdbd, torch
    >>> fdbd.ASHS(percentile=50)(torch.tensor([[1.0, 2.0, 3.0, 10.0]]))
    tensor([[ 0.0000,  0.0000, 10.2716, 34.2386]])
    """

    name = "ash-s"
    paper = ASH_PAPER

    def __init__(self, percentile: float = 90.0) -> None:
        super().__init__(percentile)

    def forward(self, features: Tensor) -> Tensor:
        top = self.top(features)
        return prune(features, top) * self.ratio(features, top).exp()
