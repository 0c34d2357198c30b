"""WideResNet (Zagoruyko and Komodakis, 2016), pre-activation; names follow the widespread public implementation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fdbd.networks.architectures.common import PreActivated, Stage, count_blocks, he_init


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


class WideResNet(PreActivated):
    """`depth` = 6n+4 layers, `widen` times as wide; head `fc`; 128 features at (40, 2)."""

    def __init__(self, depth: int = 40, widen: int = 2, num_classes: int = 10) -> None:
        super().__init__()
        count = count_blocks("a WideResNet", depth, 4)
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        width_in = 16
        for stage in range(3):
            width = 16 * widen * 2**stage
            first = Block(width_in, width, 2 if stage else 1)
            self.add_module(f"block{stage + 1}", Stage(first, *(Block(width, width, 1) for _ in range(count - 1))))
            width_in = width
        self.bn1 = nn.BatchNorm2d(width_in)
        self.num_features = width_in
        self.fc = nn.Linear(width_in, num_classes)
        he_init(self)
