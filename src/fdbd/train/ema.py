"""The moving average of a model's weights and batch-norm statistics, which is what is evaluated and kept."""

from __future__ import annotations

import copy

import torch
from torch import nn


class Average:
    """avg ← d·avg + (1 − d)·model at each step, with d growing to `decay` so that the start is forgotten quickly."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take in the model after its step number `step`, counted from 1."""
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        mine, new = self.model.state_dict(), model.state_dict()
        for key, average in mine.items():
            average.lerp_(new[key], weight) if average.is_floating_point() else average.copy_(new[key])
