"""What a user typed, as rows to fit on or to score: a folder or a file of images, features, or a dataset by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Union

import numpy as np

from fdbd.data.datasets import ImageFiles, Images, load
from fdbd.data.features import FeatureRows, holds_features, open_features
from fdbd.data.folders import find_images
from fdbd.data.images import EXTENSIONS
from fdbd.data.npz import NpzArray, NpzImages, array_names, read_array
from fdbd.util.files import stamps

Rows = Union[Images, FeatureRows]


def open_rows(data: str, split: str = "test") -> Rows:
    """Rows by what a user typed: images as in `open_images`, or a file of features. Their paths are absolute: the
    workers of an engine may start in other folders."""
    path = Path(data).expanduser()
    data = str(path.absolute()) if path.exists() else data
    return open_features(data) if holds_features(data) else open_images(data, split)


def open_images(data: str, split: str = "test") -> Images:
    """Images by what a user typed: a folder, whose first level names the classes; one image file; ``.npz`` with ``x``
    and perhaps ``y``; or a name as in `fdbd data`."""
    path = Path(data).expanduser()
    if path.is_dir():
        found = find_images(path)
        files = ImageFiles(found.names, folder=path).watched()
        return Images(files, found.labels, found.classes, source=str(path), skipped=found.skipped)
    if path.is_file() and path.suffix.lower() in EXTENSIONS:
        return Images(ImageFiles([path.name], folder=path.parent).watched(), source=str(path))
    if path.suffix.lower() == ".npz" and path.is_file():
        pixels, labels = NpzImages(path), None
        if "y" in array_names(path) and NpzArray(path, "y").dtype.kind in "biuf":  # text is no class index
            labels = read_array(path, "y").astype(np.int64)
        if not len(pixels):
            raise ValueError(f"{path} holds no image")
        return Images(pixels, labels, name=str(path), source=str(path), find_key=partial(stamps, [path]))
    if path.exists():
        known = ", ".join([*sorted(EXTENSIONS), ".npz or .parquet"])
        raise ValueError(f"{data!r} is neither a folder nor a file of images or features: expected {known}")
    return load(data, split)
