"""MCM: how clearly the nearest concept wins, for heads of cosines."""

from typing import Annotated, Any

import torch
from torch import Tensor

from fdbd.core.batch import ArrayLike, as_floats
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

    With `negatives`, directions of prompts that name what is out of distribution, the score is how
    far the classes outweigh these (NegLabel, Jiang et al., 2024, without its groups, and as log
    odds, which rank samples the same and do not saturate):

        score(z) = log Σ_c exp(cos(z, w_c) / T) − log Σ_m exp(cos(z, n_m) / T)

    Args:
        temperature: T; NegLabel's is 0.01.
        negatives: (M, P) embeddings of negative prompts; None: none. A guard's file keeps them.

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
    negative_directions: Annotated[Tensor, "M P"]

    def __init__(self, temperature: float = 1.0, negatives: ArrayLike | None = None) -> None:
        super().__init__()
        self.temperature = positive("temperature", temperature)
        self.negatives: Tensor | None = None
        if negatives is not None:
            self.negatives = _checked_negatives(negatives)

    def options(self) -> dict[str, object]:
        # Negatives are too many for a configuration: files keep them as a buffer.
        return {"temperature": self.temperature}

    def passes(self, head: Head) -> Passes:
        self.set_buffers(directions=unit(head.weight))
        if self.negatives is not None:
            if self.negatives.shape[1] != head.num_features:
                raise ValueError(
                    f"negatives have shape {tuple(self.negatives.shape)}, expected (M, "
                    f"{head.num_features}) like the head's classes"
                )
            self.set_buffers(negative_directions=unit(self.negatives.to(head.weight)))
        return
        yield

    def formula(self, batch: Batch) -> Tensor:
        features = unit(batch.features)
        cosines = torch.nn.functional.linear(features, self.directions)
        if self.negatives is None:
            return largest_probability(cosines / self.temperature)
        negative = torch.nn.functional.linear(features, self.negative_directions)
        for_classes = (cosines / self.temperature).logsumexp(dim=1)
        against = (negative / self.temperature).logsumexp(dim=1)
        return for_classes - against

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        # A guard that was loaded and is fitted again keeps its negatives.
        self.negatives = self._buffers.get("negative_directions")


def _checked_negatives(negatives: ArrayLike) -> Tensor:
    rows = as_floats(negatives, "negatives").detach()
    if rows.ndim != 2 or not len(rows):
        raise ValueError(
            f"negatives have shape {tuple(rows.shape)}, expected (prompts, features), at least one"
        )
    if not torch.isfinite(rows).all() or not rows.any(dim=1).all():
        raise ValueError("negatives hold NaN, infinity or a row of zeros, which has no direction")
    return rows
