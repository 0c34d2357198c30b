"""ResNet-18/34/50 (He et al., 2016) with the stem for 32×32 images: one 3×3 convolution, no pooling.

Names follow the widespread CIFAR implementation (`conv1`, `layer1.0.conv1`, `layer2.0.shortcut.0`, `linear`).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fdbd.networks.architectures.common import Network, he_init


def _shortcut(width_in: int, width: int, stride: int) -> nn.Sequential:
    if stride == 1 and width_in == width:
        return nn.Sequential()
    return nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut; None: a projection where the shape changes."""

    expansion = 1

    def __init__(self, width_in: int, width: int, stride: int, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(width_in, width, stride) if shortcut is None else shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions; four times as wide at the end."""

    expansion = 4

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.shortcut = _shortcut(width_in, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet(Network):
    """Four stages of 64, 128, 256, 512 channels; 512 features (2048 with bottlenecks); head `linear`."""

    head_name = "linear"

    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], blocks: tuple[int, ...], num_classes: int = 10
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        width_in = 64
        stages = []
        for stage, count in enumerate(blocks):
            width = 64 * 2**stage
            layers: list[nn.Module] = []
            for place in range(count):
                layers.append(block(width_in, width, 2 if stage and not place else 1))
                width_in = width * block.expansion
            stages.append(nn.Sequential(*layers))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.num_features = width_in
        self.linear = nn.Linear(width_in, num_classes)
        he_init(self)

    def forward_features(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        out: Tensor = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return out
