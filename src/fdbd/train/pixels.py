"""Batches of pixels to what a network eats, on the device where they are: augmentation stands between the two steps."""

from __future__ import annotations

from torch import Tensor


def to_float(images: Tensor) -> Tensor:
    """uint8 (N, H, W, 3) to float (N, 3, H, W) in [0, 1], laid out channels-last, which convolutions prefer."""
    return images.permute(0, 3, 1, 2).float().div(255)


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Subtract the mean and divide by the deviation of each channel; images (N, 3, H, W)."""
    shape = (1, -1, 1, 1)
    return (images - images.new_tensor(mean).view(shape)) / images.new_tensor(std).view(shape)
