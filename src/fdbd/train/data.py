"""Labelled images by batch, whatever holds them: arrays, a memory map, a tensor, or a dataset of single images."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class Images:
    """uint8 images (N, H, W, 3) with labels (N,), read a batch at a time so that a memory map stays on disk."""

    def __init__(self, data: Any, num_classes: int) -> None:
        """data: an object with `.images` and `.labels`, a pair (images, labels), or a dataset of (image, label)."""
        self._items: Any = None
        if hasattr(data, "images") and hasattr(data, "labels"):
            data = (data.images, data.labels)
        if isinstance(data, (tuple, list)) and len(data) == 2:
            self._images, labels = data
            shape = tuple(self._images.shape)
            if len(shape) != 4 or shape[3] != 3 or str(self._images.dtype).rpartition(".")[2] != "uint8":
                raise ValueError(f"images must be uint8 (N, H, W, 3), not {self._images.dtype} {shape}")
        elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            self._items = data
            known = getattr(data, "targets", None)  # torchvision's name; asking each item would decode each image
            labels = known if known is not None else [data[i][1] for i in range(len(data))]
            shape = (len(data),)
        else:
            raise ValueError(f"expected (images, labels) or a dataset of (image, label), not {type(data).__name__}")
        if labels is None:
            raise ValueError("training needs labels, and this dataset has none")
        self.labels = (labels if isinstance(labels, Tensor) else torch.from_numpy(np.array(labels))).long()
        if self.labels.shape != shape[:1]:
            raise ValueError(f"{shape[0]} images but labels of shape {tuple(self.labels.shape)}")
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
        if self._items is not None:
            images = torch.stack([torch.as_tensor(np.array(self._items[i][0])) for i in indices.tolist()])
        elif isinstance(self._images, Tensor):
            images = self._images[indices]
        else:
            images = torch.from_numpy(np.ascontiguousarray(self._images[indices.numpy()]))
        return images, self.labels[indices]
