"""The feature cache: one forward pass per (model, dataset, preprocessing), ever.

Features are written in shards as they come, so a killed run resumes, and end up in one memory-mapped array. Logits are
not stored: they are the head's, recomputed from the features.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fdbd.bench.cache_entry import EntryFolder
from fdbd.bench.extraction import Extractor, Progress, extract
from fdbd.core.batch import Batch, Head
from fdbd.data.datasets.collection import Images
from fdbd.data.decoding import Failure
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


@dataclass(frozen=True)
class Entry:
    """One cached (model, dataset, preprocessing), as `FeatureCache.list` shows it."""

    key: str
    model: str
    dataset: str
    dtype: str
    rows: int
    """Images in the dataset."""
    rows_done: int
    num_bytes: int
    created: str
    path: Path

    @property
    def is_complete(self) -> bool:
        return self.rows_done == self.rows


class CachedFeatures:
    """Features of one dataset under one model.

    Attributes:
        name: the dataset's name.
        features: (N, P) tensor over a memory map; writing to it changes memory only.
        labels: (N,) int64, or None where the dataset has none.
        layers: pooled earlier layers by name, (N, P_layer), or None.
        rows: (N,) positions of the samples in the dataset: all but the failures.
        failures: images that could not be decoded; they are counted and left out.
        head: the classifier's head, as it was.
        num_computed: images that went through the network in this call; 0: all came from the cache.
    """

    def __init__(
        self,
        name: str,
        arrays: Mapping[str, Tensor],
        labels: Tensor | None,
        rows: Tensor,
        failures: Sequence[Failure],
        head: Head,
        num_computed: int,
    ) -> None:
        self.name = name
        self.features = arrays["features"]
        layers = {key.removeprefix("layer:"): array for key, array in arrays.items() if key.startswith("layer:")}
        self.layers = layers or None
        self.labels = labels
        self.rows = rows
        self.failures = tuple(failures)
        self.head = head
        self.num_computed = num_computed

    def __len__(self) -> int:
        return len(self.features)

    @cached_property
    def logits(self) -> Tensor:
        """(N, C) float32, from the head, in memory."""
        return torch.cat(
            [self.head(self.features[start : start + 8192].float()) for start in range(0, len(self), 8192)]
        )

    def batches(self, size: int = 8192) -> Iterator[Batch]:
        """The samples in order as float32 batches of at most `size`, with logits, and labels where there are some."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            batch = Batch(self.features, None, self.labels, self.layers).rows(part).to(dtype=torch.float32)
            yield batch._replace(logits=self.head(batch.features))

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()


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
        workers: int | None = None,
    ) -> CachedFeatures:
        """Features of `images`: from the cache, and from the network for what is not there or is damaged.

        Args:
            classifier: `fdbd.Classifier`, or anything like it: images in, Batch out, with ``.head`` and ``.model``.
            images: the dataset.
            preprocess: from its images to the network's input.
            batch_size: images per forward pass; a function is called only where the network has to run.
            dtype: ``"float32"`` or ``"float16"``, of what is stored.
            progress: called with the images done and in all, after each batch.
            workers: threads that decode image files; default: one per core.

        Raises:
            ValueError: when no image can be decoded, or a feature does not fit into float16.
        """
        if dtype not in ("float32", "float16"):
            raise ValueError(f"dtype is {dtype!r}, expected 'float32' or 'float16'")
        if isinstance(batch_size, int) and batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, expected at least 1")
        if not len(images):
            raise ValueError(f"{images.name} holds no image")
        head = Head(classifier.head.weight.clone(), classifier.head.bias.clone()).cpu()
        model = model_key(classifier)
        parts = (str(FORMAT), model, images.content_key(), preprocess.key(), dtype, str(self.shard_rows))
        key = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]
        folder = EntryFolder(self.root / key)
        with self._locked(key) as is_locked:
            if is_locked:
                folder.clean()
            if folder.about() is None:
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
                write_json(folder.path / "about.json", about)
            num_shards = -(-len(images) // self.shard_rows)
            shards = folder.open_shards()
            missing = [number for number in range(num_shards) if number not in shards]
            num_computed = 0
            size = batch_size if isinstance(batch_size, int) else batch_size() if missing else 1
            for shard in extract(
                classifier,
                images,
                preprocess,
                missing,
                self.shard_rows,
                batch_size=size,
                dtype=dtype,
                progress=progress,
                workers=workers,
            ):
                folder.write_shard(*shard)
                num_computed += len(shard.arrays["features"])
            if progress is not None and not missing:
                progress(len(images), len(images))
            if missing or not folder.is_packed:
                folder.pack(num_shards)
            arrays, failures = folder.read()
        return _collect(images, arrays, failures, head, num_computed)

    def verify(self) -> tuple[Problem, ...]:
        """Reads every byte and strikes off what is damaged, so that the next `features` computes it again.

        Entries that another run is writing to are passed over.
        """
        problems: list[Problem] = []
        for entry in self.list():
            with lock(self._lock_path(entry.key), wait=False) as is_locked:
                if is_locked is not False:
                    folder = EntryFolder(entry.path)
                    folder.open_shards()
                    problems += [Problem(entry.key, number, reason) for number, reason in folder.problems]
        return tuple(problems)

    def clear(self, keys: Iterable[str] | None = None) -> int:
        """Removes entries (default: all) that no run is writing to, and returns the bytes freed."""
        wanted = None if keys is None else set(keys)
        freed = 0
        for entry in self.list():
            if wanted is None or entry.key in wanted:
                with lock(self._lock_path(entry.key), wait=False) as is_locked:
                    if is_locked is not False:
                        shutil.rmtree(entry.path, ignore_errors=True)
                        freed += entry.num_bytes
        return freed

    def list(self) -> tuple[Entry, ...]:
        """All entries, complete or not, oldest first."""
        found = []
        for path in self.root.iterdir() if self.root.is_dir() else ():
            folder = EntryFolder(path)
            about = folder.about()
            if about is not None:
                entry = Entry(
                    key=path.name,
                    model=about["model"],
                    dataset=about["dataset"],
                    dtype=about["dtype"],
                    rows=about["rows"],
                    rows_done=min(about["rows"], folder.count_shards() * about["shard_rows"]),
                    num_bytes=sum(file.stat().st_size for file in path.iterdir()),
                    created=about["created"],
                    path=path,
                )
                found.append(entry)
        return tuple(sorted(found, key=lambda entry: (entry.created, entry.key)))

    def _lock_path(self, key: str) -> Path:
        return self.root / ".locks" / key

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[bool | None]:
        """The entry's lock, waiting for whoever has it, and saying so."""
        with lock(self._lock_path(key), wait=False) as is_locked:
            if is_locked is not False:
                yield is_locked
                return
        log.info("another run computes the same features; waiting for it")
        with lock(self._lock_path(key)) as is_locked:
            yield is_locked


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


def _collect(
    images: Images, arrays: Mapping[str, Tensor], failures: Sequence[Failure], head: Head, num_computed: int
) -> CachedFeatures:
    rows = np.setdiff1d(np.arange(len(images)), [failure.row for failure in failures])
    if not len(rows):
        raise ValueError(f"none of the {len(images)} images of {images.name} can be decoded: {failures[0].reason}")
    if failures:
        log.warning("%s: %d of %d images are left out: %s", images.name, len(failures), len(images), failures[0].reason)
    labels = None if images.labels is None else torch.from_numpy(images.labels[rows])
    return CachedFeatures(images.name, arrays, labels, torch.from_numpy(rows), failures, head, num_computed)
