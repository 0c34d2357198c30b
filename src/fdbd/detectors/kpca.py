"""Kernel PCA: how far a feature lies from the non-linear subspace of the training data."""

from typing import Annotated

import torch
from torch import Tensor

from fdbd.core.linear_algebra import eigenvectors, in_blocks, unit
from fdbd.detectors.base import (
    Batch,
    Detector,
    Head,
    Needs,
    Paper,
    Passes,
    at_least_one,
    expect,
    positive,
)
from fdbd.fitting.sample_size import warn_of_few_for_covariance
from fdbd.fitting.statistics import Moments, Transformed

_SEED = 0
"""Seed of the random Fourier features, fixed so that every fit gives the same detector."""


class KPCA(Detector):
    """Reconstruction error of kernel PCA with a cosine-Gaussian kernel (CoRP, Fang et al., 2024).

        score(z) = −‖(I − QQᵀ)(φ(z) − E φ)‖,   φ(z) = √(2/M) cos(√(2γ) Ω ẑ + u),   ẑ = z/‖z‖

    φ are M random Fourier features of the Gaussian kernel exp(−γ‖ẑ − ẑ'‖²), Ω (M, P) normal and u
    uniform in [0, 2π). Q holds the fewest principal directions of φ over the training data that
    explain the share `explained` of its variance. The covariance of φ is summed in one streaming
    pass: O(M²) memory, no samples kept. O(M·(P + D)) per sample for D directions.

    The numbers depend on the network: the authors take γ = 2, M = 2048 and 0.8 for ResNet-18 on
    CIFAR-10 with its 512 features (the defaults), γ = 3, M = 4096 and 0.5 for ResNet-50 on
    ImageNet.

    Args:
        gamma: γ of the kernel.
        components: M, the number of random Fourier features; None: 4P, at most 2048.
        explained: share of the variance that Q explains, between 0 and 1.

    >>> import fdbd
    >>> features = 4 * torch.eye(3).repeat(20, 1) + torch.rand(60, 3)
    >>> detector = fdbd.create("kpca", components=32).fit(Batch(features), Head(torch.eye(3)))
    >>> known_and_unknown = Batch(torch.tensor([[4.5, 0.5, 0.5], [1.5, 1.5, 1.5]]))
    >>> detector.score(known_and_unknown).argmax()
    tensor(0)
    """

    name = "kpca"
    paper = Paper("Kernel PCA for Out-of-Distribution Detection", "Fang et al.", "NeurIPS", 2024)
    needs = Needs(passes=1)
    frequencies: Annotated[Tensor, "M P"]
    phases: Annotated[Tensor, "M"]
    center: Annotated[Tensor, "M"]
    basis: Annotated[Tensor, "M D"]

    def __init__(
        self, gamma: float = 2.0, components: int | None = None, explained: float = 0.8
    ) -> None:
        super().__init__()
        self.gamma = positive("gamma", gamma)
        if components is not None:
            expected = "a number of features, at least 1, or None"
            components = at_least_one("components", components, expected)
        self.components = components
        is_share = 0 < explained < 1
        self.explained = expect("explained", explained, is_share, "a share between 0 and 1")

    def passes(self, head: Head) -> Passes:
        count = self.components or min(4 * head.num_features, 2048)
        generator = torch.Generator().manual_seed(_SEED)
        shape = (count, head.num_features)
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        uniform = torch.rand(count, generator=generator, dtype=torch.float64)
        self.set_buffers(
            frequencies=(2 * self.gamma) ** 0.5 * normal, phases=2 * torch.pi * uniform
        )
        summed = yield Transformed(Moments(count), self._mapped_batch, rows=4096)
        moments = summed.statistic
        warn_of_few_for_covariance(self.label, moments.count, count)
        basis = _leading(moments.covariance(), self.explained)
        self.set_buffers(center=moments.mean(), basis=basis)

    def _mapped_batch(self, batch: Batch) -> Batch:
        return Batch(self._mapped(batch.features.to(self.frequencies.dtype)))

    def _mapped(self, features: Tensor) -> Tensor:
        """(N, M) φ(z)."""
        angles = torch.nn.functional.linear(unit(features), self.frequencies, self.phases)
        mapped: Tensor = (2 / len(self.phases)) ** 0.5 * angles.cos()
        return mapped

    def formula(self, batch: Batch) -> Tensor:
        def error(rows: Tensor) -> Tensor:
            deviation = self._mapped(rows) - self.center
            rest = deviation - (deviation @ self.basis) @ self.basis.T
            found: Tensor = torch.linalg.vector_norm(rest, dim=1)
            return -found

        return in_blocks(error, batch.features, len(self.phases))


def _leading(covariance: Tensor, explained: float) -> Tensor:
    """(M, D) the fewest leading eigenvectors that explain this share of the variance; at least one,
    and one less than all."""
    directions = eigenvectors(covariance).flip(1)
    variances = ((covariance @ directions) * directions).sum(dim=0).clamp_min(0)
    shares = variances.cumsum(0) / variances.sum().clamp_min(torch.finfo(torch.float64).tiny)
    count = int((shares < explained).sum()) + 1
    most = max(1, covariance.shape[0] - 1)
    return directions[:, : min(count, most)]
