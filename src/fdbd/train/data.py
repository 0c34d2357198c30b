"""Labelled images, one batch at a time: from arrays, memory maps, tensors, image files or datasets of single images."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fdbd.data.datasets import ImageFiles


class Images:
    """uint8 images (N, H, W, 3) with labels (N,), read one batch at a time so that files stay on disk."""

    def __init__(self, data: Any, num_classes: int, image_size: int = 0) -> None:
        """`data`: an object with `.images` and `.labels`, a pair (images, labels), or a dataset of (image, label).
        `image_size`: side of the centre squares that image files are decoded to; they may differ in size."""
        if hasattr(data, "images") and hasattr(data, "labels"):
            data = (data.images, data.labels)
        if isinstance(data, (tuple, list)) and len(data) == 2:
            images, labels = data
            if isinstance(images, ImageFiles):
                if not (image_size or images.size):
                    raise ValueError("image files may differ in size: set image_size, the side to train at")
                images = images.resized(image_size or images.size)
            elif (shape := tuple(images.shape))[3:] != (3,) or not str(images.dtype).endswith("uint8"):
                raise ValueError(f"images must be uint8 (N, H, W, 3), not {images.dtype} {shape}")
        elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            images, labels = data, getattr(data, "targets", None)  # torchvision's name: no need to decode each image
            labels = labels if labels is not None else [data[i][1] for i in range(len(data))]
        else:
            raise ValueError(f"expected (images, labels) or a dataset of (image, label), not {type(data).__name__}")
        if labels is None:
            raise ValueError("training needs labels, and this dataset has none")
        self._images, self._are_pairs = images, images is data
        self.labels = (labels if isinstance(labels, Tensor) else torch.from_numpy(np.array(labels))).long()
        if self.labels.shape != (len(images),):
            raise ValueError(f"{len(images)} images but labels of shape {tuple(self.labels.shape)}")
        if not len(self.labels):
            raise ValueError("the dataset is empty")
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= num_classes:
            raise ValueError(f"labels run from {low} to {high}, outside 0 to {num_classes - 1} of the recipe's classes")

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images uint8 (B, H, W, 3) and labels (B,)."""
        images, places = self._images, indices.tolist()
        if isinstance(images, Tensor):
            return images[indices], self.labels[indices]
        if isinstance(images, ImageFiles):
            with ThreadPoolExecutor(8) as pool:
                found = np.stack(list(pool.map(images.__getitem__, places)))
        elif self._are_pairs:
            found = np.stack([np.asarray(images[place][0]) for place in places])
        else:
            found = np.ascontiguousarray(images[indices.numpy()])
        return torch.from_numpy(found), self.labels[indices]


def to_float(images: Tensor) -> Tensor:
    """uint8 (N, H, W, 3) to float (N, 3, H, W) in [0, 1], laid out channels-last, which convolutions prefer."""
    return images.permute(0, 3, 1, 2).float().div(255)


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Subtract the mean and divide by the deviation of each channel; images (N, 3, H, W)."""
    shape = (1, -1, 1, 1)
    return (images - images.new_tensor(mean).view(shape)) / images.new_tensor(std).view(shape)
