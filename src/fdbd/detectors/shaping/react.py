"""ReAct: activations clipped at a percentile."""

from typing import Annotated

import torch
from torch import Tensor

from fdbd.core.batch import Head
from fdbd.core.configuration import Needs, Paper, Passes
from fdbd.detectors.shaping.base import Shaping, percent
from fdbd.fitting.statistics import Histogram


class ReAct(Shaping):
    """Activations clipped at a percentile of all training activations (Sun et al., 2021): min(z,
    c). O(P) per sample.

    Args:
        percentile: percent of all activations of the training data that lie below c. 90 is the
            original's; the fDBD paper's experiments take 80.

    >>> react = ReAct(80)
    >>> react.set_buffers(threshold=torch.tensor(1.0))
    >>> react(torch.tensor([[0.5, 3.0]]))
    tensor([[0.5000, 1.0000]])
    """

    name = "react"
    paper = Paper(
        "ReAct: Out-of-distribution Detection With Rectified Activations",
        "Sun et al.",
        "NeurIPS",
        2021,
    )
    needs = Needs(passes=1)
    threshold: Annotated[Tensor, ""]

    def __init__(self, percentile: float = 90.0) -> None:
        super().__init__()
        self.percentile = percent("percentile", percentile)

    def passes(self, head: Head) -> Passes:
        histogram = yield Histogram()
        threshold = histogram.quantile(self.percentile / 100)
        self.set_buffers(threshold=torch.tensor(threshold, dtype=torch.float64))

    def forward(self, features: Tensor) -> Tensor:
        return torch.minimum(features, self.fitted("threshold").to(features.device))
