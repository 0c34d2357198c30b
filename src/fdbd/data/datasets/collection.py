"""Images: the pictures of one dataset, in memory or decoded when asked for, with labels and a content key."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdbd.data.decoding import Names, cut
from fdbd.data.images import ImageError, Pixels, centre_square, decode
from fdbd.data.labels import as_classes
from fdbd.util.files import file_hashes, sha256_of_array, stamp

CHANGED = "was changed or replaced during the run"


class ImageFiles(Sequence[Pixels]):
    """Image files, perhaps below a folder, decoded when asked for: ``files[i]`` is uint8 RGB (H, W, 3), or its centre
    square at (size, size, 3). A file that is no longer the one that was listed cannot be read: its row would belong to
    other data than its neighbours."""

    def __init__(
        self, names: Sequence[str | Path], size: int | None = None, folder: str | Path = "", marks: Any = None
    ) -> None:
        self.names, self.size, self.folder = list(map(str, names)), size, folder
        self._marks = np.array([self._mark(name) for name in self.names], np.uint64) if marks is None else marks

    @cached_property
    def paths(self) -> list[Path]:
        return [Path(self.folder, name) for name in self.names]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: Any) -> Any:
        """One image; or, for a slice or an array of indices, the same files in that selection."""
        if isinstance(index, (slice, np.ndarray)):
            rows = np.arange(len(self))[index]
            return ImageFiles([self.names[row] for row in rows], self.size, self.folder, self._marks[rows])
        name = self.names[index]
        image = decode(os.path.join(self.folder, name), name=name)
        if self._mark(name) != self._marks[index]:
            raise ImageError(f"{name} {CHANGED}")
        return image if self.size is None else centre_square(image, self.size)

    def resized(self, size: int | None) -> ImageFiles:
        """The same files, as centre squares."""
        return ImageFiles(self.names, size, self.folder, self._marks)

    def _mark(self, name: str) -> int:
        """Eight bytes for what any machine says of a file, its size and time: a list of a million files stays small."""
        text = " ".join(stamp(os.path.join(self.folder, name)).split(" ")[:2])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def key(self) -> str:
        """SHA-256 over the folder, the names, and what changes with each file."""
        text = "\0".join([os.path.abspath(self.folder), *self.names])
        return hashlib.sha256(text.encode(errors="surrogateescape") + self._marks.tobytes()).hexdigest()

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

    images: Any
    """uint8 array (N, H, W, 3), perhaps memory-mapped or read in slices from a file, or `ImageFiles`."""
    labels: NDArray[np.int64] | None = None
    """Class indices (N,), from any sequence of integers; or None."""
    classes: tuple[str, ...] = ()
    """Class names, perhaps none."""
    name: str = "images"
    """What tables call the set."""
    source: str = "memory"
    """Where it came from, for people."""
    find_key: Callable[[], str] | None = None
    """Finds the content key; None: by the images themselves."""
    skipped: dict[str, int] = field(default_factory=dict)
    """How many entries of a folder were passed over, by reason."""
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

    @property
    def names(self) -> Names:
        """What tables call the images: a path for each, or row numbers."""
        return self.images.names if isinstance(self.images, ImageFiles) else range(len(self))

    @property
    def key(self) -> str:
        """Changes when an image is added, removed, written anew or replaced; of files only size and time are asked."""
        return self.images.key() if isinstance(self.images, ImageFiles) else self.content_key()

    def spans(self, size: int) -> list[range]:
        """All rows in runs of `size`."""
        return cut(range(len(self)), size)

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
            self._content_key = (self.find_key or own)()
        return self._content_key

    def subset(self, indices: NDArray[np.intp]) -> Images:
        """The images at `indices`, in that order. Its key follows from this set's, without reading anything."""
        rows = np.asarray(indices, dtype=np.int64)
        labels = None if self.labels is None else self.labels[rows]
        key = self.content_key
        return replace(self, images=self.images[rows], labels=labels, find_key=lambda: _sha256(key(), rows.tobytes()))

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
            return replace(self, images=self.images.resized(size), find_key=None)
        if self.images.shape[1:3] == (size, size):
            return self
        pixels = np.empty((len(self), size, size, 3), np.uint8)
        for index, image in enumerate(self.images):
            pixels[index] = centre_square(image, size)
        key = self.content_key
        return replace(self, images=pixels, find_key=lambda: _sha256(f"{key()} at {size}"))

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
        return replace(self, labels=labels, classes=names, find_key=self.content_key)


def _sha256(text: str, more: bytes = b"") -> str:
    return hashlib.sha256(text.encode() + more).hexdigest()


def spread_evenly(count: int, total: int) -> NDArray[np.int64]:
    """(count,) places among `total`, spread evenly, the same in every run.

    >>> spread_evenly(3, 10)
    array([0, 3, 6])
    """
    return np.arange(count) * total // count
