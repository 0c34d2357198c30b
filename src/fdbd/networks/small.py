"""A small network for 32 × 32 images that trains in minutes."""

from __future__ import annotations

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
