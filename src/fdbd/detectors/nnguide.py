"""Nearest-neighbour guidance of the energy score."""

from __future__ import annotations

import torch
from torch import Tensor

from fdbd.core.batch import Batch, Head
from fdbd.core.linear_algebra import SMALLEST_NORM, largest_products, unit, warm_up_search
from fdbd.detectors.base import Detector, Paper, Passes
from fdbd.detectors.exponentials import logsumexp
from fdbd.detectors.knn import neighbours, require_samples, share_kept
from fdbd.fitting.statistics import Bank


class NNGuide(Detector):
    """Energy, guided by the similarity to confident training samples (Park et al., 2023).

        score(z) = E(z) · 1/k Σ_{i ∈ k largest} E(z_i) ẑ_i·ẑ,   E = logsumexp(logits),   ẑ = z/‖z‖

    One matrix product with the bank of M samples kept: O(MP + C) a sample.

    Args:
        k: number of neighbours.
        alpha: fraction of the training samples to keep, chosen by a hash of each sample; the paper keeps 1 % of
            ImageNet.
    """

    name = "nnguide"
    paper = Paper("Nearest Neighbor Guidance for Out-of-Distribution Detection", "Park et al.", "ICCV", 2023)
    reads = ("features", "logits")
    one_pass = True
    bank: Tensor

    def __init__(self, k: int = 10, alpha: float = 1.0) -> None:
        super().__init__()
        self.k = neighbours(k)
        self.alpha = share_kept(alpha)

    def passes(self, head: Head) -> Passes:
        bank = yield Bank(self.alpha, beside=_energies)
        require_samples(sum(map(len, bank.rows)), self.k, self.alpha)
        self._set_buffer("bank", bank.samples(self.fit_dtype, _norms_over_energies))

    def warm_up(self, dtype: torch.dtype) -> None:
        super().warm_up(dtype)
        warm_up_search(dtype)

    def score(self, batch: Batch) -> Tensor:
        assert batch.logits is not None
        products, _ = largest_products(unit(batch.features), self.bank, self.k)
        return logsumexp(batch.logits) * products.mean(dim=1)


def _energies(batch: Batch) -> Tensor:
    assert batch.logits is not None
    return logsumexp(batch.logits)


def _norms_over_energies(rows: Tensor, energies: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms.clamp_min(SMALLEST_NORM) / energies
