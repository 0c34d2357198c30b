"""The feature cache: one forward pass per (model, dataset, preprocessing), ever.

Features are written in shards as they come, so a killed run resumes, into one array that is memory-mapped. Logits are
not stored: they are the head's, recomputed from the features.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fdbd.bench.cache_entry import EntryFolder
from fdbd.bench.extraction import Extractor, Progress, extract
from fdbd.data.decoding import Failure
from fdbd.data.feature_set import FeatureSet
from fdbd.data.images import Images, cut
from fdbd.data.preprocessing import Preprocess
from fdbd.util.files import cache_root, lock, write_json

log = logging.getLogger(__name__)

SHARD_ROWS = 2048
FORMAT = 1
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class Problem(NamedTuple):
    """A shard whose bytes are not those that were written; it is computed again when it is next asked for."""

    key: str
    shard: int | None
    reason: str


class Entry(NamedTuple):
    """One cached (model, dataset, preprocessing), as `FeatureCache.list` shows it."""

    key: str
    path: Path
    rows_done: int
    num_bytes: int
    model: str
    dataset: str
    dtype: str
    rows: int
    """Images in the dataset."""
    created: str

    @property
    def is_complete(self) -> bool:
        return self.rows_done == self.rows


@dataclass(frozen=True, kw_only=True)
class CachedFeatures(FeatureSet):
    """Features of one dataset under one model, over a memory map: writing to them changes memory only."""

    positions: Tensor
    """(N,) positions of the samples in the dataset: all but the failures."""
    failures: tuple[Failure, ...]
    """Images that could not be decoded; they are counted and left out."""
    num_computed: int
    """Images that went through the network in this call; 0: all came from the cache."""


class FeatureCache:
    """Features on disk, keyed by the weights' content, the data's content and the preprocessing.

    A run that is killed loses at most one shard. Two runs that want the same features do each other no harm: the second
    waits and finds them done. Checksums are compared whenever features are read (0.2 s for 100 MB), and a damaged shard
    is computed again.

    Args:
        root: the folder; default: ``features`` in the cache folder (``FDBD_CACHE``, or ``~/.cache/fdbd``).
        shard_rows: images per shard.
    """

    def __init__(self, root: str | Path | None = None, *, shard_rows: int = SHARD_ROWS) -> None:
        if shard_rows < 1:
            raise ValueError(f"shard_rows is {shard_rows}, expected at least 1")
        self.root = Path(root).expanduser() if root is not None else cache_root() / "features"
        self.shard_rows = shard_rows

    def features(
        self,
        classifier: Extractor,
        images: Images,
        preprocess: Preprocess,
        *,
        batch_size: int | Callable[[], int] = 128,
        dtype: str = "float32",
        progress: Progress | None = None,
    ) -> CachedFeatures:
        """Features of `images`: from the cache, and from the network for what is not there or is damaged.

        Args:
            classifier: `fdbd.Classifier`, or anything like it: images in, Batch out, with ``.head`` and ``.model``.
            images, preprocess: the dataset, and the way from its images to the network's input.
            batch_size: images per forward pass; a function is called only where the network has to run.
            dtype: ``"float32"`` or ``"float16"``, of what is stored.
            progress: called with the images done and in all, after each batch.

        Raises:
            ValueError: when no image can be decoded, or a feature does not fit into float16.
        """
        if dtype not in ("float32", "float16"):
            raise ValueError(f"dtype is {dtype!r}, expected 'float32' or 'float16'")
        if isinstance(batch_size, int) and batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, expected at least 1")
        if not len(images):
            raise ValueError(f"{images.name} holds no image")
        model = model_key(classifier)
        about = {
            "format": FORMAT,
            "model": f"{type(classifier.model).__name__} {model[:12]}",
            "dataset": images.name,
            "rows": len(images),
            "shard_rows": self.shard_rows,
            "dtype": dtype,
            "preprocess": preprocess.to_dict(),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        parts = (str(FORMAT), model, images.content_key(), preprocess.key(), dtype, str(self.shard_rows))
        key = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]
        with lock(self._lock_path(key)) as is_locked:
            folder = EntryFolder(self.root / key)
            if is_locked:
                folder.clean()
            if folder.about() is None:
                write_json(folder.path / "about.json", about)
            for number, reason in folder.check():
                log.warning("feature cache %s, shard %s: %s; it is computed again", key, number, reason)
            shards = cut(range(len(images)), self.shard_rows)
            missing = folder.missing(len(shards))
            num_computed = 0
            if missing:
                size = batch_size if isinstance(batch_size, int) else batch_size()
                chosen = [shards[number] for number in missing]
                found = extract(classifier, images, preprocess, chosen, size, dtype, progress)
                for number, (arrays, failures) in zip(missing, found):
                    folder.write(number, arrays, failures, len(images))
                    num_computed += len(arrays["features"])
            elif progress is not None:
                progress(len(images), len(images))
            return _collect(images, folder, num_computed)

    def verify(self) -> tuple[Problem, ...]:
        """Reads every byte and strikes off what is damaged, so that the next `features` computes it again.

        Entries that another run is writing to are passed over.
        """
        return tuple(Problem(e.key, *problem) for e in self._unused() for problem in EntryFolder(e.path).check())

    def clear(self, keys: Iterable[str] | None = None) -> int:
        """Removes entries (default: all) that no run is writing to, and returns the bytes freed."""
        freed = 0
        for entry in self._unused(keys):
            shutil.rmtree(entry.path, ignore_errors=True)
            freed += entry.num_bytes
        return freed

    def list(self) -> tuple[Entry, ...]:
        """All entries, complete or not, oldest first."""
        found = []
        for path in self.root.iterdir() if self.root.is_dir() else ():
            folder = EntryFolder(path)
            if (about := folder.about()) is not None:
                num_done = len(folder.shards) - len(folder.missing(len(folder.shards)))
                rows_done = min(about["rows"], num_done * about["shard_rows"])
                num_bytes = sum(file.stat().st_size for file in path.iterdir())
                described = {name: about[name] for name in ("model", "dataset", "dtype", "rows", "created")}
                found.append(Entry(path.name, path, rows_done, num_bytes, **described))
        return tuple(sorted(found, key=lambda entry: (entry.created, entry.key)))

    def _unused(self, keys: Iterable[str] | None = None) -> Iterator[Entry]:
        """Entries (default: all), each locked while it is worked on, without those that another run has."""
        wanted = None if keys is None else set(keys)
        for entry in self.list():
            if wanted is None or entry.key in wanted:
                with lock(self._lock_path(entry.key), wait=False) as is_locked:
                    if is_locked is not False:
                        yield entry

    def _lock_path(self, key: str) -> Path:
        return self.root / ".locks" / key


def model_key(classifier: Extractor) -> str:
    """SHA-256 of what decides a model's features: weights, buffers, structure, head, layers and precision."""
    model = classifier.model
    names: tuple[object, ...] = (getattr(classifier, "head_name", ""), getattr(classifier, "layer_names", ()))
    if (autocast := getattr(classifier, "autocast", None)) is not None:
        names += (autocast,)
    # Modules print their settings (strides, activations), which are not in the weights.
    digest = hashlib.sha256(f"{type(model).__qualname__} {names} {_ADDRESS.sub('', repr(model))}".encode())
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        values = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{name} {values.dtype} {tuple(tensor.shape)}".encode())
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _collect(images: Images, folder: EntryFolder, num_computed: int) -> CachedFeatures:
    arrays, failures = folder.read()
    rows = np.setdiff1d(np.arange(len(images)), [failure.row for failure in failures])
    if not len(rows):
        raise ValueError(f"none of the {len(images)} images of {images.name} can be decoded: {failures[0].reason}")
    if failures:
        log.warning("%s: %d of %d images are left out: %s", images.name, len(failures), len(images), failures[0].reason)
    layers = {key.removeprefix("layer:"): array for key, array in arrays.items() if key != "features"}
    return CachedFeatures(
        name=images.name,
        features=arrays["features"],
        labels=None if images.labels is None else torch.from_numpy(images.labels[rows]),
        samples=f"images {images.content_key()[:32]}, {len(rows)}",
        layers=layers or None,
        images=images.subset(rows) if failures else images,
        positions=torch.from_numpy(rows),
        failures=tuple(failures),
        num_computed=num_computed,
    )
