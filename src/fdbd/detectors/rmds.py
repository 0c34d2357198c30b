"""The relative Mahalanobis distance."""

from __future__ import annotations

import torch
from torch import Tensor

from ..batch import Batch, Head
from ..linalg import in_blocks, whitener
from ..statistics import ClassMoments
from .base import Detector, Paper, Passes


class RMDS(Detector):
    """Mahalanobis distance to the nearest class, relative to the distance to all data (Ren et al., 2021).

        score(z) = −min_c [(z − μ_c)ᵀ Σ⁻¹ (z − μ_c) − (z − μ)ᵀ Σ₀⁻¹ (z − μ)]

    with Σ shared within classes and (μ, Σ₀) of all features. With x = z − μ the classes enter linearly, and since
    Σ₀ − Σ is the covariance between classes, of rank below C, the two quadratic forms leave one of that rank:

        d_c − d_0 = ‖F x‖² − 2 (Σ⁻¹(μ_c − μ))·x + (μ_c − μ)ᵀ Σ⁻¹ (μ_c − μ),   FᵀF = Σ⁻¹ − Σ₀⁻¹

    so a sample costs O((C + min(C, P))·P) instead of O(CP²). Directions without variance within classes are left out of
    both distances, and classes without samples out of the minimum.
    """

    name = "rmds"
    paper = Paper(
        "A Simple Fix to Mahalanobis Distance for Improving Near-OOD Detection", "Ren et al.", "arXiv:2106.09022", 2021
    )
    needs_labels = True
    one_pass = True
    mean: Tensor
    factor: Tensor
    slopes: Tensor
    squares: Tensor

    def passes(self, head: Head) -> Passes:
        moments = yield ClassMoments(head.num_classes, head.num_features)
        seen = moments.counts > 0
        whitening = whitener(moments.within_class_covariance(), moments.covariance().trace())
        offsets = (moments.means()[seen] - moments.mean()) @ whitening.T  # (C, P), whitened
        # Whitened, Σ is I and Σ₀ is I + SᵀS, and I − (I + SᵀS)⁻¹ = Sᵀ(I + SSᵀ)⁻¹S: no difference of inverses, and
        # whatever S is, I + SSᵀ is well conditioned. The smaller of two such S is taken.
        root = offsets * (moments.counts[seen, None] / moments.count).sqrt()
        if root.shape[0] > root.shape[1]:
            root = torch.linalg.qr(root, mode="r").R
        factor = torch.linalg.cholesky(root @ root.T + torch.eye(root.shape[0], dtype=torch.float64))
        self.set(
            mean=moments.mean(),
            factor=torch.linalg.solve_triangular(factor, root @ whitening, upper=False),
            slopes=offsets @ whitening,
            squares=offsets.square().sum(dim=1),
        )

    def score(self, batch: Batch) -> Tensor:
        return in_blocks(self._score, batch.features, self.slopes.shape[0] + self.factor.shape[0])

    def _score(self, features: Tensor) -> Tensor:
        x = features - self.mean
        nearest = torch.addmm(self.squares, x, self.slopes.T, alpha=-2).amin(dim=1)
        return -(nearest + (x @ self.factor.T).square().sum(dim=1))
