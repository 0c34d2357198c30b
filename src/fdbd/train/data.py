"""Labelled images, one batch at a time: from arrays, memory maps, tensors, image files or datasets of single images."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fdbd.data.datasets import ImageFiles

_THREADS = 8  # that decode image files


class Images:
    """uint8 images (N, H, W, 3) with labels (N,), read one batch at a time so that files stay on disk."""

    def __init__(self, data: Any, num_classes: int, image_size: int = 0) -> None:
        """
        Args:
            data: an object with `.images` and `.labels`, a pair (images, labels), or a dataset of (image, label).
            num_classes: labels must be below it.
            image_size: side of the centre squares that image files are decoded to; they may differ in size.
        """
        if hasattr(data, "images") and hasattr(data, "labels"):
            data = (data.images, data.labels)
        if isinstance(data, (tuple, list)) and len(data) == 2:
            self._images, labels = data
            if isinstance(self._images, ImageFiles):
                if not (image_size or self._images.size):
                    raise ValueError("image files may differ in size: set image_size, the side to train at")
                self._images = ImageFiles(self._images.paths, image_size or self._images.size)
            elif (shape := tuple(self._images.shape))[3:] != (3,) or not str(self._images.dtype).endswith("uint8"):
                raise ValueError(f"images must be uint8 (N, H, W, 3), not {self._images.dtype} {shape}")
        elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            self._images = _Singles(data)
            known = getattr(data, "targets", None)  # torchvision's name; asking each item would decode each image
            labels = known if known is not None else [data[i][1] for i in range(len(data))]
        else:
            raise ValueError(f"expected (images, labels) or a dataset of (image, label), not {type(data).__name__}")
        if labels is None:
            raise ValueError("training needs labels, and this dataset has none")
        self.labels = (labels if isinstance(labels, Tensor) else torch.from_numpy(np.array(labels))).long()
        if self.labels.shape != (len(self._images),):
            raise ValueError(f"{len(self._images)} images but labels of shape {tuple(self.labels.shape)}")
        if not len(self.labels):
            raise ValueError("the dataset is empty")
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= num_classes:
            raise ValueError(
                f"labels run from {low} to {high}, outside 0 to {num_classes - 1} for {num_classes} classes"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images uint8 (B, H, W, 3) and labels (B,)."""
        if isinstance(self._images, ImageFiles):
            with ThreadPoolExecutor(_THREADS) as pool:
                images = torch.from_numpy(np.stack(list(pool.map(self._images.__getitem__, indices.tolist()))))
        elif isinstance(self._images, _Singles):
            images = torch.from_numpy(np.stack([self._images[index] for index in indices.tolist()]))
        elif isinstance(self._images, Tensor):
            images = self._images[indices]
        else:
            images = torch.from_numpy(np.ascontiguousarray(self._images[indices.numpy()]))
        return images, self.labels[indices]


class _Singles:
    """The images of a dataset of (image, label)."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        return np.asarray(self._data[index][0])


def to_float(images: Tensor) -> Tensor:
    """uint8 (N, H, W, 3) to float (N, 3, H, W) in [0, 1], laid out channels-last, which convolutions prefer."""
    return images.permute(0, 3, 1, 2).float().div(255)


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Subtract the mean and divide by the deviation of each channel; images (N, 3, H, W)."""
    shape = (1, -1, 1, 1)
    return (images - images.new_tensor(mean).view(shape)) / images.new_tensor(std).view(shape)
