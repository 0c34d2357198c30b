"""The files of one entry of the feature cache: one array per name, filled shard by shard, and what is in them.

``about.json`` says what the entry is. ``manifest.json`` names the arrays and has one record per shard, in order: its
rows, its failures, and the checksum of its part of each array. A shard counts once its record is written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fdbd.data.decoding import Failure
from fdbd.util.files import beside, is_draft, read_json, sha256_of_array, write_json

Arrays = dict[str, NDArray[Any]]

_ABOUT = {"rows", "shard_rows", "dtype", "model", "dataset", "created"}


class EntryFolder:
    """One entry's files.

    Attributes:
        files: name of the file of each array.
        shards: the records of the manifest; one whose sha256 is None was damaged and is struck off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        manifest = read_json(path / "manifest.json")
        is_whole = isinstance(manifest, dict) and {"arrays", "shards"} <= set(manifest)
        self.files: dict[str, str] = manifest["arrays"] if is_whole else {}
        self.shards: list[dict[str, Any]] = manifest["shards"] if is_whole else []

    def about(self) -> dict[str, Any] | None:
        """What the entry is; None where `path` is no entry."""
        about = read_json(self.path / "about.json")
        return about if isinstance(about, dict) and set(about) >= _ABOUT else None

    def clean(self) -> None:
        """Removes what a killed run left half-written. Only for the holder of the lock."""
        for path in self.path.iterdir() if self.path.is_dir() else ():
            if is_draft(path):
                path.unlink(missing_ok=True)

    def missing(self, count: int) -> list[int]:
        """Which of `count` shards are to be computed."""
        return [k for k in range(count) if k >= len(self.shards) or self.shards[k]["sha256"] is None]

    def check(self) -> list[tuple[int | None, str]]:
        """Reads every byte and strikes off what is damaged: the number of each shard (None: all of them) and why."""
        problems: list[tuple[int | None, str]] = []
        try:
            arrays = self._open()
            end = 0
            for number, record in enumerate(self.shards):
                start, end = end, end + record["count"]
                if any(len(array) < end for array in arrays.values()):
                    raise ValueError("arrays and manifest do not agree")
                sums = {name: sha256_of_array(array[start:end]) for name, array in arrays.items()}
                if record["sha256"] is not None and record["sha256"] != sums:
                    problems.append((number, "its checksum is wrong"))
                    record["sha256"] = None
        except (OSError, ValueError, KeyError, TypeError, EOFError, AttributeError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            problems = [(None, f"manifest or arrays are damaged ({reason})")]
            self.files, self.shards = {}, []
        if problems:
            self._record()
        return problems

    def write(self, number: int, arrays: Arrays, failures: Sequence[Failure], rows: int) -> None:
        """Adds a shard, or replaces a damaged one, of an entry of at most `rows` rows.

        Raises:
            OSError: when a damaged shard is replaced and other images than before can be decoded.
        """
        if not self.files:
            self._create(arrays, rows)
        count = len(arrays["features"])
        if number < len(self.shards) and self.shards[number]["count"] != count:
            del self.shards[number:]
            self._record()
            raise OSError(f"other images can be read now than when {self.path} was written; run the command again")
        start = sum(record["count"] for record in self.shards[:number])
        for name, whole in self._open().items():
            with open(self.path / self.files[name], "r+b") as file:
                file.seek(whole.offset + start * whole[:1].nbytes)
                file.write(arrays[name].data)
                file.flush()
                os.fsync(file.fileno())
        sums = {name: sha256_of_array(array) for name, array in arrays.items()}
        self.shards[number : number + 1] = [{"count": count, "failures": list(failures), "sha256": sums}]
        self._record()

    def read(self) -> tuple[dict[str, Tensor], list[Failure]]:
        """The arrays as tensors over memory maps (written to in memory only), and all failures."""
        count = sum(record["count"] for record in self.shards)
        arrays = {name: torch.from_numpy(array[:count]) for name, array in self._open("c").items()}
        return arrays, [Failure(*failure) for record in self.shards for failure in record["failures"]]

    def _open(self, mode: Any = "r") -> dict[str, Any]:
        return {name: np.load(self.path / file, mmap_mode=mode) for name, file in self.files.items()}

    def _create(self, arrays: Arrays, rows: int) -> None:
        for name, array in arrays.items():
            self.files[name] = f"{re.sub(r'[^A-Za-z0-9_.]', '_', name)}-{len(self.files)}.npy"
            with beside(self.path / self.files[name]) as draft:
                np.lib.format.open_memmap(draft, mode="w+", dtype=array.dtype, shape=(rows, *array.shape[1:]))
        for path in self.path.glob("*.npy"):
            if path.name not in self.files.values():
                path.unlink(missing_ok=True)

    def _record(self) -> None:
        write_json(self.path / "manifest.json", {"arrays": self.files, "shards": self.shards})
