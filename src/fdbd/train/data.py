"""Labelled images for training, one batch at a time, so that files and memory maps stay on disk."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fdbd.data.datasets import ImageFiles, Images


def labelled_images(data: Any, num_classes: int, image_size: int = 0) -> Images:
    """Images with labels below `num_classes`, from what `fdbd.train.train` takes. Image files,
    which may differ in size, are decoded to centre squares of side `image_size`."""
    images = data if isinstance(data, Images) else _as_images(data)
    labels = images.labels
    if labels is None or not len(labels):
        raise ValueError("training needs labelled images, and this dataset has none")
    if isinstance(images.images, ImageFiles):
        side = image_size or images.images.size
        if not side:
            raise ValueError("image files may differ in size: set image_size, the side to train at")
        images = replace(images, images=images.images.resized(side))
    low = labels.min()
    high = labels.max()
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"labels run from {low} to {high}, outside 0 to {num_classes - 1} of the recipe's "
            "classes"
        )
    return images


def _as_images(data: Any) -> Images:
    """Images from a pair (images, labels), or from a dataset of single (image, label)."""
    if isinstance(data, (tuple, list)) and len(data) == 2:
        return Images(_as_array(data[0]), _as_array(data[1]))
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise ValueError(
            f"expected (images, labels) or a dataset of (image, label), not {type(data).__name__}"
        )
    singles = [data[place] for place in range(len(data))]
    pixels = np.stack([np.asarray(image) for image, _ in singles])
    labels = np.array([int(label) for _, label in singles])
    return Images(pixels, labels)


def _as_array(values: Any) -> Any:
    return values.numpy() if isinstance(values, Tensor) else values


def read(images: Images, rows: Tensor, device: torch.device) -> Tensor:
    """Some images as float (N, 3, H, W) in [0, 1] on a device, laid out channels-last, which
    convolutions prefer."""
    if isinstance(images.images, ImageFiles):
        with ThreadPoolExecutor(8) as pool:
            pixels = np.stack(list(pool.map(images.images.__getitem__, rows.tolist())))
    else:
        pixels = np.ascontiguousarray(images.images[rows.numpy()])
    on_device = torch.from_numpy(pixels).to(device, non_blocking=True)
    return on_device.permute(0, 3, 1, 2).float().div(255)


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Subtract the mean and divide by the deviation of each channel; images (N, 3, H, W)."""
    shape = (1, -1, 1, 1)
    return (images - images.new_tensor(mean).view(shape)) / images.new_tensor(std).view(shape)
