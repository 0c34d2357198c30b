"""Optimisers that torch lacks, and the one that a recipe names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from fdbd.train.presets import Preset

OPTIMISERS = ("sgd", "adamw", "lars")


class LARS(Optimizer):
    """Stochastic gradient descent with momentum and a rate of its own for each tensor
    (layer-wise adaptive rate scaling: You, Gitman and Ginsburg, 2017), for large batches.

        g ← ∇L + λ w,   v ← m v + t ‖w‖ / ‖g‖ · g,   w ← w − lr · v

    with m the momentum, λ the weight decay and t the `trust`, the relative length of a step at the
    rate 1. A tensor of zeros, such as a new bias, has no length to go by and takes plain steps.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(weight, weight.grad, group)
        return loss

    def _move(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        gradient = gradient + group["weight_decay"] * weight
        length = torch.linalg.vector_norm(weight)
        steepness = torch.linalg.vector_norm(gradient)
        can_scale = (length > 0) & (steepness > 0)
        scale = torch.where(can_scale, group["trust"] * length / steepness, 1.0)
        state = self.state[weight]
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(weight)
        velocity: Tensor = state["velocity"]
        velocity.mul_(group["momentum"]).add_(scale * gradient)
        weight.sub_(group["lr"] * velocity)


def optimiser_of(recipe: Preset, module: nn.Module) -> Optimizer:
    """The recipe's optimiser for the parameters of a module that are trained."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained, "weight_decay": recipe.weight_decay}]
    if not recipe.decay_all:
        # Only matrices and filters decay; biases and the scales of norms do not.
        weights = [parameter for parameter in trained if parameter.ndim > 1]
        others = [parameter for parameter in trained if parameter.ndim <= 1]
        groups = [
            {"params": weights, "weight_decay": recipe.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
    if recipe.optimizer == "adamw":
        return AdamW(groups, lr=recipe.lr)
    if recipe.optimizer == "lars":
        return LARS(groups, lr=recipe.lr, momentum=recipe.momentum)
    return SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov)
