"""CSI's detection score."""

from typing import Annotated

import torch
from torch import Tensor

from fdbd.core.linear_algebra import largest_products, unit
from fdbd.detectors.base import Batch, Head, Needs, Paper, Passes
from fdbd.detectors.knn import Banked
from fdbd.fitting.statistics import Bank, check_finite


class CSI(Banked):
    """Cosine to the nearest training feature times the feature's norm, summed over shifted views
    (Tack et al., 2020).

        score(z) = Σ_v λ_v max_i cos(z_v, z_{i,v}) ‖z_v‖,   λ_v = 1 / mean_i ‖z_{i,v}‖

    The views of a sample are its features after each shifting transformation (rotations in the
    paper), given as ``Batch.views`` (V, N, P). A batch without views is the one view there is, and
    λ is 1: the paper's score without shifts. One matrix product per view with the bank of M samples
    kept: O(VMP) per sample. The paper's second term, the probability of the right shift, needs the
    auxiliary head of CSI's training and is not part of it. An exported graph takes the one view of
    a plain batch.

    Args:
        alpha: fraction of the training samples to keep, chosen by a hash of each sample.

    >>> detector = CSI().fit(Batch(4 * torch.eye(3)), Head(torch.eye(3)))
    >>> detector.score(Batch(torch.tensor([[4.0, 0.0, 0.0], [1.0, 1.0, 1.0]])))
    tensor([4., 1.])
    """

    name = "csi"
    paper = Paper(
        "CSI: Novelty Detection via Contrastive Learning on Distributionally Shifted Instances",
        "Tack et al.",
        "NeurIPS",
        2020,
    )
    needs = Needs(views=True, passes=1)
    bank: Annotated[Tensor, "V M P"]
    weights: Annotated[Tensor, "V"]

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__(1, alpha)

    def passes(self, head: Head) -> Passes:
        bank = yield Bank(self.alpha, views_as_rows)
        widths = {rows.shape[1] for rows in bank.rows}
        if len(widths) > 1:
            raise ValueError(
                "training batches differ in their number of views, expected the same number in each"
            )
        rows = bank.samples(self.fit_dtype)
        views = rows.unflatten(1, (-1, head.num_features)).transpose(0, 1)
        self.set_buffers(weights=_view_weights(views))
        self.keep(unit(views).contiguous())

    def example(self) -> Batch:
        example = super().example()
        return example._replace(views=example.features.expand(len(self.bank), -1, -1))

    def formula(self, batch: Batch) -> Tensor:
        views = batch.features[None] if batch.views is None else batch.views
        expected = (self.bank.shape[0], *batch.features.shape)
        if views.shape != expected:
            raise ValueError(
                f"views have shape {tuple(views.shape)}, expected {expected}, as many as in"
                " training"
            )
        nearest = []
        for view, bank in zip(views.to(self.bank), self.bank):
            products, _ = largest_products(view, bank, 1)
            nearest.append(products[:, 0])
        return self.weights @ torch.stack(nearest)


def _view_weights(views: Tensor) -> Tensor:
    """(V,) λ_v, one over the mean norm of a view's training features; 1 for a single view."""
    if len(views) == 1:
        return torch.ones(1)
    norms = torch.linalg.vector_norm(views.to(torch.float64), dim=2).mean(dim=1)
    return torch.where(norms > 0, 1 / norms, 0)


def views_as_rows(batch: Batch) -> Tensor:
    """(N, V·P) all views of a sample in one row."""
    if batch.views is None:
        return batch.features
    if batch.views.shape[1:] != batch.features.shape:
        expected = f"(V, {', '.join(str(size) for size in batch.features.shape)})"
        raise ValueError(f"views have shape {tuple(batch.views.shape)}, expected {expected}")
    by_sample = batch.views.transpose(0, 1)
    check_finite(by_sample, "its views")
    return by_sample.flatten(1)
