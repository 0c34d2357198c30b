"""Detectors for heads of many labels, each label a yes or no of its own (sigmoid)."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from fdbd.detectors.base import Batch, Detector, Head, Needs, Paper, Passes, one_of, required_logits
from fdbd.detectors.fdbd import FDBD_PAPER
from fdbd.fitting.statistics import Mean


class JointEnergy(Detector):
    """Energies of all labels of a multi-label head together (Wang et al., 2021).

        score = Σ_c log(1 + exp(logit_c))

    Each label of a sigmoid head is a binary classifier with the energy log(1 + exp(logit)); the
    sum grows with every label that is present. O(C) per sample.

    Args:
        combine: "sum" (JointEnergy), "mean", which ranks samples the same on a scale that does not
            grow with the number of labels, or "max", the energy of the most certain label.

    >>> import fdbd
    >>> detector = fdbd.create("joint-energy").fit(Batch(torch.eye(2)), Head(torch.eye(2)))
    >>> detector.score(Batch(torch.zeros(1, 2)))
    tensor([1.3863])
    """

    name = "joint-energy"
    paper = Paper(
        "Can Multi-Label Classification Networks Know What They Don't Know?",
        "Wang et al.",
        "NeurIPS",
        2021,
    )
    needs = Needs(features=False, logits=True, passes=0, many_labels=True)

    def __init__(self, combine: Literal["sum", "mean", "max"] = "sum") -> None:
        super().__init__()
        self.combine = one_of("combine", combine, "sum", "mean", "max")

    def formula(self, batch: Batch) -> Tensor:
        logits = required_logits(batch)
        if self.combine == "max":
            return _softplus(logits.amax(dim=1))
        energies = _softplus(logits)
        return energies.sum(dim=1) if self.combine == "sum" else energies.mean(dim=1)


def _softplus(logits: Tensor) -> Tensor:
    """log(1 + e^v) without overflow, also in exported graphs."""
    return logits.relu() + (-logits.abs()).exp().log1p()


class MultiLabelFDBD(Detector):
    """Average distance to the labels' own boundaries over the deviation from the training mean.

        score(z) = 1/C Σ_c |w_c·z + b_c| / ‖w_c‖ / ‖z − μ‖

    In a sigmoid head, label c is decided by the hyperplane w_c·z + b_c = 0 alone, so the distance
    to its boundary is exact, and the sum takes its signs from the prediction. This is fDBD's score
    (Liu & Qin, 2024) for such heads; the paper has single labels only. From the logits it costs
    O(P + C) per sample. A label with the weight 0 has no boundary and is left out.

    >>> import fdbd
    >>> data = Batch(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]))
    >>> detector = fdbd.create("multilabel-fdbd").fit(
    ...     data, Head(torch.tensor([[2.0, 0.0], [0.0, 3.0]]))
    ... )
    >>> detector.score(Batch(torch.tensor([[3.0, 4.0]])))
    tensor([0.7000])
    """

    name = "multilabel-fdbd"
    paper = FDBD_PAPER
    needs = Needs(logits=True, passes=1, many_labels=True)
    center: Annotated[Tensor, "P"]
    floor: Annotated[Tensor, ""]
    shares: Annotated[Tensor, "C"]

    def passes(self, head: Head) -> Passes:
        mean = (yield Mean(head.num_features)).mean()
        norms = torch.linalg.vector_norm(head.weight.to("cpu", torch.float64), dim=1)
        has_boundary = norms > 0
        count = int(has_boundary.sum())
        if not count:
            raise ValueError("every label of the head has the weight 0, so there is no boundary")
        shares = torch.where(has_boundary, 1 / (norms * count), 0)
        # At z = μ the deviation is 0; the floor keeps the score finite, as in fDBD.
        floor = torch.finfo(self.fit_dtype).eps * torch.linalg.vector_norm(mean).clamp_min(1)
        self.set_buffers(center=mean, floor=floor, shares=shares)

    def formula(self, batch: Batch) -> Tensor:
        distance = required_logits(batch).abs() @ self.shares
        deviation = torch.linalg.vector_norm(batch.features - self.center, dim=1)
        return distance / torch.maximum(deviation, self.floor)
