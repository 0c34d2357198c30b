"""What every network here shares: three questions that timm's models answer too, so that a classifier can be split
into backbone and linear head without guessing."""

from __future__ import annotations

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
        if pre_logits:
            return pooled
        logits: Tensor = self.get_classifier()(pooled)
        return logits

    def get_classifier(self) -> nn.Module:
        """The linear head."""
        return self.get_submodule(self.head_name)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def he_init(model: nn.Module) -> None:
    """He et al. (2015) initialisation (fan out) for convolutions; batch norms start as the identity."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)


def count_parameters(model: nn.Module) -> int:
    """The number of trainable values.

    >>> count_parameters(nn.Linear(3, 2))
    8
    """
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


__all__ = ["Network", "count_parameters", "he_init"]
