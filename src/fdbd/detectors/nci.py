"""NCI, the neural-collapse-inspired detector."""

from typing import Annotated

import torch
from torch import Tensor

from fdbd import kernels
from fdbd.detectors.base import Batch, Detector, Head, Needs, Paper, Passes, expect
from fdbd.fitting.statistics import Mean


class NCI(Detector):
    """Proximity of the centred feature to the predicted class's weights (Liu & Qin, 2025).

        score(z) = w_k·(z − μ) / ‖z − μ‖ + α ‖z‖₁,   k the predicted class, μ the training mean

    O(P) per sample and one read of z; a second one if α is not 0.

    Args:
        alpha: weight α of the feature norm, which filters out features near the origin. The paper
            chooses it on validation data with outliers, separately for each network; 0, the
            proximity alone, needs none.

    >>> detector = NCI().fit(Batch(torch.eye(2)), Head(torch.eye(2)))
    >>> detector.score(Batch(torch.tensor([[1.5, 0.5]])))
    tensor([1.])
    """

    name = "nci"
    paper = Paper(
        "Detecting Out-of-Distribution Through the Lens of Neural Collapse",
        "Liu and Qin",
        "CVPR",
        2025,
    )
    needs = Needs(logits=True, passes=1)
    _notices_bad_rows = True
    center: Annotated[Tensor, "P"]
    floor: Annotated[Tensor, ""]
    offsets: Annotated[Tensor, "C"]

    def __init__(self, alpha: float = 0.0) -> None:
        super().__init__()
        self.alpha = expect("alpha", alpha, 0 <= alpha < float("inf"), "a weight of at least 0")

    def passes(self, head: Head) -> Passes:
        mean = (yield Mean(head.num_features)).mean()
        # At z = μ the direction is undefined; the floor keeps the score finite, as in fDBD.
        floor = torch.finfo(self.fit_dtype).eps * torch.linalg.vector_norm(mean).clamp_min(1)
        self.set_buffers(center=mean, floor=floor, offsets=mean.new_zeros(head.num_classes))

    def formula(self, batch: Batch) -> Tensor:
        # fDBD's kernel with the weights in place of the folded normals: the same one read of the
        # features.
        folded = (self.head_weight, self.offsets, self.center, self.floor)
        scores = kernels.folded_score(batch.features, folded, True, logits=batch.logits)
        if self.alpha == 0:
            return scores
        return scores + self.alpha * batch.features.abs().sum(dim=1)
