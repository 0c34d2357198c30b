"""Networks for 32×32 images. Modules have the names of the widespread public implementations
(`layer2.0.shortcut.0`, `linear`; `block1.layer.0.bn1`, `fc`), so that their checkpoints load as
they are."""

from __future__ import annotations

from collections import OrderedDict
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
    >>> network.forward_head(network.forward_features(torch.rand(2, 3, 32, 32)), pre_logits=True).shape
    torch.Size([2, 64])
    """

    head_name: str = "linear"
    rectified: str = "bn1"  #: the part that a rectifier follows
    num_features: int

    def finish(self, num_features: int, num_classes: int) -> None:
        """Adds the head; convolutions start as He et al. (2015) have it (fan out)."""
        self.num_features = num_features
        self.add_module(self.head_name, nn.Linear(num_features, num_classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (N, 3, H, W) to the last feature map (N, P, h, w), after its non-linearity: all
        parts but the head, in the order of their registration."""
        for name, module in self.named_children():
            if name != self.head_name:
                x = F.relu(module(x)) if name == self.rectified else module(x)
        return x

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


class Residual(nn.Module):
    """Convolutions with batch norms, ``(width, kernel, stride)`` each, beside a shortcut; None: a
    projection where the shape changes."""

    def __init__(
        self, width_in: int, *layers: tuple[int, int, int], shortcut: nn.Module | None = None
    ) -> None:
        super().__init__()
        before, stride = width_in, 1
        self.pairs = [(f"conv{number}", f"bn{number}") for number in range(1, len(layers) + 1)]
        for (convolution, norm), (width, kernel, step) in zip(self.pairs, layers):
            self.add_module(convolution, _convolution(before, width, kernel, step))
            self.add_module(norm, nn.BatchNorm2d(width))
            before, stride = width, stride * step
        if shortcut is None:
            is_same = stride == 1 and width_in == before
            parts = (
                ()
                if is_same
                else (_convolution(width_in, before, 1, stride), nn.BatchNorm2d(before))
            )
            shortcut = nn.Sequential(*parts)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for number, (convolution, norm) in enumerate(self.pairs):
            y = getattr(self, norm)(getattr(self, convolution)(F.relu(y) if number else y))
        return F.relu(y + self.shortcut(x))


def basic(width_in: int, width: int, stride: int, shortcut: nn.Module | None = None) -> Residual:
    """Two 3×3 convolutions."""
    return Residual(width_in, (width, 3, stride), (width, 3, 1), shortcut=shortcut)


def bottleneck(width_in: int, width: int, stride: int) -> Residual:
    """1×1, 3×3 and 1×1 convolutions; four times as wide at the end."""
    return Residual(width_in, (width, 1, 1), (width, 3, stride), (4 * width, 1, 1))


class Subsample(nn.Module):
    """Option A, without parameters: every second pixel, and zeros for the new channels, half before
    and half after."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra // 2, self.extra - self.extra // 2))


def _subsampling(width_in: int, width: int, stride: int) -> Residual:
    return basic(
        width_in, width, stride, nn.Identity() if stride == 1 else Subsample(width - width_in)
    )


class ResNet(Network):
    """Stages that double the width, after one 3×3 convolution and no pooling; 512 features with
    four stages of `basic` blocks, 2048 with `bottleneck` and an expansion of 4. `block` takes its
    width before, its width and its stride."""

    def __init__(
        self,
        block: Callable[[int, int, int], nn.Module],
        blocks: tuple[int, ...],
        num_classes: int = 10,
        width: int = 64,
        expansion: int = 1,
    ) -> None:
        super().__init__()
        self.conv1 = _convolution(3, width, 3)
        self.bn1 = nn.BatchNorm2d(width)
        width_in = width
        for stage, count in enumerate(blocks):
            layers = []
            for place in range(count):
                layers.append(block(width_in, width * 2**stage, 2 if stage and not place else 1))
                width_in = width * 2**stage * expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*layers))
        self.finish(width_in, num_classes)


class CifarResNet(ResNet):
    """`depth` = 6n+2 layers, 16/32/64 channels, parameter-free shortcuts; 64 features."""

    def __init__(self, depth: int, num_classes: int = 10) -> None:
        super().__init__(
            _subsampling, (_count_blocks("a CIFAR ResNet", depth, 2),) * 3, num_classes, width=16
        )


class CompactResNet(Network):
    """The zoo's network: stem convolution, four residual blocks, linear head; 128 features, 0.9 M
    parameters.

    ResNet-20 spends most of its time moving 16 channels of 32×32 maps through memory. Four wide
    blocks at 16×16, 8×8 and 4×4 cost as many multiplications but run at twice the speed on a CPU,
    and learn in a third of the epochs."""

    rectified = "stem"

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        # The stem has a bias and no batch norm: whitened filters (`whiten_stem`) need none.
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.Sequential(
            basic(32, 64, 2), basic(64, 128, 2), basic(128, 128, 1), basic(128, 128, 2)
        )
        self.finish(128, num_classes)


@torch.no_grad()
def whiten_stem(model: CompactResNet, images: Tensor, eps: float = 5e-4) -> None:
    """Start the stem as the whitening transform of image patches (Page, 2019; Jordan, 2024).

    The leading principal directions of the patches, scaled to unit variance, once with each sign so
    that the rectifier loses nothing. images: normalised, (N, 3, H, W); a few thousand are
    enough."""
    weight = model.stem.weight
    half, kernel = weight.shape[0] // 2, weight.shape[2]
    patches = (
        F.unfold(images, kernel, stride=2).transpose(1, 2).reshape(-1, 3 * kernel * kernel).double()
    )
    variances, directions = torch.linalg.eigh(patches.T @ patches / len(patches))
    # An eigenvector's sign is the solver's whim; fix it so that the start is the same everywhere.
    directions = directions * directions.gather(0, directions.abs().argmax(0, keepdim=True)).sign()
    filters = (directions / (variances + eps).sqrt())[:, -half:].T.reshape(half, 3, kernel, kernel)
    weight.copy_(torch.cat([filters, -filters]))
    assert model.stem.bias is not None
    model.stem.bias.zero_()


def _stage(*blocks: nn.Module) -> nn.Sequential:
    """Blocks one after the other, under the name `layer`."""
    return nn.Sequential(OrderedDict(layer=nn.Sequential(*blocks)))


class _Wide(nn.Module):
    """Two 3×3 convolutions; the shortcut starts after the first rectifier where the width
    changes."""

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
        out: Tensor = self.conv2(F.relu(self.bn2(self.conv1(y))))
        return out + shortcut


class WideResNet(Network):
    """`depth` = 6n+4 layers, `widen` times as wide (Zagoruyko and Komodakis, 2016); 128 features at
    (40, 2)."""

    head_name = "fc"

    def __init__(self, depth: int = 40, widen: int = 2, num_classes: int = 10) -> None:
        super().__init__()
        count = _count_blocks("a WideResNet", depth, 4)
        self.conv1 = _convolution(3, 16, 3)
        width_in = 16
        for stage in range(3):
            width = 16 * widen * 2**stage
            first = _Wide(width_in, width, 2 if stage else 1)
            self.add_module(
                f"block{stage + 1}",
                _stage(first, *(_Wide(width, width, 1) for _ in range(count - 1))),
            )
            width_in = width
        self.bn1 = nn.BatchNorm2d(width_in)
        self.finish(width_in, num_classes)


def _pre_activated(width_in: int, *layers: tuple[int, int]) -> OrderedDict[str, nn.Module]:
    """Normalise, rectify, convolve, for each ``(width, kernel)``."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (width, kernel) in enumerate(layers, start=1):
        parts[f"bn{number}"] = nn.BatchNorm2d(width_in)
        parts[f"relu{number}"] = nn.ReLU()
        parts[f"conv{number}"] = _convolution(width_in, width, kernel)
        width_in = width
    return parts


class _Dense(nn.Sequential):
    """A sequence whose result is appended to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, super().forward(x)], dim=1)  # type: ignore[no-untyped-call]


class DenseNet(Network):
    """DenseNet-BC (Huang et al., 2017; Andreas Veit's names) with `depth` layers, growth `growth`,
    compression 0.5; 342 features at (100, 12)."""

    head_name = "fc"

    def __init__(self, depth: int = 100, growth: int = 12, num_classes: int = 10) -> None:
        super().__init__()
        count = _count_blocks("a DenseNet-BC", depth, 4)
        width = 2 * growth
        self.conv1 = _convolution(3, width, 3)
        for block in (1, 2, 3):
            layers = (4 * growth, 1), (growth, 3)
            parts = (_Dense(_pre_activated(width + i * growth, *layers)) for i in range(count))
            self.add_module(f"block{block}", _stage(*parts))
            width += count * growth
            if block < 3:
                transition = _pre_activated(width, (width // 2, 1))
                self.add_module(
                    f"trans{block}", nn.Sequential(transition | {"pool": nn.AvgPool2d(2)})
                )
                width //= 2
        self.bn1 = nn.BatchNorm2d(width)
        self.finish(width, num_classes)
