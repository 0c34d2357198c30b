"""Images to fit on or to score: a folder, an NPZ file, a list, or a dataset by name; never all in memory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdbd.data.datasets import load
from fdbd.data.decoding import Sliceable, cut
from fdbd.data.features import Names
from fdbd.data.images import EXTENSIONS, Pixels, decode
from fdbd.data.npz import NpzArray, NpzImages, array_names, read_array
from fdbd.util.files import stamp, stamps


class ImageRows:
    """Images in a fixed order.

    Attributes:
        pixels: files that are decoded when asked for, or an array that is read in slices.
        names: a path below the folder for each image, or row numbers.
        labels: class indices (N,), or None.
        classes: names of the classes that `labels` count, perhaps none.
        key: changes when an image is added, removed or written anew.
        source: for people.
    """

    def __init__(
        self,
        pixels: Sequence[Pixels] | Sliceable,
        names: Names,
        labels: NDArray[np.int64] | None,
        classes: Sequence[str],
        key: str,
        source: str,
    ) -> None:
        self.pixels, self.names, self.labels = pixels, names, labels
        self.classes, self.key, self.source = tuple(classes), key, source

    def __len__(self) -> int:
        return len(self.names)

    def spans(self, size: int) -> list[range]:
        """All rows in runs of `size`."""
        return cut(range(len(self)), size)


class Files(Sequence[Pixels]):
    """Image files below a folder, decoded when asked for; a name costs its letters, whatever the folder."""

    def __init__(self, folder: str, names: Sequence[str]) -> None:
        self.folder, self.names = folder, names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: Any) -> Any:
        return decode(os.path.join(self.folder, self.names[index]), name=self.names[index])


def open_images(data: str, split: str = "test") -> ImageRows:
    """Images by what a user typed: a folder, ``.npz`` with ``x`` and perhaps ``y``, or a name as in `fdbd data`."""
    path = Path(data).expanduser()
    if path.is_dir():
        return _from_folder(path)
    if path.suffix.lower() == ".npz" and path.is_file():
        pixels, labels = NpzImages(path), None
        if "y" in array_names(path) and NpzArray(path, "y").dtype.kind in "biuf":  # text is no class index
            labels = read_array(path, "y").astype(np.int64)
        if not len(pixels) or (labels is not None and labels.shape != (len(pixels),)):
            raise ValueError(
                f"{path}: x holds {len(pixels)} images and y {0 if labels is None else len(labels)} labels"
            )
        return ImageRows(pixels, range(len(pixels)), labels, (), stamps([path]), str(path))
    images = load(data, split)
    names = range(len(images)) if images.paths is None else [str(file) for file in images.paths]
    key = images.content_key() if images.paths is None else stamps(images.paths)
    return ImageRows(images.images, names, images.labels, images.classes, key, images.source)


def _from_folder(folder: Path) -> ImageRows:
    names, digest = [], hashlib.sha256(os.path.abspath(folder).encode(errors="surrogateescape"))
    for name, path in _walk(os.fspath(folder)):
        names.append(name)
        digest.update(f"{name}\0{stamp(path)}\n".encode(errors="surrogateescape"))
    if not names:
        raise ValueError(f"{folder} holds no image ({', '.join(sorted(EXTENSIONS))})")
    labels, classes = None, []
    if all("/" in name for name in names):
        found, labels = np.unique([name.partition("/")[0] for name in names], return_inverse=True)
        classes = found.tolist()
    return ImageRows(Files(os.fspath(folder), names), names, labels, classes, digest.hexdigest(), str(folder))


def _walk(folder: str, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Image files below a folder, by their ending, as path below it and path, in order. Hidden ones are left out."""
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path, f"{prefix}{entry.name}/")
        elif os.path.splitext(entry.name)[1].lower() in EXTENSIONS:
            yield prefix + entry.name, entry.path
