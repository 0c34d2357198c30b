"""Images: the pictures of one dataset, in memory or decoded when asked for, with labels and a content key."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

from fdbd.data.images import Pixels, centre_square, decode
from fdbd.data.labels import as_classes
from fdbd.util.files import file_hashes, sha256_of_array


class ImageFiles(Sequence[Pixels]):
    """Image files that are decoded when asked for: ``files[i]`` is uint8 RGB (H, W, 3), or its centre square at
    (size, size, 3)."""

    def __init__(self, paths: Sequence[Path], size: int | None = None) -> None:
        self.paths = list(paths)
        self.size = size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        """One image; or, for a slice or an array of indices, the same files in that selection."""
        if isinstance(index, (slice, np.ndarray)):
            return ImageFiles([self.paths[i] for i in np.arange(len(self))[index]], self.size)
        image = decode(self.paths[index])
        return image if self.size is None else centre_square(image, self.size)

    def content_key(self) -> str:
        """SHA-256 over the hashes of the files, in order, and the size."""
        return _sha256(f"files {self.size} {' '.join(file_hashes(self.paths))}")


@dataclass(repr=False, eq=False)
class Images:
    """The images of one dataset.

    >>> images = Images(np.zeros((5, 32, 32, 3), np.uint8), labels=[0, 1, 2, 0, 1], name="black")
    >>> len(images), images[4].shape, images.subset(np.array([1, 3])).labels
    (5, (32, 32, 3), array([1, 0]))
    """

    images: Union[Pixels, ImageFiles]
    """uint8 array (N, H, W, 3), perhaps memory-mapped, or `ImageFiles`."""
    labels: NDArray[np.int64] | None = None
    """Class indices (N,), from any sequence of integers; or None."""
    classes: tuple[str, ...] = ()
    """Class names, perhaps none."""
    name: str = "images"
    """What tables call the set."""
    source: str = "memory"
    """Where it came from, for people."""
    key: Callable[[], str] | None = None
    """Finds the content key; None: by the images themselves."""
    _content_key: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        images = self.images
        if isinstance(images, np.ndarray) and (images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8):
            raise ValueError(f"{self.name} holds {images.dtype} {images.shape}, expected uint8 (N, height, width, 3)")
        if self.labels is not None:
            found = np.asarray(self.labels)
            if found.shape != (len(images),) or (found.size and not np.issubdtype(found.dtype, np.integer)):
                raise ValueError(
                    f"{self.name} has labels of shape {found.shape} and dtype {found.dtype}, "
                    f"expected {len(images)} integers"
                )
            self.labels = found.astype(np.int64)

    @property
    def paths(self) -> list[Path] | None:
        """The files, where there is one per image, else None."""
        return self.images.paths if isinstance(self.images, ImageFiles) else None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Pixels:
        image: Pixels = self.images[index]
        return image

    def __repr__(self) -> str:
        return f"Images({self.name!r}, {len(self):,} images, from {self.source})"

    def content_key(self) -> str:
        """SHA-256 that changes when an image does (files are re-read only if size or time stamp changed).

        Labels are not in it: they have no part in what a model says of the images.
        """
        if self._content_key is None:
            images = self.images
            own = images.content_key if isinstance(images, ImageFiles) else partial(sha256_of_array, images)
            self._content_key = (self.key or own)()
        return self._content_key

    def subset(self, indices: NDArray[np.intp]) -> Images:
        """The images at `indices`, in that order. Its key follows from this set's, without reading anything."""
        rows = np.asarray(indices, dtype=np.int64)
        labels = None if self.labels is None else self.labels[rows]
        key = self.content_key
        return replace(self, images=self.images[rows], labels=labels, key=lambda: _sha256(key(), rows.tobytes()))

    def limited(self, count: int | None) -> Images:
        """At most `count` images, spread evenly over the set, so that files sorted by class keep their balance."""
        if count is None or count >= len(self):
            return self
        if count < 1:
            raise ValueError(f"limit is {count}, expected at least 1 image")
        return self.subset(spread_evenly(count, len(self)))

    def resized(self, size: int | None) -> Images:
        """Every image's centre square at (size, size); None leaves them as they are."""
        if size is None:
            return self
        if size < 1:
            raise ValueError(f"size is {size}, expected at least 1 pixel")
        if isinstance(self.images, ImageFiles):
            return replace(self, images=ImageFiles(self.images.paths, size), key=None)
        if self.images.shape[1:3] == (size, size):
            return self
        pixels = np.empty((len(self), size, size, 3), np.uint8)
        for index, image in enumerate(self.images):
            pixels[index] = centre_square(image, size)
        key = self.content_key
        return replace(self, images=pixels, key=lambda: _sha256(f"{key()} at {size}"))

    def as_classes(self, num_classes: int, class_names: Sequence[str] = ()) -> Images:
        """The same images, with labels that are class indices of a model, by the rule of `labels.as_classes`; one
        sentence where they cannot be."""
        if self.labels is None:
            raise ValueError(f"{self.name} has no labels, and accuracy and fitting need them")
        labels = as_classes(self.labels, self.classes, num_classes, class_names)
        if labels is None:
            if self.classes and len(self.classes) != num_classes:
                raise ValueError(f"{self.name} has {len(self.classes)} classes, the model has {num_classes}")
            raise ValueError(
                f"{self.name} has labels from {self.labels.min()} to {self.labels.max()}, "
                f"the model has classes 0 to {num_classes - 1}"
            )
        if np.array_equal(labels, self.labels):
            return self
        names = tuple(class_names or map(str, range(num_classes)))
        return replace(self, labels=labels, classes=names, key=self.content_key)


def _sha256(text: str, more: bytes = b"") -> str:
    return hashlib.sha256(text.encode() + more).hexdigest()


def spread_evenly(count: int, total: int) -> NDArray[np.int64]:
    """(count,) places among `total`, spread evenly, the same in every run.

    >>> spread_evenly(3, 10)
    array([0, 3, 6])
    """
    return np.arange(count) * total // count
