"""The relative Mahalanobis distance, of features and of normalised features."""

from typing import Annotated

from torch import Tensor

from fdbd.core.linear_algebra import eigenvectors, in_blocks, unit
from fdbd.detectors.base import Batch, Detector, Head, Needs, Paper, Passes
from fdbd.detectors.mds import MDSPlusPlus, with_unit_features
from fdbd.fitting.sample_size import warn_of_few_for_covariance
from fdbd.fitting.statistics import ClassMoments, Transformed
from fdbd.geometry import nearest_squared_distance


class RMDS(Detector):
    """Mahalanobis distance to the nearest class, relative to the distance to all data (Ren et al.,
    2021).

        score(z) = −min_c [(z − μ_c)ᵀ Σ⁻¹ (z − μ_c) − (z − μ)ᵀ Σ₀⁻¹ (z − μ)]

    with Σ shared within classes and (μ, Σ₀) of all features. Σ₀ − Σ is the covariance between
    classes, of rank below C: when Σ is whitened to I, Σ₀ is I + SᵀS, and both distances agree
    outside the space of the class means. In its principal axes, u = VᵀW(z − μ) with SᵀS = V
    diag(λ²) Vᵀ, what is left is

        d_c − d_0 = ‖u − u_c‖² − Σ_j u_j² / (1 + λ_j²)

    so a score costs O(min(C, P)·(C + P)) instead of O(CP²). Directions without variance within
    classes are left out of both distances, and classes without samples out of the minimum.

    >>> import torch
    >>> features = 4 * torch.eye(3).repeat(20, 1) + torch.rand(60, 3)
    >>> labels = torch.arange(3).repeat(20)
    >>> detector = RMDS().fit(Batch(features, None, labels), Head(torch.eye(3)))
    >>> known_and_unknown = Batch(torch.tensor([[4.5, 0.5, 0.5], [1.5, 1.5, 1.5]]))
    >>> detector.score(known_and_unknown).argmax()
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
        self._set_axes(moments)

    def _set_axes(self, moments: ClassMoments) -> None:
        whitener, offsets = moments.whitened()
        warn_of_few_for_covariance(
            self.label, moments.count, moments.average.shape[0], len(offsets)
        )
        counts = moments.counts[moments.counts > 0, None]
        # S of the docstring: SᵀS is the whitened covariance between classes.
        root = offsets * (counts / moments.count).sqrt()
        rank = min(root.shape)
        principal = eigenvectors(root.T @ root)[:, -rank:]
        self.set_buffers(
            mean=moments.mean(),
            axes=principal.T @ whitener,
            means=offsets @ principal,
            shares=1 / (1 + (root @ principal).square().sum(dim=0)),
        )

    def formula(self, batch: Batch) -> Tensor:
        return in_blocks(self._relative, batch.features, sum(self.means.shape))

    def _relative(self, features: Tensor) -> Tensor:
        position = (features - self.mean) @ self.axes.T
        to_all = position.square() @ self.shares
        return to_all - nearest_squared_distance(position, self.means)


class RMDSPlusPlus(RMDS):
    """Relative Mahalanobis distance of the normalised feature (Müller & Hein, 2025).

        score(z) = −min_c [(ẑ − μ_c)ᵀ Σ⁻¹ (ẑ − μ_c) − (ẑ − μ)ᵀ Σ₀⁻¹ (ẑ − μ)],   ẑ = z/‖z‖

    `RMDS` with every feature, in training and in use, divided by its norm: O(min(C, P)·(C + P)) per
    sample.

    >>> import torch
    >>> features = 4 * torch.eye(3).repeat(20, 1) + torch.rand(60, 3)
    >>> labels = torch.arange(3).repeat(20)
    >>> detector = RMDSPlusPlus().fit(Batch(features, None, labels), Head(torch.eye(3)))
    >>> known_and_unknown = Batch(torch.tensor([[4.5, 0.5, 0.5], [1.5, 1.5, 1.5]]))
    >>> detector.score(known_and_unknown).argmax()
    tensor(0)
    """

    name = "rmds++"
    paper = MDSPlusPlus.paper

    def passes(self, head: Head) -> Passes:
        moments = ClassMoments(head.num_classes, head.num_features)
        summed = yield Transformed(moments, with_unit_features)
        self._set_axes(summed.statistic)

    def formula(self, batch: Batch) -> Tensor:
        return in_blocks(self._relative, unit(batch.features), sum(self.means.shape))
