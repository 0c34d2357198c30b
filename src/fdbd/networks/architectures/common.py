"""What every network here shares: three questions that timm's models answer too, so that a classifier can be split
into backbone and linear head without guessing."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Network(nn.Module):
    """A convolutional classifier: feature map, global average pooling, one linear head named `head_name`.

    >>> import torch
    >>> from fdbd.models import create
    >>> network = create("resnet20", num_classes=10)
    >>> network.forward_head(network.forward_features(torch.rand(2, 3, 32, 32)), pre_logits=True).shape
    torch.Size([2, 64])
    """

    head_name: str = "linear"
    num_features: int

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (N, 3, H, W) to the last feature map (N, P, h, w), after its non-linearity."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Feature map (N, P, h, w) to penultimate features (N, P) if `pre_logits`, else to logits (N, C)."""
        pooled = x.mean(dim=(2, 3))
        return pooled if pre_logits else self.get_classifier()(pooled)

    def get_classifier(self) -> nn.Module:
        """The linear head."""
        return self.get_submodule(self.head_name)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


class PreActivated(Network):
    """A network whose blocks normalise first: its modules in the order of their registration, then a rectifier."""

    head_name = "fc"

    def forward_features(self, x: Tensor) -> Tensor:
        for name, module in self.named_children():
            x = x if name == self.head_name else module(x)
        return F.relu(x)


class Stage(nn.Module):
    """Blocks one after the other, under the name `layer`."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def count_blocks(network: str, depth: int, others: int) -> int:
    """n of a network of 6n + `others` layers."""
    if depth < 6 + others or (depth - others) % 6:
        raise ValueError(f"{network} has 6n+{others} layers, not {depth}")
    return (depth - others) // 6


def he_init(model: nn.Module) -> None:
    """He et al. (2015) initialisation (fan out) for convolutions; batch norms start as the identity, as torch makes
    them."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def count_parameters(model: nn.Module) -> int:
    """The number of trainable values.

    >>> count_parameters(nn.Linear(3, 2))
    8
    """
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
