"""DenseNet-BC (Huang et al., 2017) for 32×32 images; names follow Andreas Veit's public implementation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdbd.networks.architectures.common import Network, he_init


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


class DenseBlock(nn.Module):
    """`count` bottlenecks, each of which sees all before it."""

    def __init__(self, count: int, width: int, growth: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(*(Bottleneck(width + i * growth, growth) for i in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class Transition(nn.Module):
    """1×1 convolution to fewer channels and 2×2 average pooling."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width_in)
        self.conv1 = nn.Conv2d(width_in, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv1(F.relu(self.bn1(x))), 2)


class DenseNet(Network):
    """DenseNet-BC with `depth` layers, growth `growth`, compression 0.5; head `fc`; 342 features at (100, 12)."""

    head_name = "fc"

    def __init__(self, depth: int = 100, growth: int = 12, num_classes: int = 10) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"a DenseNet-BC has 6n+4 layers, not {depth}")
        count = (depth - 4) // 6
        width = 2 * growth
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.block1 = DenseBlock(count, width, growth)
        width += count * growth
        self.trans1 = Transition(width, width // 2)
        width //= 2
        self.block2 = DenseBlock(count, width, growth)
        width += count * growth
        self.trans2 = Transition(width, width // 2)
        width //= 2
        self.block3 = DenseBlock(count, width, growth)
        width += count * growth
        self.bn1 = nn.BatchNorm2d(width)
        self.num_features = width
        self.fc = nn.Linear(width, num_classes)
        he_init(self)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.trans1(self.block1(self.conv1(x)))
        x = self.block3(self.trans2(self.block2(x)))
        return F.relu(self.bn1(x))
