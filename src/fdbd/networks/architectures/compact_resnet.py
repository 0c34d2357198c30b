"""The zoo's network: a ten-layer residual network for 32×32 images whose cost sits where a CPU is fast.

ResNet-20 spends most of its time moving 16 channels of 32×32 maps through memory. Four wide blocks at 16×16, 8×8 and
4×4 cost as many multiplications but run at twice the speed, and learn in a third of the epochs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdbd.networks.architectures.common import Network, he_init
from fdbd.networks.architectures.resnet import BasicBlock


class CompactResNet(Network):
    """Stem convolution, four residual blocks, global average pooling, linear head: 128 features, 0.9 M parameters."""

    num_features = 128

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        # The stem has a bias and no batch norm: whitened filters (`whiten_stem`) need none.
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.Sequential(
            BasicBlock(32, 64, 2), BasicBlock(64, 128, 2), BasicBlock(128, 128, 1), BasicBlock(128, 128, 2)
        )
        self.linear = nn.Linear(128, num_classes)
        he_init(self)

    def forward_features(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(F.relu(self.stem(x)))
        return out


@torch.no_grad()
def whiten_stem(model: CompactResNet, images: Tensor, eps: float = 5e-4) -> None:
    """Start the stem as the whitening transform of image patches (Page, 2019; Jordan, 2024).

    The leading principal directions of the patches, scaled to unit variance, once with each sign so that the rectifier
    loses nothing. images: normalised, (N, 3, H, W); a few thousand are enough.
    """
    weight = model.stem.weight
    half, kernel = weight.shape[0] // 2, weight.shape[2]
    patches = F.unfold(images, kernel, stride=2).transpose(1, 2).reshape(-1, 3 * kernel * kernel).double()
    variances, directions = torch.linalg.eigh(patches.T @ patches / len(patches))
    # An eigenvector's sign is the solver's whim; fix it so that the start is the same everywhere.
    directions = directions * directions.gather(0, directions.abs().argmax(0, keepdim=True)).sign()
    filters = (directions / (variances + eps).sqrt())[:, -half:].T.reshape(half, 3, kernel, kernel)
    weight.copy_(torch.cat([filters, -filters]))
    assert model.stem.bias is not None
    model.stem.bias.zero_()
