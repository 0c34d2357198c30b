"""The relative Mahalanobis distance."""

from typing import Annotated

from torch import Tensor

from fdbd.core.linear_algebra import eigenvectors, in_blocks
from fdbd.detectors.base import Batch, Detector, Head, Needs, Paper, Passes
from fdbd.fitting.statistics import ClassMoments
from fdbd.geometry import nearest_squared_distance


class RMDS(Detector):
    """Mahalanobis distance to the nearest class, relative to the distance to all data (Ren et al.,
    2021).

        score(z) = −min_c [(z − μ_c)ᵀ Σ⁻¹ (z − μ_c) − (z − μ)ᵀ Σ₀⁻¹ (z − μ)]

    with Σ shared within classes and (μ, Σ₀) of all features. Σ₀ − Σ is the covariance between
    classes, of rank below C: where Σ is whitened to I, Σ₀ is I + SᵀS, and both distances agree
    outside the space of the class means. In its principal axes, u = VᵀW(z − μ) with SᵀS = V
    diag(λ²) Vᵀ, what is left is

        d_c − d_0 = ‖u − u_c‖² − Σ_j u_j² / (1 + λ_j²)

    so a score costs O(min(C, P)·(C + P)) instead of O(CP²). Directions without variance within
    classes are left out of both distances, and classes without samples out of the minimum.

    >>> import torch
    >>> features, labels = 4 * torch.eye(3).repeat(20, 1) + torch.rand(60, 3), torch.arange(3).repeat(20)
    >>> detector = RMDS().fit(Batch(features, None, labels), Head(torch.eye(3)))
    >>> detector.score(Batch(torch.tensor([[4.5, 0.5, 0.5], [1.5, 1.5, 1.5]]))).argmax()  # the first is known
    tensor(0)
    """

    name = "rmds"
    paper = Paper(
        "A Simple Fix to Mahalanobis Distance for Improving Near-OOD Detection",
        "Ren et al.",
        "arXiv:2106.09022",
        2021,
    )
    needs = Needs(labels=True, passes=1)
    mean: Annotated[Tensor, "P"]
    axes: Annotated[Tensor, "A P"]
    means: Annotated[Tensor, "M A"]
    shares: Annotated[Tensor, "A"]

    def passes(self, head: Head) -> Passes:
        moments = yield ClassMoments(head.num_classes, head.num_features)
        whitening, offsets = moments.whitened()
        root = offsets * (moments.counts[moments.counts > 0, None] / moments.count).sqrt()
        principal = eigenvectors(root.T @ root)[:, -min(root.shape) :]
        shares = 1 / (1 + (root @ principal).square().sum(dim=0))
        self.set(
            mean=moments.mean(),
            axes=principal.T @ whitening,
            means=offsets @ principal,
            shares=shares,
        )

    def score(self, batch: Batch) -> Tensor:
        return in_blocks(self._score, batch.features, sum(self.means.shape))

    def _score(self, features: Tensor) -> Tensor:
        position = (features - self.mean) @ self.axes.T
        return position.square() @ self.shares - nearest_squared_distance(position, self.means)
