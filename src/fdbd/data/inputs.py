"""Rows to fit on or to score, from what a user typed: a folder or a file of images, features, or a
dataset by name."""

from __future__ import annotations

from pathlib import Path
from typing import Union

from fdbd.core.pixels import EXTENSIONS
from fdbd.data.columns import TextRows, open_columns
from fdbd.data.datasets import ImageFiles, Images, from_folder, load
from fdbd.data.datasets.formats import open_npz
from fdbd.data.features import FeatureRows, holds_features, open_features

Rows = Union[Images, FeatureRows, TextRows]


def open_rows(
    data: str, split: str = "test", text: str | None = None, label: str | None = None
) -> Rows:
    """Rows by what a user typed: images as in `open_images`, a file of features, or with `text` the
    texts in that column of a file, with labels from the column `label` if there is one. Their paths
    are absolute: the workers of an engine may start in other folders."""
    path = Path(data).expanduser()
    data = str(path.absolute()) if path.exists() else data
    if text is not None:
        if not path.is_file():
            raise FileNotFoundError(f"no texts at {data!r}: no such file")
        return TextRows(open_columns(data), text, label)
    if label is not None:
        raise ValueError("a column of labels (--label) goes with a column of texts (--text)")
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        raise ValueError(f"{data!r} holds lines of JSON: name the column of its texts with --text")
    return open_features(data) if holds_features(data) else open_images(data, split)


def open_images(data: str, split: str = "test") -> Images:
    """Images by what a user typed: a folder, whose first level names the classes; one image file;
    ``.npz`` with ``x`` and perhaps ``y``; or a name as in `fdbd data`. Files that change from now
    on can no longer be read."""
    path = Path(data).expanduser()
    if path.is_dir():
        images = from_folder(path)
    elif path.is_file() and path.suffix.lower() in EXTENSIONS:
        images = Images(ImageFiles([path.name], folder=path.parent), source=str(path))
    elif path.is_file() and path.suffix.lower() == ".npz":
        images = open_npz(path)
    elif path.exists():
        known = ", ".join([*sorted(EXTENSIONS), ".npz or .parquet"])
        raise ValueError(
            f"{data!r} is neither a folder nor a file of images or features: expected {known}"
        )
    else:
        images = load(data, split)
    if isinstance(images.images, ImageFiles):
        images.images.watch()
    return images
