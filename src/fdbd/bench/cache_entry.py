"""The files of one entry of the feature cache: shards while they are computed, then one memory map per array.

``about.json`` says what the entry is. ``shard-000003.safetensors`` carries its own checksums. ``manifest.json`` appears
last: it names the packed arrays and holds the checksums of their parts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fdbd.data.decoding import Failure
from fdbd.util.files import beside, is_draft, read_json, sha256_of_array, write_bytes, write_json

log = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]

_SHARD = re.compile(r"shard-(\d{6,})\.safetensors")
_ABOUT = ("rows", "shard_rows", "dtype", "model", "dataset", "created")


class Shard(NamedTuple):
    """A shard whose checksums are right."""

    load: Callable[[], Arrays]
    num_rows: int
    failures: list[Failure]
    sha256: dict[str, str]


class EntryFolder:
    """One entry's files.

    Attributes:
        problems: damaged shards that `open_shards` struck off: number (None: all of them) and reason.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[tuple[int | None, str]] = []
        self._manifest = path / "manifest.json"

    @property
    def is_packed(self) -> bool:
        return self._manifest.exists()

    def about(self) -> dict[str, Any] | None:
        """What the entry is; None where `path` is no entry."""
        about = read_json(self.path / "about.json")
        return about if isinstance(about, dict) and all(key in about for key in _ABOUT) else None

    def clean(self) -> None:
        """Removes what a killed run left half-written. Only for the holder of the lock."""
        for path in self.path.iterdir() if self.path.is_dir() else ():
            if is_draft(path):
                path.unlink(missing_ok=True)

    def count_shards(self) -> int:
        """Shards that are there, by name; nothing is read."""
        manifest = read_json(self._manifest)
        records = manifest.get("shards", ()) if isinstance(manifest, dict) else ()
        packed = {number for number, record in enumerate(records) if not record.get("is_damaged")}
        matches = (_SHARD.fullmatch(path.name) for path in self.path.iterdir())
        return len(packed | {int(match[1]) for match in matches if match})

    def open_shards(self) -> dict[int, Shard]:
        """All shards by number. Every byte is read; damaged ones are struck off, and noted in `problems`."""
        self.problems = []
        shards = self._packed_shards()
        for path in sorted(self.path.glob("shard-*.safetensors")):
            match = _SHARD.fullmatch(path.name)
            if match is None or int(match[1]) in shards:
                continue
            try:
                shards[int(match[1])] = _open_shard(path)
            except Exception as error:  # whatever a damaged file makes its reader raise
                self.problems.append((int(match[1]), f"{path.name} is damaged ({_one_line(error)})"))
                path.unlink(missing_ok=True)
        for number, reason in self.problems:
            log.warning("feature cache %s, shard %s: %s; it is computed again", self.path.name, number, reason)
        return shards

    def _packed_shards(self) -> dict[int, Shard]:
        if not self.is_packed:
            return {}
        try:
            manifest = json.loads(self._manifest.read_bytes())
            records = manifest["shards"]
            arrays = {name: np.load(self.path / file, mmap_mode="r") for name, file in manifest["arrays"].items()}
            counts = [record["count"] for record in records]
            if any(len(array) != sum(counts) for array in arrays.values()):
                raise ValueError("arrays and manifest do not agree")
        except (OSError, ValueError, KeyError, TypeError, EOFError, AttributeError) as error:
            self.problems.append((None, f"manifest or arrays are damaged ({_one_line(error)})"))
            self._manifest.unlink(missing_ok=True)
            return {}
        shards = {}
        has_news = False
        start = 0
        for number, record in enumerate(records):
            rows = {name: array[start : start + record["count"]] for name, array in arrays.items()}
            start += record["count"]
            if record.get("is_damaged"):
                continue
            if all(sha256_of_array(rows[name]) == record["sha256"][name] for name in rows):
                failures = [Failure(*failure) for failure in record["failures"]]
                shards[number] = Shard(partial(dict, rows), record["count"], failures, record["sha256"])
            else:
                self.problems.append((number, "its checksum is wrong"))
                record["is_damaged"] = has_news = True
        if has_news:
            write_json(self._manifest, manifest)
        return shards

    def write_shard(self, number: int, arrays: Arrays, failures: Sequence[Failure]) -> None:
        """Adds a shard; it appears whole."""
        from safetensors.numpy import save

        path = self.path / f"shard-{number:06d}.safetensors"
        about = {"sha256": {name: sha256_of_array(array) for name, array in arrays.items()}, "failures": list(failures)}
        write_bytes(path, save(arrays, metadata={"fdbd": json.dumps(about)}))

    def pack(self, count: int) -> None:
        """Puts all `count` shards into one array a name, then removes the shard files.

        Raises:
            OSError: when a shard that was just written cannot be read back.
        """
        shards = self.open_shards()
        if sorted(shards) != list(range(count)):
            raise OSError(f"the feature cache in {self.path} loses what is written to it; check the disk")
        ordered = [shards[number] for number in range(count)]
        total = sum(shard.num_rows for shard in ordered)
        token = secrets.token_hex(4)
        files: dict[str, str] = {}
        with contextlib.ExitStack() as drafts:
            outputs: Arrays = {}
            for name, first in ordered[0].load().items():
                files[name] = f"{re.sub(r'[^A-Za-z0-9_.]', '_', name)}-{len(files)}-{token}.npy"
                draft = drafts.enter_context(beside(self.path / files[name]))
                shape = (total, *first.shape[1:])
                outputs[name] = np.lib.format.open_memmap(draft, mode="w+", dtype=first.dtype, shape=shape)
            start = 0
            for shard in ordered:
                for name, array in shard.load().items():
                    outputs[name][start : start + shard.num_rows] = array
                start += shard.num_rows
            outputs.clear()  # closes the files
        records = [{"count": shard.num_rows, "failures": shard.failures, "sha256": shard.sha256} for shard in ordered]
        # From here on the new arrays count, and the old ones and the shard files are waste.
        write_json(self._manifest, {"arrays": files, "shards": records})
        for path in self.path.iterdir():
            if _SHARD.fullmatch(path.name) or (path.suffix == ".npy" and path.name not in files.values()):
                with contextlib.suppress(OSError):  # Windows keeps a file that another run has mapped
                    path.unlink()

    def read(self) -> tuple[dict[str, Tensor], list[Failure]]:
        """The packed arrays as tensors over memory maps (written to in memory only), and all failures."""
        manifest = read_json(self._manifest)
        arrays = {
            name: torch.from_numpy(np.load(self.path / file, mmap_mode="c"))
            for name, file in manifest["arrays"].items()
        }
        return arrays, [Failure(*failure) for record in manifest["shards"] for failure in record["failures"]]


def _open_shard(path: Path) -> Shard:
    about = json.loads(_metadata(path)["fdbd"])
    arrays = _load_shard(path)
    if {name: sha256_of_array(array) for name, array in arrays.items()} != about["sha256"]:
        raise ValueError("its checksum is wrong")
    failures = [Failure(*failure) for failure in about["failures"]]
    return Shard(partial(_load_shard, path), len(arrays["features"]), failures, about["sha256"])


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        return dict(file.metadata())


def _load_shard(path: Path) -> Arrays:
    from safetensors.numpy import load_file

    return dict(load_file(path))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
