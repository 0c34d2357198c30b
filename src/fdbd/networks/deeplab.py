"""DeepLabV3 with a MobileNetV2 backbone for semantic segmentation, and how its published weights
for Pascal VOC become torch's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn


class _Block(NamedTuple):
    """One inverted residual block of MobileNetV2."""

    width: int
    stride: int
    dilation: int


# Table 2 of the MobileNetV2 paper, with the strides after the third replaced by dilation, so that
# the last map has one eighth of the image's side.
_BLOCKS = (
    _Block(16, 1, 1),
    _Block(24, 2, 1),
    _Block(24, 1, 1),
    _Block(32, 2, 1),
    _Block(32, 1, 1),
    _Block(32, 1, 1),
    _Block(64, 1, 1),
    *[_Block(64, 1, 2)] * 3,
    *[_Block(96, 1, 2)] * 3,
    _Block(160, 1, 2),
    *[_Block(160, 1, 4)] * 2,
    _Block(320, 1, 4),
)
_EXPANSION = 6
_WIDTH = 256


class InvertedResidual(nn.Module):
    """Widen, filter each channel by itself, narrow; beside a shortcut if the shape stays the same
    (Sandler et al., 2018). Batch norms are folded into the convolutions."""

    def __init__(self, width_in: int, block: _Block, expansion: int) -> None:
        super().__init__()
        inner = width_in * expansion
        self.expand: nn.Module = nn.Identity()
        if expansion > 1:
            self.expand = nn.Sequential(nn.Conv2d(width_in, inner, 1), nn.ReLU6())
        self.depthwise = nn.Conv2d(
            inner,
            inner,
            3,
            block.stride,
            padding=block.dilation,
            dilation=block.dilation,
            groups=inner,
        )
        self.project = nn.Conv2d(inner, block.width, 1)
        self.has_shortcut = block.stride == 1 and width_in == block.width

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.depthwise(self.expand(x)))
        narrowed: Tensor = self.project(y)
        return x + narrowed if self.has_shortcut else narrowed


class DeepLabV3MobileNetV2(nn.Module):
    """DeepLabV3 (Chen et al., 2017) on MobileNetV2: images (N, 3, H, W) to logits (N, C, h, w) with
    h = ⌈H/8⌉, which are not enlarged to the image's size. Its features are the 256 channels before
    the head ``classifier``, a 1×1 convolution.

    >>> network = DeepLabV3MobileNetV2(num_classes=21).eval()
    >>> network(torch.zeros(1, 3, 65, 65)).shape
    torch.Size([1, 21, 9, 9])
    """

    def __init__(self, num_classes: int = 21) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 2, padding=1)
        blocks = []
        width = 32
        for number, block in enumerate(_BLOCKS):
            expansion = 1 if number == 0 else _EXPANSION
            blocks.append(InvertedResidual(width, block, expansion))
            width = block.width
        self.blocks = nn.Sequential(*blocks)
        self.local = nn.Conv2d(width, _WIDTH, 1)
        self.pooled = nn.Conv2d(width, _WIDTH, 1)
        self.projection = nn.Conv2d(2 * _WIDTH, _WIDTH, 1)
        self.classifier = nn.Conv2d(_WIDTH, num_classes, 1)

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (N, 3, H, W) to the map (N, 256, h, w) that the head reads."""
        x = self.blocks(F.relu6(self.stem(x)))
        local = F.relu(self.local(x))
        # The image as a whole, at every position.
        pooled = F.relu(self.pooled(x.mean(dim=(2, 3), keepdim=True)))
        both = torch.cat([pooled.expand_as(local), local], dim=1)
        return F.relu(self.projection(both))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.forward_features(x))
        return logits


def torch_weights(tensors: Mapping[str, NDArray[np.float32]]) -> dict[str, Tensor]:
    """The state dict of `DeepLabV3MobileNetV2`, from the tensors of TensorFlow.js' frozen graph."""
    state: dict[str, NDArray[np.float32]] = {}
    _add_merged(state, "stem", tensors, "MobilenetV2/Conv")
    for number in range(len(_BLOCKS)):
        theirs = "MobilenetV2/expanded_conv"
        if number > 0:
            theirs = f"{theirs}_{number}"
            _add_merged(state, f"blocks.{number}.expand.0", tensors, f"{theirs}/expand")
        _add_depthwise(state, f"blocks.{number}.depthwise", tensors, f"{theirs}/depthwise")
        _add_merged(state, f"blocks.{number}.project", tensors, f"{theirs}/project")
    _add_merged(state, "local", tensors, "aspp0")
    _add_merged(state, "pooled", tensors, "image_pooling")
    _add_merged(state, "projection", tensors, "concat_projection")
    state["classifier.weight"] = tensors["logits/semantic/weights"].transpose(3, 2, 0, 1)
    state["classifier.bias"] = tensors["logits/semantic/biases"]
    return {name: torch.from_numpy(np.array(values)) for name, values in state.items()}


def _add_merged(
    state: dict[str, NDArray[np.float32]],
    ours: str,
    tensors: Mapping[str, NDArray[np.float32]],
    theirs: str,
) -> None:
    """A convolution whose batch norm is in its kernel already, but for the offset."""
    norm = f"{theirs}/BatchNorm/FusedBatchNorm"
    state[f"{ours}.weight"] = tensors[f"{theirs}/Conv2D/merged_input"].transpose(3, 2, 0, 1)
    state[f"{ours}.bias"] = tensors[f"{norm}/Offset"]


def _add_depthwise(
    state: dict[str, NDArray[np.float32]],
    ours: str,
    tensors: Mapping[str, NDArray[np.float32]],
    theirs: str,
) -> None:
    """A convolution of each channel by itself, and its batch norm: a factor and an offset."""
    norm = f"{theirs}/BatchNorm/FusedBatchNorm"
    kernel = tensors[f"{theirs}/depthwise_weights"].transpose(2, 3, 0, 1)
    factor = tensors[f"{norm}/Scaled"].reshape(-1, 1, 1, 1)
    state[f"{ours}.weight"] = kernel * factor
    state[f"{ours}.bias"] = tensors[f"{norm}/Offset"]
