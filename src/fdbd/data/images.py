"""Image files to RGB arrays, refusing what is broken or too large; and Images: those of one dataset
or folder, in memory or decoded on access, with labels and a key. Pillow decodes; none of its global
settings is changed here."""

from __future__ import annotations

import hashlib
import os
import platform
import stat
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

from fdbd.core.pixels import (
    EXTENSIONS,
    ImageError,
    Picture,
    Pixels,
    centre_square,
    decode,
    decode_draft,
)
from fdbd.data.labels import as_classes, classes_by_folder
from fdbd.util.files import file_hashes, sha256_of_array

Names = Union[range, Sequence[str]]
"""Row numbers, or a path below a folder for each row."""
CHANGED = "was changed or replaced during the run"


@dataclass(repr=False, eq=False)
class ImageFiles(Sequence[Pixels]):
    """Image files, perhaps below a folder, decoded on access: ``files[i]`` is uint8 RGB (H, W, 3),
    or its centre square at (size, size, 3)."""

    #: or paths
    names: Sequence[str]
    size: int | None = None
    folder: str | Path = ""
    marks: NDArray[np.int64] | None = None
    """(N, 4) size, time of writing, inode and time of change of each file when it was watched, see
    `watch`."""
    machine: str = ""
    """The machine on which they were watched: another one knows a file by an inode of its own."""

    def __post_init__(self) -> None:
        self.names = list(map(str, self.names))

    def watch(self) -> NDArray[np.int64]:
        """Remember `marks`: from now on, a file that changes can no longer be read."""
        if self.marks is None:
            marks = [self._mark(name) for name in self.names]
            self.marks = np.array(marks, np.int64).reshape(-1, 4)
            self.machine = platform.node()
        return self.marks

    @cached_property
    def paths(self) -> list[Path]:
        return [Path(self.folder, name) for name in self.names]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: Any) -> Any:
        """One image; or, for a slice or an array of indices, the same files in that selection."""
        if isinstance(index, (slice, np.ndarray)):
            rows = np.arange(len(self))[index]
            marks = None if self.marks is None else self.marks[rows]
            return replace(self, names=[self.names[row] for row in rows], marks=marks)
        name = self.names[index]
        image = decode(os.path.join(self.folder, name), name=name)
        if self._has_changed(index):
            raise ImageError(f"{name} {CHANGED}")
        return image if self.size is None else centre_square(image, self.size)

    def draft(self, index: int, least_side: int) -> Picture:
        """One image as a draft whose sides have at least `least_side` pixels, see
        `decode_draft`."""
        name = self.names[index]
        picture = decode_draft(os.path.join(self.folder, name), least_side, name=name)
        if self._has_changed(index):
            raise ImageError(f"{name} {CHANGED}")
        return picture

    def resized(self, size: int) -> ImageFiles:
        """The same files, as centre squares."""
        return replace(self, size=size)

    def _has_changed(self, index: int) -> bool:
        """Whether a watched file was changed or replaced."""
        if self.marks is None:
            return False
        before = tuple(self.marks[index].tolist())
        now = self._mark(self.names[index])
        if self.machine != platform.node():
            # Only size and time of writing are the same everywhere.
            return now[:2] != before[:2]
        return now != before

    def _mark(self, name: str) -> tuple[int, int, int, int]:
        """Numbers that change when a file is rewritten, or replaced by another one of the same size
        and time."""
        try:
            found = os.stat(os.path.join(self.folder, name))
        except OSError:
            return -1, 0, 0, 0
        # Some file systems number their files beyond what int64 holds.
        inode = found.st_ino & (2**63 - 1)
        return found.st_size, found.st_mtime_ns, inode, found.st_ctime_ns

    def key(self) -> str:
        """SHA-256 over the folder, the names, and the marks of each file."""
        text = "\0".join([os.path.abspath(self.folder), *self.names])
        return hashlib.sha256(
            text.encode(errors="surrogateescape") + self.watch().tobytes()
        ).hexdigest()

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
    """Uint8 array (N, H, W, 3), perhaps memory-mapped or read in slices from a file, or
    `ImageFiles`."""
    #: class indices (N,), from any sequence of integers; or None
    labels: NDArray[np.int64] | None = None
    #: class names, perhaps none
    classes: tuple[str, ...] = ()
    #: what tables call the set
    name: str = "images"
    #: where it came from, for people
    source: str = "memory"
    #: finds the content key; None: by the images themselves
    find_key: Callable[[], str] | None = None
    #: how many entries of a folder were skipped, by reason
    skipped: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        images = self.images
        if isinstance(images, np.ndarray) and (
            images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8
        ):
            raise ValueError(
                f"{self.name} holds {images.dtype} {images.shape}, expected uint8 (N, height,"
                " width, 3)"
            )
        if self.labels is not None:
            found = np.asarray(self.labels)
            if found.shape != (len(images),) or (
                found.size and not np.issubdtype(found.dtype, np.integer)
            ):
                what = f"{self.name} has labels of shape {found.shape} and dtype {found.dtype}"
                raise ValueError(f"{what}, expected {len(images)} integers")
            self.labels = found.astype(np.int64)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Pixels:
        image: Pixels = self.images[index]
        return image

    def __repr__(self) -> str:
        return f"Images({self.name!r}, {len(self):,} images, from {self.source})"

    @property
    def paths(self) -> list[Path] | None:
        """The files, one per image; None if the images are not files."""
        return self.images.paths if isinstance(self.images, ImageFiles) else None

    @property
    def names(self) -> Names:
        """The images' names in tables: a path for each, or row numbers."""
        return self.images.names if isinstance(self.images, ImageFiles) else range(len(self))

    @property
    def key(self) -> str:
        """Changes when an image is added, removed, rewritten or replaced. Only size and time of a
        file are read."""
        return self.images.key() if isinstance(self.images, ImageFiles) else self.content_key

    @cached_property
    def content_key(self) -> str:
        """SHA-256 that changes when an image does, not when a label does; files are re-read only if
        their size or time stamp changed."""
        if self.find_key is not None:
            return self.find_key()
        if isinstance(self.images, ImageFiles):
            return self.images.content_key()
        return sha256_of_array(self.images)

    def spans(self, size: int) -> list[range]:
        """All rows in runs of `size`."""
        return cut(range(len(self)), size)

    def subset(self, indices: NDArray[np.intp]) -> Images:
        """The images at `indices`, in that order. Its key follows from this set's, without reading
        anything."""
        rows = np.asarray(indices, dtype=np.int64)
        labels = None if self.labels is None else self.labels[rows]
        return replace(
            self,
            images=self.images[rows],
            labels=labels,
            find_key=lambda: _sha256(self.content_key, rows.tobytes()),
        )

    def limited(self, count: int | None) -> Images:
        """At most `count` images, spread evenly over the set, so that files sorted by class keep
        their balance."""
        if count is None or count >= len(self):
            return self
        if count < 1:
            raise ValueError(f"limit is {count}, expected at least 1 image")
        return self.subset(spread_evenly(count, len(self)))

    def as_classes(self, num_classes: int, class_names: Sequence[str] = ()) -> Images:
        """The same images, with labels that are class indices of a model, by the rule of
        `labels.as_classes`."""
        if self.labels is None:
            raise ValueError(f"{self.name} has no labels, and accuracy and fitting need them")
        labels = as_classes(self.labels, self.classes, num_classes, class_names)
        if labels is None and len(self.classes) not in (0, num_classes):
            raise ValueError(
                f"{self.name} has {len(self.classes)} classes, the model has {num_classes}"
            )
        if labels is None:
            found = f"labels from {self.labels.min()} to {self.labels.max()}"
            raise ValueError(
                f"{self.name} has {found}, the model has classes 0 to {num_classes - 1}"
            )
        if np.array_equal(labels, self.labels):
            return self
        names = tuple(class_names or map(str, range(num_classes)))
        return replace(self, labels=labels, classes=names, find_key=lambda: self.content_key)


def find_images(folder: str | os.PathLike[str]) -> Images:
    """Image files below a folder at any depth, by their ending, in the order of the parts of their
    paths, with the classes of `classes_by_folder`; ValueError if there is none.

    Each folder is read once, also if links lead to it again. Only regular files are read: pipes and
    devices, which can block a reader forever, are skipped like hidden entries. A link to nothing
    that ends like an image counts as an image that cannot be read."""
    root = os.fspath(folder)
    skipped: Counter[str] = Counter()
    already_read: set[tuple[int, int]] = set()
    images: list[str] = []
    # What is still to be read, as paths below the root; the root itself is "".
    folders = [""]
    links: list[str] = []
    while folders or links:
        # Links last, so that a folder's images have the names that do not go through a link.
        parent = folders.pop() if folders else links.pop()
        for entry in _entries_of(root, parent, already_read, skipped):
            path = f"{parent}/{entry.name}" if parent else entry.name
            kind = _kind(entry)
            if kind == "image":
                images.append(path)
            elif kind == "folder":
                folders.append(path)
            elif kind == "link":
                links.append(path)
            else:
                skipped[kind] += 1
    names = sorted(images, key=lambda name: name.split("/"))
    if not names:
        raise ValueError(
            f"{root} holds no image ({', '.join(sorted(EXTENSIONS))}){describe_skipped(skipped)}"
        )
    classes, labels = classes_by_folder(names)
    return Images(
        ImageFiles(names, folder=root), labels, classes, Path(root).name, root, skipped=skipped
    )


def _entries_of(
    root: str, folder: str, already_read: set[tuple[int, int]], skipped: Counter[str]
) -> list[os.DirEntry[str]]:
    """The entries of a folder below the root, the last name first. A folder that is among those
    `already_read`, or cannot be read, has none and is counted in `skipped`; if the root cannot be
    read, that is an error."""
    path = os.path.join(root, folder)
    try:
        status = os.stat(path)
        identity = (status.st_dev, status.st_ino)
        if identity in already_read:
            skipped["a link to a folder met before"] += 1
            return []
        already_read.add(identity)
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name, reverse=True)
    except OSError:
        is_root = not folder
        if is_root:
            raise
        skipped["a folder that cannot be read"] += 1
        return []


def _kind(entry: os.DirEntry[str]) -> str:
    """``"image"``, ``"folder"``, ``"link"`` to a folder, or why the entry is skipped."""
    if entry.name.startswith("."):
        return "hidden"
    is_image = os.path.splitext(entry.name)[1].lower() in EXTENSIONS
    kind = "image" if is_image else "without the ending of an image"
    try:
        mode = entry.stat().st_mode
    except OSError:
        # A link to nothing, or to itself.
        return kind
    if stat.S_ISDIR(mode):
        return "link" if entry.is_symlink() else "folder"
    return kind if stat.S_ISREG(mode) else "neither a file nor a folder"


def describe_skipped(skipped: Mapping[str, int]) -> str:
    """The entries that were skipped, as the end of a sentence; "" if there were none.

    >>> describe_skipped({"hidden": 3})
    '; skipped: 3 hidden'
    """
    if not skipped:
        return ""
    counts = [f"{count:,} {reason}" for reason, count in skipped.items()]
    return f"; skipped: {', '.join(counts)}"


class Drafts(Sequence[Picture]):
    """Image files as drafts whose sides have at least `least_side` pixels."""

    def __init__(self, files: ImageFiles, least_side: int) -> None:
        self.files = files
        self.least_side = least_side

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Any) -> Any:
        return self.files.draft(index, self.least_side)


def _sha256(text: str, more: bytes = b"") -> str:
    return hashlib.sha256(text.encode() + more).hexdigest()


def spread_evenly(count: int, total: int) -> NDArray[np.int64]:
    """(count,) places among `total`, spread evenly, the same in every run.

    >>> spread_evenly(3, 10)
    array([0, 3, 6])
    """
    return np.arange(count) * total // count


def cut(rows: range, size: int) -> list[range]:
    """The rows in runs of `size`, the last one perhaps shorter.

    >>> cut(range(10, 15), 2)
    [range(10, 12), range(12, 14), range(14, 15)]
    """
    return [rows[start : start + size] for start in range(0, len(rows), size)]
