"""ResNets (He et al., 2016) with the stem for 32×32 images: one 3×3 convolution, no pooling.

Names follow the widespread CIFAR implementations (`conv1`, `layer1.0.conv1`, `layer2.0.shortcut.0`, `linear`), so that
their checkpoints load as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from fdbd.networks.architectures.common import Network, count_blocks, he_init


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut; None: a projection where the shape changes."""

    expansion = 1

    def __init__(self, width_in: int, width: int, stride: int, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = _projection(width_in, width, stride) if shortcut is None else shortcut

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
        self.shortcut = _projection(width_in, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


def _projection(width_in: int, width: int, stride: int) -> nn.Sequential:
    if stride == 1 and width_in == width:
        return nn.Sequential()
    return nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))


class Subsample(nn.Module):
    """Option A, without parameters: every second pixel, and zeros for the new channels, half before and half after."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra // 2, self.extra - self.extra // 2))


Block = Callable[[int, int, int], nn.Module]
"""Makes a block from its width before, its width and its stride."""


class ResNet(Network):
    """Stages that double the width; 512 features with four stages of basic blocks, 2048 with bottlenecks."""

    def __init__(
        self, block: Block, blocks: tuple[int, ...], num_classes: int = 10, width: int = 64, expansion: int = 1
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        width_in = width
        for stage, count in enumerate(blocks):
            layers = []
            for place in range(count):
                layers.append(block(width_in, width * 2**stage, 2 if stage and not place else 1))
                width_in = width * 2**stage * expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*layers))
        self.num_features = width_in
        self.linear = nn.Linear(width_in, num_classes)
        he_init(self)

    def stem(self, x: Tensor) -> Tensor:
        return F.relu(self.bn1(self.conv1(x)))

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for name, module in self.named_children():
            x = module(x) if name.startswith("layer") else x
        return x


class CifarResNet(ResNet):
    """`depth` = 6n+2 layers, 16/32/64 channels, parameter-free shortcuts; 64 features."""

    def __init__(self, depth: int, num_classes: int = 10) -> None:
        count = count_blocks("a CIFAR ResNet", depth, 2)
        super().__init__(_subsampling, (count,) * 3, num_classes, width=16)


def _subsampling(width_in: int, width: int, stride: int) -> BasicBlock:
    return BasicBlock(width_in, width, stride, nn.Identity() if stride == 1 else Subsample(width - width_in))
