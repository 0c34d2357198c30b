"""MCM: how clearly the nearest concept wins, for heads of cosines."""

from typing import Annotated

import torch
from torch import Tensor

from fdbd.core.linear_algebra import unit
from fdbd.detectors.base import Batch, Detector, Head, Needs, Paper, Passes, positive
from fdbd.detectors.softmax import largest_probability


class MCM(Detector):
    """Softmax probability of the nearest concept, over cosines (Ming et al., 2022).

        score(z) = max_c softmax(cos(z, w_c) / T)_c

    w_c are the rows of the head: embeddings of class names or prompts for CLIP-like models, class
    directions of a cosine classifier (`Head.cosine`). Whatever scale the head's logits have, the
    temperature here is that of the cosines themselves; 1, the paper's, is far softer than CLIP's
    1/100. A bias of the head is not used. O(C·P) per sample.

    Args:
        temperature: T.

    >>> import fdbd
    >>> detector = fdbd.create("mcm").fit(Batch(torch.eye(2)), Head.cosine(torch.eye(2), scale=100))
    >>> detector.score(Batch(torch.tensor([[3.0, 0.0], [1.0, 1.0]])))
    tensor([0.7311, 0.5000])
    """

    name = "mcm"
    paper = Paper(
        "Delving into Out-of-Distribution Detection with Vision-Language Representations",
        "Ming et al.",
        "NeurIPS",
        2022,
    )
    needs = Needs(passes=0)
    directions: Annotated[Tensor, "C P"]

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = positive("temperature", temperature)

    def passes(self, head: Head) -> Passes:
        self.set_buffers(directions=unit(head.weight))
        return
        yield

    def formula(self, batch: Batch) -> Tensor:
        cosines = torch.nn.functional.linear(unit(batch.features), self.directions)
        return largest_probability(cosines / self.temperature)
