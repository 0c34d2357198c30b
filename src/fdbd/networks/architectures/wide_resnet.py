"""WideResNet (Zagoruyko and Komodakis, 2016), pre-activation; names follow the widespread public implementation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fdbd.networks.architectures.common import Network, he_init


class Block(nn.Module):
    """Normalise, rectify, convolve, twice; the shortcut starts after the first rectifier where the width changes."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width_in)
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.convShortcut = None if width_in == width else nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(x))
        shortcut = x if self.convShortcut is None else self.convShortcut(y)
        out: Tensor = self.conv2(F.relu(self.bn2(self.conv1(y)))) + shortcut
        return out


class Stage(nn.Module):
    """Blocks of one width."""

    def __init__(self, count: int, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(Block(width_in, width, stride), *(Block(width, width, 1) for _ in range(count - 1)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class WideResNet(Network):
    """`depth` = 6n+4 layers, `widen` times as wide; head `fc`; 128 features at (40, 2)."""

    head_name = "fc"

    def __init__(self, depth: int = 40, widen: int = 2, num_classes: int = 10) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"a WideResNet has 6n+4 layers, not {depth}")
        count = (depth - 4) // 6
        widths = (16, 16 * widen, 32 * widen, 64 * widen)
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.block1 = Stage(count, widths[0], widths[1], stride=1)
        self.block2 = Stage(count, widths[1], widths[2], stride=2)
        self.block3 = Stage(count, widths[2], widths[3], stride=2)
        self.bn1 = nn.BatchNorm2d(widths[3])
        self.num_features = widths[3]
        self.fc = nn.Linear(widths[3], num_classes)
        he_init(self)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.block3(self.block2(self.block1(self.conv1(x))))
        return F.relu(self.bn1(x))
