"""DenseNet-BC (Huang et al., 2017) for 32×32 images; names follow Andreas Veit's public implementation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdbd.networks.architectures.common import PreActivated, Stage, count_blocks, he_init


class Bottleneck(nn.Module):
    """1×1 convolution to 4k channels, 3×3 convolution to k, appended to the input."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, 4 * growth, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.bn1(x)))
        return torch.cat([x, self.conv2(F.relu(self.bn2(y)))], dim=1)


class Transition(nn.Module):
    """1×1 convolution to half as many channels and 2×2 average pooling."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, width // 2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv1(F.relu(self.bn1(x))), 2)


class DenseNet(PreActivated):
    """DenseNet-BC with `depth` layers, growth `growth`, compression 0.5; head `fc`; 342 features at (100, 12)."""

    def __init__(self, depth: int = 100, growth: int = 12, num_classes: int = 10) -> None:
        super().__init__()
        count = count_blocks("a DenseNet-BC", depth, 4)
        width = 2 * growth
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        for block in (1, 2, 3):
            bottlenecks = (Bottleneck(width + place * growth, growth) for place in range(count))
            self.add_module(f"block{block}", Stage(*bottlenecks))
            width += count * growth
            if block < 3:
                self.add_module(f"trans{block}", Transition(width))
                width //= 2
        self.bn1 = nn.BatchNorm2d(width)
        self.num_features = width
        self.fc = nn.Linear(width, num_classes)
        he_init(self)
