"""The feature cache: one forward pass per (model, dataset, preprocessing), ever.

Logits are not stored: they are the head's, recomputed from the features. In the folder of an entry,
``about.json`` says what it is; each array is one file that is memory-mapped; ``manifest.json``
names these files and has one record per shard, in order: its rows, its failures, and the checksum
of its part of each array. A shard counts once its record is written, so a killed run resumes.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fdbd.core.configuration import expect
from fdbd.core.preprocessing import Preprocess
from fdbd.data.decoder_process import Failure
from fdbd.data.decoding import prepare
from fdbd.data.features import FeatureSet
from fdbd.data.images import Images, cut
from fdbd.networks.classifier import Classifier
from fdbd.util.devices import device_of
from fdbd.util.files import beside, cache_root, lock, read_json, sha256_of_array, write_json
from fdbd.util.terminal import one_line

log = logging.getLogger(__name__)

SHARD_ROWS = 2048
DTYPE = "float32"
FORMAT = 1
_SHOWN = ("model", "dataset", "dtype", "rows", "created")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
Arrays = dict[str, NDArray[Any]]
Progress = Callable[[int, int], None]
"""Called with the images done so far, and in all."""
Say = Callable[[str], None]


class DamagedShard(NamedTuple):
    """A shard whose bytes are not those that were written, or None for all of an entry; it is
    computed again when it is next asked for."""

    key: str
    shard: int | None
    reason: str


class Entry(NamedTuple):
    """One cached (model, dataset, preprocessing), as `FeatureCache.list` shows it; `rows` are those
    of the dataset."""

    key: str
    path: Path
    rows_done: int
    num_bytes: int
    model: str
    dataset: str
    dtype: str
    rows: int
    created: str

    @property
    def is_complete(self) -> bool:
        return self.rows_done == self.rows


@dataclass(frozen=True, kw_only=True)
class CachedFeatures(FeatureSet):
    """Features of one dataset under one model, over a memory map: writing to them changes memory
    only."""

    positions: Tensor
    """(N,) positions of the samples in the dataset: all but the failures."""
    failures: tuple[Failure, ...]
    """Images that could not be decoded; they are counted and left out."""
    num_computed: int
    """Images that went through the network in this call; 0: all came from the cache."""


class FeatureCache:
    """Features on disk, keyed by the weights' content, the data's content and the preprocessing.

    A run that is killed loses at most one shard. Two runs that want the same features do each other
    no harm: the second waits and finds them done. Checksums are compared whenever features are read
    (0.2 s for 100 MB), and a damaged shard is computed again.

    Args:
        root: the folder; default: ``features`` in the cache folder (``FDBD_CACHE``, or
            ``~/.cache/fdbd``).
        shard_rows: images per shard.
    """

    def __init__(self, root: str | Path | None = None, *, shard_rows: int = SHARD_ROWS) -> None:
        self.shard_rows = expect("shard_rows", shard_rows, shard_rows >= 1, "at least 1")
        self.root = Path(root).expanduser() if root is not None else cache_root() / "features"

    def features(
        self,
        classifier: Classifier,
        images: Images,
        preprocess: Preprocess,
        *,
        batch_size: int | Callable[[], int] = 128,
        progress: Progress | None = None,
        waiting: Say | None = None,
    ) -> CachedFeatures:
        """Features of `images`, from the cache. What is missing there, or damaged, comes from the
        network.

        Args:
            classifier: `fdbd.Classifier`, or anything like it: images in, Batch out, with ``.head``
                and ``.model``.
            images, preprocess: the dataset, and the way from its images to the network's input.
            batch_size: images per forward pass; a function is called only if the network has to
                run.
            progress: called with the images done and in all, after each batch.
            waiting: called with one line if another run is computing the same features, for which
                this one then waits; default: the line is logged.

        Raises:
            ValueError: when no image can be decoded.
            OSError: when what was written cannot be read back.
        """
        expect("batch_size", batch_size, callable(batch_size) or batch_size >= 1, "at least 1")
        if not len(images):
            raise ValueError(f"{images.name} holds no image")
        model = model_key(classifier)
        about = self._about(classifier, model, images, preprocess)
        key = self._key(model, images, preprocess)
        report = progress or (lambda done, total: None)
        with self._locked(key, images.name, waiting or log.warning) as is_locked:
            folder = self._opened(key, about, is_locked)
            shards = cut(range(len(images)), self.shard_rows)
            missing = folder.missing(len(shards))
            if not missing:
                report(len(images), len(images))
                return folder.read(images, num_computed=0)
            if callable(batch_size):
                batch_size = batch_size()
            ranges = [shards[number] for number in missing]
            found = _extract(classifier, images, preprocess, ranges, batch_size, report)
            num_computed = 0
            for number, (arrays, failures) in zip(missing, found):
                folder.write(number, arrays, failures, len(images))
                num_computed += len(arrays["features"])
            # Without a lock, the damage may be that another run wrote to the same files.
            if is_locked and folder.check():
                raise OSError(
                    f"the feature cache in {folder.path} loses what is written to it: check the "
                    "disk, and run the command again"
                )
            return folder.read(images, num_computed)

    def _about(
        self, classifier: Classifier, model: str, images: Images, preprocess: Preprocess
    ) -> dict[str, Any]:
        """What an entry says of itself."""
        return {
            "format": FORMAT,
            "model": f"{type(classifier.model).__name__} {model[:12]}",
            "dataset": images.name,
            "rows": len(images),
            "shard_rows": self.shard_rows,
            "dtype": DTYPE,
            "preprocess": preprocess.to_dict(),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def _key(self, model: str, images: Images, preprocess: Preprocess) -> str:
        """The name of an entry, which follows from everything that its features depend on."""
        parts = (
            str(FORMAT),
            model,
            images.content_key,
            preprocess.key(),
            DTYPE,
            str(self.shard_rows),
        )
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]

    @contextlib.contextmanager
    def _locked(self, key: str, name: str, waiting: Say) -> Iterator[bool | None]:
        """Hold the entry's lock; `waiting` is called if another run has it. None: this file system
        has no locks."""
        with lock(self._lock_path(key), wait=False) as is_locked:
            if is_locked is not False:
                yield is_locked
                return
        waiting(f"another run is computing the features of {name}; waiting for it")
        with lock(self._lock_path(key)) as is_locked:
            yield is_locked

    def _opened(self, key: str, about: dict[str, Any], is_locked: bool | None) -> _EntryFolder:
        """The folder of an entry, without what a killed run left behind and without damage."""
        folder = _EntryFolder(self.root / key)
        if is_locked:
            for draft in folder.path.glob(".*"):
                draft.unlink(missing_ok=True)
        if folder.about() is None:
            write_json(folder.path / "about.json", about)
        for number, reason in folder.check():
            log.warning("feature cache %s, shard %s: %s; it is computed again", key, number, reason)
        return folder

    def verify(self) -> tuple[DamagedShard, ...]:
        """Reads every byte and strikes off what is damaged, so that the next `features` computes it
        again.

        Entries that another run is writing to are skipped.
        """
        found = []
        for entry in self._unused():
            for number, reason in _EntryFolder(entry.path).check():
                found.append(DamagedShard(entry.key, number, reason))
        return tuple(found)

    def clear(self, keys: Iterable[str] | None = None) -> int:
        """Removes entries (default: all) that no run is writing to, and returns the bytes freed."""
        freed = 0
        wanted = None if keys is None else set(keys)
        for entry in self._unused():
            if wanted is None or entry.key in wanted:
                shutil.rmtree(entry.path, ignore_errors=True)
                freed += entry.num_bytes
        return freed

    def list(self) -> tuple[Entry, ...]:
        """All entries, complete or not, oldest first."""
        if not self.root.is_dir():
            return ()
        found = []
        for path in self.root.iterdir():
            folder = _EntryFolder(path)
            about = folder.about()
            if about is not None:
                found.append(_entry_of(path, folder, about))
        return tuple(sorted(found, key=lambda entry: (entry.created, entry.key)))

    def _unused(self) -> Iterator[Entry]:
        """All entries, each locked while it is worked on, without those that another run has."""
        for entry in self.list():
            with lock(self._lock_path(entry.key), wait=False) as is_locked:
                if is_locked is not False:
                    yield entry

    def _lock_path(self, key: str) -> Path:
        return self.root / ".locks" / key


def _entry_of(path: Path, folder: _EntryFolder, about: dict[str, Any]) -> Entry:
    """An entry as `FeatureCache.list` shows it."""
    num_done = len(folder.shards) - len(folder.missing(len(folder.shards)))
    return Entry(
        key=path.name,
        path=path,
        rows_done=min(about["rows"], num_done * about["shard_rows"]),
        num_bytes=sum(file.stat().st_size for file in path.iterdir()),
        model=about["model"],
        dataset=about["dataset"],
        dtype=about["dtype"],
        rows=about["rows"],
        created=about["created"],
    )


def model_key(classifier: Classifier) -> str:
    """SHA-256 of what decides a model's features: weights, buffers, structure, head, layers and
    precision."""
    model = classifier.model
    names: tuple[object, ...] = (
        getattr(classifier, "head_name", ""),
        getattr(classifier, "layer_names", ()),
    )
    autocast = getattr(classifier, "autocast", None)
    if autocast is not None:
        names += (autocast,)
    # Modules print their settings (strides, activations), which are not in the weights. Addresses
    # in memory, which some print, differ from run to run.
    structure = _ADDRESS.sub("", repr(model))
    digest = hashlib.sha256(f"{type(model).__qualname__} {names} {structure}".encode())
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        values = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{name} {values.dtype} {tuple(tensor.shape)}".encode())
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


class _EntryFolder:
    """One entry's files: `files` has the name of each array's file, `shards` the records of the
    manifest. A record whose sha256 is None stands for a shard that was damaged and is to be
    computed again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        manifest = read_json(path / "manifest.json")
        is_whole = isinstance(manifest, dict) and {"arrays", "shards"} <= set(manifest)
        self.files: dict[str, str] = manifest["arrays"] if is_whole else {}
        self.shards: list[dict[str, Any]] = manifest["shards"] if is_whole else []

    def about(self) -> dict[str, Any] | None:
        """What the entry is; None if `path` is not an entry."""
        about = read_json(self.path / "about.json")
        if not isinstance(about, dict) or not set(about) >= {*_SHOWN, "shard_rows"}:
            return None
        return about

    def missing(self, count: int) -> list[int]:
        """Which of `count` shards are to be computed."""
        found = []
        for number in range(count):
            if number >= len(self.shards) or self.shards[number]["sha256"] is None:
                found.append(number)
        return found

    def check(self) -> list[tuple[int | None, str]]:
        """Read every byte, and mark what is damaged as missing. Returns the number of each damaged
        shard (None: all of them) and what is wrong with it."""
        problems: list[tuple[int | None, str]] = []
        try:
            arrays = self._maps("r")
            end = 0
            for number, record in enumerate(self.shards):
                start = end
                end = start + record["count"]
                if any(len(array) < end for array in arrays.values()):
                    raise ValueError("arrays and manifest do not agree")
                sums = {name: sha256_of_array(array[start:end]) for name, array in arrays.items()}
                if record["sha256"] is not None and record["sha256"] != sums:
                    problems.append((number, "its checksum is wrong"))
                    record["sha256"] = None
        except (OSError, ValueError, KeyError, TypeError, EOFError, AttributeError) as error:
            problems = [(None, f"manifest or arrays are damaged ({one_line(error)})")]
            self.files = {}
            self.shards = []
        if problems:
            self._record()
        return problems

    def write(self, number: int, arrays: Arrays, failures: Sequence[Failure], rows: int) -> None:
        """Adds a shard, or replaces a damaged one, of an entry of at most `rows` rows.

        Raises:
            OSError: when a damaged shard is replaced and other images than before can be decoded.
        """
        if not self.files:
            self._create_files(arrays, rows)
        count = len(arrays["features"])
        if number < len(self.shards) and self.shards[number]["count"] != count:
            del self.shards[number:]
            self._record()
            raise OSError(
                f"other images can be read now than when {self.path} was written; run the command "
                "again"
            )
        start = sum(record["count"] for record in self.shards[:number])
        for name, whole in self._maps("r").items():
            bytes_per_row = whole[:1].nbytes
            # Not through the memory map, which would crash on a full disk.
            with open(self.path / self.files[name], "r+b") as file:
                file.seek(whole.offset + start * bytes_per_row)
                file.write(arrays[name].data)
                file.flush()
                os.fsync(file.fileno())
        sums = {name: sha256_of_array(array) for name, array in arrays.items()}
        self.shards[number : number + 1] = [
            {"count": count, "failures": list(failures), "sha256": sums}
        ]
        self._record()

    def _create_files(self, arrays: Arrays, rows: int) -> None:
        """One file per array, as long as all of the entry."""
        for name, array in arrays.items():
            self.files[name] = f"features-{len(self.files)}.npy"
            shape = (rows, *array.shape[1:])
            with beside(self.path / self.files[name]) as draft:
                np.lib.format.open_memmap(draft, mode="w+", dtype=array.dtype, shape=shape)

    def read(self, images: Images, num_computed: int) -> CachedFeatures:
        """The features of a complete entry."""
        failures = []
        for record in self.shards:
            failures += [Failure(*failure) for failure in record["failures"]]
        rows = np.setdiff1d(np.arange(len(images)), [failure.row for failure in failures])
        if not len(rows):
            raise ValueError(
                f"none of the {len(images)} images of {images.name} can be decoded: "
                f"{failures[0].reason}"
            )
        if failures:
            left_out = f"{len(failures)} of {len(images)} images are left out"
            log.warning("%s: %s: %s", images.name, left_out, failures[0].reason)
        arrays = {}
        layers = {}
        for name, array in self._maps("c").items():
            arrays[name] = torch.from_numpy(array[: len(rows)])
            if name != "features":
                layers[name.removeprefix("layer:")] = arrays[name]
        labels = None
        if images.labels is not None:
            labels = torch.from_numpy(images.labels[rows])
        return CachedFeatures(
            name=images.name,
            features=arrays["features"],
            labels=labels,
            samples=f"images {images.content_key[:32]}, {len(rows)}",
            layers=layers or None,
            images=images.subset(rows) if failures else images,
            positions=torch.from_numpy(rows),
            failures=tuple(failures),
            num_computed=num_computed,
        )

    def _maps(self, mode: Any) -> dict[str, Any]:
        return {
            name: np.load(self.path / file, mmap_mode=mode) for name, file in self.files.items()
        }

    def _record(self) -> None:
        write_json(self.path / "manifest.json", {"arrays": self.files, "shards": self.shards})


def _extract(
    classifier: Classifier,
    images: Images,
    preprocess: Preprocess,
    shards: Sequence[range],
    batch_size: int,
    report: Progress,
) -> Iterator[tuple[Arrays, list[Failure]]]:
    """Runs the network over shards, which are ranges of rows. Arrays are ``features`` (N, P) and
    ``layer:NAME`` (N, P_layer), without the rows that cannot be decoded."""
    done = len(images) - sum(len(shard) for shard in shards)
    # What an earlier run has left, so that a bar's rate counts from there.
    report(done, len(images))
    spans = [cut(shard, batch_size) for shard in shards]
    pin = device_of(classifier.model).type == "cuda"
    prepared = prepare(images.images, preprocess, list(itertools.chain(*spans)), pin=pin)
    with contextlib.closing(prepared):
        for spans_of_shard in spans:
            parts: list[Arrays] = []
            failures: list[Failure] = []
            # `prepared` gives one batch per span, in order.
            for batch in itertools.islice(prepared, len(spans_of_shard)):
                failures += batch.failures
                parts.append(_forward(classifier, batch.inputs, preprocess))
                done += len(batch.rows)
                report(done, len(images))
            arrays = {}
            for name in parts[0]:
                arrays[name] = np.concatenate([part[name] for part in parts])
            yield arrays, failures


def _forward(classifier: Classifier, inputs: Tensor, preprocess: Preprocess) -> Arrays:
    """The features and layers of a batch."""
    count = len(inputs)
    if not count:
        # One image all the same, for the number of features.
        inputs = torch.zeros(1, *preprocess.shape)
    with torch.inference_mode():
        batch = classifier(inputs)
    if batch.features.ndim != 2 or len(batch.features) != len(inputs):
        found = tuple(batch.features.shape)
        raise ValueError(
            f"the classifier gives features {found} for {len(inputs)} images, expected (N, P)"
        )
    layers = {f"layer:{key}": layer for key, layer in (batch.layers or {}).items()}
    tensors = {"features": batch.features, **layers}
    return {
        key: tensor[:count].float().cpu().contiguous().numpy() for key, tensor in tensors.items()
    }
