"""From pixels to what a network eats: scale to [0, 1], put channels first, normalise by channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_float(images: Tensor) -> Tensor:
    """uint8 (N, H, W, 3) to float (N, 3, H, W) in [0, 1], laid out channels-last, which convolutions prefer."""
    return images.permute(0, 3, 1, 2).float().div(255)


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Subtract the mean and divide by the deviation of each channel; images (N, 3, H, W)."""
    shape = (1, -1, 1, 1)
    return (images - images.new_tensor(mean).view(shape)) / images.new_tensor(std).view(shape)


@dataclass(frozen=True)
class Preprocess:
    """The normalisation that a model was trained with, in [0, 1] pixel units; call it on uint8 images.

    >>> Preprocess((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))(np.full((1, 2, 2, 3), 255, np.uint8)).mean()
    tensor(1.)
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Any) -> Tensor:
        """images: uint8 array or tensor (N, H, W, 3); returns float32 (N, 3, H, W)."""
        tensor = (
            images if isinstance(images, Tensor) else torch.from_numpy(np.array(images))
        )  # a memory map may be read-only
        if tensor.dtype != torch.uint8 or tensor.ndim != 4 or tensor.shape[3] != 3:
            raise ValueError(f"images must be uint8 (N, H, W, 3), not {tensor.dtype} {tuple(tensor.shape)}")
        return normalise(to_float(tensor), self.mean, self.std)
