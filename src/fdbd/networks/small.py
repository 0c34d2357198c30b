"""Two small networks for 32 × 32 images: a plain CNN that trains in minutes, and a transformer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SmallCNN(nn.Module):
    """Three convolutions with pooling between them, and a linear head: images (N, 3, 32, 32)."""

    def __init__(self, num_classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.conv3 = nn.Conv2d(2 * width, 4 * width, 3, padding=1)
        self.fc = nn.Linear(4 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.conv3(x))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


class SmallTransformer(nn.Module):
    """A vision transformer for 32 × 32 images: patches of 4, a class token, six layers with their
    norms behind the blocks, 128 features. Names of its parts are those of the public checkpoint
    ``vit_cifar10_small.pth``."""

    def __init__(self, num_classes: int = 10, width: int = 128) -> None:
        super().__init__()
        patches = (32 // 4) ** 2
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, patches + 1, width))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, 4, stride=4)})
        layer = nn.TransformerEncoderLayer(width, 8, 2 * width, dropout=0.0, batch_first=True)
        self.transformer = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.mlp_head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch_embed["proj"](images).flatten(2).transpose(1, 2)
        token = self.cls_token.expand(len(images), -1, -1)
        x = torch.cat([token, patches], dim=1) + self.pos_embed
        logits: Tensor = self.mlp_head(self.transformer(x)[:, 0])
        return logits
