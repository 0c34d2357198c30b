"""Networks for 32×32 images. Modules have the names of the widespread public implementations
(`layer2.0.shortcut.0`, `linear`; `block1.layer.0.bn1`, `fc`), so that their checkpoints load as
they are."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Network(nn.Module):
    """A convolutional classifier: feature map, global average pooling, one linear head named
    `head_name`. It answers what timm's models answer too, so that it can be split into backbone and
    head without guessing.

    >>> from fdbd.networks import create
    >>> network = create("resnet20", num_classes=10)
    >>> features = network.forward_features(torch.rand(2, 3, 32, 32))
    >>> network.forward_head(features, pre_logits=True).shape
    torch.Size([2, 64])
    """

    head_name: str = "linear"
    num_features: int

    def add_head(self, num_features: int, num_classes: int) -> None:
        """Adds the head, as the last part; convolutions start as He et al. (2015) have it (fan
        out)."""
        self.num_features = num_features
        self.add_module(self.head_name, nn.Linear(num_features, num_classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (N, 3, H, W) to the last feature map (N, P, h, w), after its non-linearity."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Feature map (N, P, h, w) to penultimate features (N, P) if `pre_logits`, else to logits
        (N, C)."""
        pooled = x.mean(dim=(2, 3))
        return pooled if pre_logits else self.get_classifier()(pooled)

    def get_classifier(self) -> nn.Module:
        """The linear head."""
        return self.get_submodule(self.head_name)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def count_parameters(model: nn.Module) -> int:
    """The number of trainable values.

    >>> count_parameters(nn.Linear(3, 2))
    8
    """
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _convolution(width_in: int, width: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(width_in, width, kernel, stride, padding=kernel // 2, bias=False)


def _count_blocks(network: str, depth: int, others: int) -> int:
    """n of a network of 6n + `others` layers."""
    if depth < 6 + others or (depth - others) % 6:
        raise ValueError(f"{network} has 6n+{others} layers, not {depth}")
    return (depth - others) // 6


def _projection(width_in: int, width: int, stride: int) -> nn.Sequential:
    """A shortcut: a 1×1 convolution if the shape changes, else nothing."""
    if stride == 1 and width_in == width:
        return nn.Sequential()
    return nn.Sequential(_convolution(width_in, width, 1, stride), nn.BatchNorm2d(width))


class Basic(nn.Module):
    """Two 3×3 convolutions beside a shortcut; None: a projection if the shape changes."""

    def __init__(
        self, width_in: int, width: int, stride: int, shortcut: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.conv1 = _convolution(width_in, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = _projection(width_in, width, stride) if shortcut is None else shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions beside a shortcut; four times as wide at the end.

    The stride is in the 3×3 convolution; in the original network of 2015, which Caffe and Keras
    have, it is in the first 1×1 convolution (`stride_first`)."""

    def __init__(
        self, width_in: int, width: int, stride: int, *, stride_first: bool = False
    ) -> None:
        super().__init__()
        first_stride = stride if stride_first else 1
        second_stride = 1 if stride_first else stride
        self.conv1 = _convolution(width_in, width, 1, first_stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, second_stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, 4 * width, 1)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.shortcut = _projection(width_in, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.shortcut(x))


class Subsample(nn.Module):
    """Option A, without parameters: every second pixel, and zeros for the new channels, half before
    and half after."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.before = extra // 2
        self.after = extra - extra // 2

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.before, self.after))


def _subsampling(width_in: int, width: int, stride: int) -> Basic:
    """A basic block whose shortcut has no parameters."""
    shortcut = nn.Identity() if stride == 1 else Subsample(width - width_in)
    return Basic(width_in, width, stride, shortcut)


def _stage_of(
    block: Callable[[int, int, int], nn.Module],
    count: int,
    width_in: int,
    width: int,
    stride: int,
    expansion: int = 1,
) -> nn.Sequential:
    """`count` blocks, of which the first one changes width and resolution."""
    blocks = [block(width_in, width, stride)]
    for _ in range(count - 1):
        blocks.append(block(width * expansion, width, 1))
    return nn.Sequential(*blocks)


class ResNet(Network):
    """Four stages that double the width, after one 3×3 convolution and no pooling: the usual form
    for small images. `block` takes its width before, its width and its stride.

    512 features with `Basic` blocks, 2048 with `Bottleneck` and an expansion of 4."""

    def __init__(
        self,
        block: Callable[[int, int, int], nn.Module],
        blocks: tuple[int, int, int, int],
        num_classes: int = 10,
        expansion: int = 1,
    ) -> None:
        super().__init__()
        self.conv1 = _convolution(3, 64, 3)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = _stage_of(block, blocks[0], 64, 64, 1, expansion)
        self.layer2 = _stage_of(block, blocks[1], 64 * expansion, 128, 2, expansion)
        self.layer3 = _stage_of(block, blocks[2], 128 * expansion, 256, 2, expansion)
        self.layer4 = _stage_of(block, blocks[3], 256 * expansion, 512, 2, expansion)
        self.add_head(512 * expansion, num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        features: Tensor = self.layer4(x)
        return features


class CifarResNet(Network):
    """`depth` = 6n+2 layers, 16/32/64 channels, parameter-free shortcuts; 64 features."""

    def __init__(self, depth: int, num_classes: int = 10) -> None:
        super().__init__()
        count = _count_blocks("a CIFAR ResNet", depth, 2)
        self.conv1 = _convolution(3, 16, 3)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage_of(_subsampling, count, 16, 16, 1)
        self.layer2 = _stage_of(_subsampling, count, 16, 32, 2)
        self.layer3 = _stage_of(_subsampling, count, 32, 64, 2)
        self.add_head(64, num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer1(x)
        x = self.layer2(x)
        features: Tensor = self.layer3(x)
        return features


class CompactResNet(Network):
    """The zoo's network: stem convolution, four residual blocks, linear head; 128 features, 0.9 M
    parameters.

    ResNet-20 spends most of its time moving 16 channels of 32×32 maps through memory. Four wide
    blocks at 16×16, 8×8 and 4×4 cost as many multiplications but run at twice the speed on a CPU,
    and learn in a third of the epochs."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        # The stem has a bias and no batch norm: whitened filters (`whiten_stem`) need none.
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.Sequential(
            Basic(32, 64, 2), Basic(64, 128, 2), Basic(128, 128, 1), Basic(128, 128, 2)
        )
        self.add_head(128, num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        features: Tensor = self.blocks(F.relu(self.stem(x)))
        return features


@torch.no_grad()
def whiten_stem(model: CompactResNet, images: Tensor, eps: float = 5e-4) -> None:
    """Start the stem as the whitening transform of image patches (Page, 2019; Jordan, 2024).

    Its filters are the leading principal directions of the patches, scaled to unit variance, once
    with each sign so that the rectifier loses nothing.

    Args:
        model: the network whose stem is set, in place.
        images: normalised images (N, 3, H, W); a few thousand are enough.
        eps: added to each variance before its root is divided by.
    """
    weight = model.stem.weight
    half = weight.shape[0] // 2
    kernel = weight.shape[2]
    patches = F.unfold(images, kernel, stride=2).transpose(1, 2)
    patches = patches.reshape(-1, 3 * kernel * kernel).double()
    variances, directions = torch.linalg.eigh(patches.T @ patches / len(patches))
    # An eigenvector's sign is the solver's whim; fix it so that the start is the same everywhere.
    largest = directions.abs().argmax(0, keepdim=True)
    directions = directions * directions.gather(0, largest).sign()
    # `eigh` returns the leading ones last.
    leading = (directions / (variances + eps).sqrt())[:, -half:]
    filters = leading.T.reshape(half, 3, kernel, kernel)
    weight.copy_(torch.cat([filters, -filters]))
    assert model.stem.bias is not None
    model.stem.bias.zero_()


class _Stage(nn.Module):
    """Blocks one after the other, under the name `layer`."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layer(x)
        return features


class _WideBlock(nn.Module):
    """Two 3×3 convolutions; the shortcut starts after the first rectifier if the width changes."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width_in)
        self.conv1 = _convolution(width_in, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3)
        self.convShortcut = None if width_in == width else _convolution(width_in, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(x))
        shortcut = x if self.convShortcut is None else self.convShortcut(y)
        y = self.conv1(y)
        y = self.conv2(F.relu(self.bn2(y)))
        out: Tensor = y + shortcut
        return out


class WideResNet(Network):
    """`depth` = 6n+4 layers, `widen` times as wide (Zagoruyko and Komodakis, 2016); 128 features at
    (40, 2)."""

    head_name = "fc"

    def __init__(self, depth: int = 40, widen: int = 2, num_classes: int = 10) -> None:
        super().__init__()
        count = _count_blocks("a WideResNet", depth, 4)
        self.conv1 = _convolution(3, 16, 3)
        self.block1 = self._stage(count, 16, 16 * widen, 1)
        self.block2 = self._stage(count, 16 * widen, 32 * widen, 2)
        self.block3 = self._stage(count, 32 * widen, 64 * widen, 2)
        self.bn1 = nn.BatchNorm2d(64 * widen)
        self.add_head(64 * widen, num_classes)

    @staticmethod
    def _stage(count: int, width_in: int, width: int, stride: int) -> _Stage:
        first = _WideBlock(width_in, width, stride)
        rest = [_WideBlock(width, width, 1) for _ in range(count - 1)]
        return _Stage(first, *rest)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = self.block1(x)
        x = self.block2(x)
        x = self.block3(x)
        return F.relu(self.bn1(x))


class _DenseLayer(nn.Module):
    """A 1×1 and a 3×3 convolution, each after a norm and a rectifier; the result is appended to the
    input."""

    def __init__(self, width_in: int, growth: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width_in)
        self.conv1 = _convolution(width_in, 4 * growth, 1)
        self.bn2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = _convolution(4 * growth, growth, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.bn1(x)))
        y = self.conv2(F.relu(self.bn2(y)))
        return torch.cat([x, y], dim=1)


class _Transition(nn.Module):
    """Half the width at half the resolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width)
        self.conv1 = _convolution(width, width // 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv1(F.relu(self.bn1(x))), 2)


class DenseNet(Network):
    """DenseNet-BC (Huang et al., 2017; Andreas Veit's names) with `depth` layers, growth `growth`,
    compression 0.5; 342 features at (100, 12)."""

    head_name = "fc"

    def __init__(self, depth: int = 100, growth: int = 12, num_classes: int = 10) -> None:
        super().__init__()
        count = _count_blocks("a DenseNet-BC", depth, 4)
        added = count * growth
        width = 2 * growth
        self.conv1 = _convolution(3, width, 3)
        self.block1 = self._block(count, width, growth)
        width += added
        self.trans1 = _Transition(width)
        width //= 2
        self.block2 = self._block(count, width, growth)
        width += added
        self.trans2 = _Transition(width)
        width //= 2
        self.block3 = self._block(count, width, growth)
        width += added
        self.bn1 = nn.BatchNorm2d(width)
        self.add_head(width, num_classes)

    @staticmethod
    def _block(count: int, width: int, growth: int) -> _Stage:
        layers = [_DenseLayer(width + place * growth, growth) for place in range(count)]
        return _Stage(*layers)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = self.trans1(self.block1(x))
        x = self.trans2(self.block2(x))
        x = self.block3(x)
        return F.relu(self.bn1(x))
