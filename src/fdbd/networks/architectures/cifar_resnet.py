"""The CIFAR ResNets of He et al. (2016): 6n+2 layers, 16/32/64 channels, parameter-free (option A) shortcuts.

Names follow Yerlan Idelbayev's public reproduction, so its checkpoints load as they are.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fdbd.networks.architectures.common import Network, he_init
from fdbd.networks.architectures.resnet import BasicBlock


class Subsample(nn.Module):
    """Option A: every second pixel, and zeros for the new channels, half before and half after."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra // 2, self.extra - self.extra // 2))


class CifarResNet(Network):
    """`depth` = 6n+2 layers; 64 features; head `linear`."""

    head_name = "linear"
    num_features = 64

    def __init__(self, depth: int, num_classes: int = 10) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"a CIFAR ResNet has 6n+2 layers, not {depth}")
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks, stride=1)
        self.layer2 = _stage(16, 32, blocks, stride=2)
        self.layer3 = _stage(32, 64, blocks, stride=2)
        self.linear = nn.Linear(64, num_classes)
        he_init(self)

    def forward_features(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        out: Tensor = self.layer3(self.layer2(self.layer1(x)))
        return out


def _stage(width_in: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    shortcut = nn.Identity() if stride == 1 else Subsample(width - width_in)
    others = (BasicBlock(width, width, 1, nn.Identity()) for _ in range(blocks - 1))
    return nn.Sequential(BasicBlock(width_in, width, stride, shortcut), *others)
