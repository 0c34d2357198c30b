"""Nearest-neighbour guidance of the energy score."""

from functools import partial

import torch
from torch import Tensor

from fdbd.core.linear_algebra import largest_products, unit
from fdbd.detectors.base import Batch, Head, Needs, Paper, Passes, required_logits
from fdbd.detectors.knn import Banked
from fdbd.detectors.softmax import logsumexp
from fdbd.fitting.statistics import Bank, with_logits


class NNGuide(Banked):
    """Energy, guided by the similarity to confident training samples (Park et al., 2023).

        score(z) = E(z) · 1/k Σ_{i ∈ k largest} E(z_i) ẑ_i·ẑ,   E = logsumexp(logits),   ẑ = z/‖z‖

    One matrix product with the bank of M samples kept: O(MP + C) per sample.

    Args:
        k: number of neighbours.
        alpha: fraction of the training samples to keep, chosen by a hash of each sample; the paper
            keeps 1 % of ImageNet.

    >>> detector = NNGuide(k=1).fit(Batch(4 * torch.eye(3)), Head(torch.eye(3)))
    >>> detector.score(Batch(torch.tensor([[4.0, 0.0, 0.0], [1.0, 1.0, 1.0]])))
    tensor([16.2891,  4.8901])
    """

    name = "nnguide"
    paper = Paper(
        "Nearest Neighbor Guidance for Out-of-Distribution Detection", "Park et al.", "ICCV", 2023
    )
    needs = Needs(logits=True, passes=1)

    def __init__(self, k: int = 10, alpha: float = 1.0) -> None:
        super().__init__(k, alpha)

    def passes(self, head: Head) -> Passes:
        bank = yield from with_logits(Bank(self.alpha, partial(_guides, self.fit_dtype)), head)
        self.keep(bank.samples(self.fit_dtype))

    def formula(self, batch: Batch) -> Tensor:
        products, _ = largest_products(unit(batch.features), self.bank, self.k)
        return logsumexp(required_logits(batch)) * products.mean(dim=1)


def _guides(dtype: torch.dtype, batch: Batch) -> Tensor:
    """(N, P) directions of the samples, each times the sample's energy."""
    return unit(batch.features.to(dtype)).mul_(logsumexp(required_logits(batch).to(dtype))[:, None])
