"""Composites: pictures of four images, two by two, whose labels are those of the parts. Real images
with several labels each, from any data with one label per image."""

from __future__ import annotations

import torch
from torch import Tensor

PARTS = 4
"""Images in one composite."""


def composites(images: Tensor) -> Tensor:
    """Join each four neighbours of a batch: upper left, upper right, lower left, lower right.

    Args:
        images: (4 N, channels, H, W) of any type.

    Returns:
        (N, channels, 2 H, 2 W).

    >>> composites(torch.rand(8, 3, 32, 32)).shape
    torch.Size([2, 3, 64, 64])
    """
    _check_count(len(images))
    upper = torch.cat([images[0::PARTS], images[1::PARTS]], dim=3)
    lower = torch.cat([images[2::PARTS], images[3::PARTS]], dim=3)
    return torch.cat([upper, lower], dim=2)


def composite_labels(labels: Tensor, num_classes: int) -> Tensor:
    """The labels of composites, as zeros and ones (N, C): 1 for each class that a part has.

    Args:
        labels: (4 N,) class indices of the parts; −1 for a part that has none of the classes.
        num_classes: C.

    >>> composite_labels(torch.tensor([0, 2, 2, -1, 1, 1, 1, 1]), num_classes=3)
    tensor([[1, 0, 1],
            [0, 1, 0]])
    """
    _check_count(len(labels))
    classes = torch.arange(num_classes, device=labels.device)
    has_class = labels.reshape(-1, PARTS, 1) == classes
    return has_class.any(dim=1).long()


def _check_count(count: int) -> None:
    if not count or count % PARTS:
        raise ValueError(
            f"{count} images cannot be joined into composites of {PARTS}, expected a multiple of "
            f"{PARTS}"
        )
