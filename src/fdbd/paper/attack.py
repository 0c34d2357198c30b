"""The targeted attack of Carlini and Wagner (2017) in feature space, which bounds a boundary distance from above."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fdbd.core.batch import Head


@dataclass(frozen=True)
class CarliniWagner:
    """minimise ‖δ‖² + c · max(max_{j≠t} logit_j(z + δ) − logit_t(z + δ), 0), with Adam, c found by bisection.

    Defaults are those of the fDBD paper's appendix. There is no box around features, so δ is optimised directly.
    """

    initial_constant: float = 2.0
    rate: float = 0.005
    steps: int = 500
    searches: int = 3

    def distances(self, features: Tensor, head: Head, targets: Tensor) -> Tensor:
        """(N,) length of the shortest δ found that makes z of (N, P) a member of class targets (N,); inf for none."""
        count = len(features)
        weight, bias = head.weight.to(features), head.bias.to(features)
        constant = torch.full((count,), self.initial_constant, dtype=features.dtype)
        low, high = torch.zeros_like(constant), torch.full_like(constant, torch.inf)
        best = torch.full_like(constant, torch.inf)
        target = torch.nn.functional.one_hot(targets, head.num_classes).bool()
        for _ in range(self.searches):
            delta = torch.zeros_like(features, requires_grad=True)
            optimiser = torch.optim.Adam([delta], lr=self.rate)
            reached = torch.zeros(count, dtype=torch.bool)
            for _ in range(self.steps):
                logits = (features + delta) @ weight.T + bias
                others = logits.masked_fill(target, -torch.inf).amax(dim=1)
                gap = others - logits.gather(1, targets[:, None])[:, 0]
                length = delta.square().sum(dim=1)
                with torch.no_grad():
                    inside = gap <= 0
                    reached |= inside
                    best = torch.where(inside, torch.minimum(best, length.sqrt()), best)
                optimiser.zero_grad()
                (length + constant * gap.clamp_min(0)).sum().backward()
                optimiser.step()
            high = torch.where(reached, torch.minimum(high, constant), high)
            low = torch.where(reached, low, torch.maximum(low, constant))
            constant = torch.where(high.isfinite(), (low + high) / 2, 10 * constant)
        return best.detach()
