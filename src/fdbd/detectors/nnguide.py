"""Nearest-neighbour guidance of the energy score."""

from __future__ import annotations

from torch import Tensor

from ..batch import Batch, Head
from ..linalg import largest_products, unit
from ..statistics import Bank
from .base import Detector, Paper, Passes
from .knn import check_neighbours, enough_samples


class NNGuide(Detector):
    """Energy, guided by the similarity to confident training samples (Park et al., 2023).

        score(z) = E(z) · 1/k Σ_{i ∈ k largest} E(z_i) ẑ_i·ẑ,   E = logsumexp(logits),   ẑ = z/‖z‖

    One matrix product with the bank of M samples kept: O(MP + C) a sample.

    Args:
        k: number of neighbours.
        alpha: fraction of the training samples to keep, chosen by a hash of each sample; the paper keeps 1 % of ImageNet.
    """

    name = "nnguide"
    paper = Paper("Nearest Neighbor Guidance for Out-of-Distribution Detection", "Park et al.", "ICCV", 2023)
    reads = ("features", "logits")
    fit_reads = ("features",)
    one_pass = True

    def __init__(self, k: int = 10, alpha: float = 1.0) -> None:
        super().__init__()
        check_neighbours(k, alpha)
        self.k = k
        self.alpha = alpha

    def passes(self, head: Head) -> Passes:
        bank = yield Bank(self.alpha)
        rows = enough_samples(bank, self.k).to(self.fit_dtype)
        # The energy follows from the features: kept with them, its rounding would decide what the hash keeps.
        self.set(bank=unit(rows))
        for some, kept in zip(rows.split(8192), self.bank.split(8192)):
            kept *= head(some.to(head.weight.device)).logsumexp(dim=1, keepdim=True).to(kept)

    def score(self, batch: Batch) -> Tensor:
        assert batch.logits is not None
        products, _ = largest_products(unit(batch.features), self.bank, self.k)
        return batch.logits.logsumexp(dim=1) * products.mean(dim=1)
