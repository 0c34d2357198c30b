"""Training features set aside on disk, so that a detector of several passes costs the network one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from fdbd.core.batch import Batch

_ROWS = 4096


class Spool:
    """Batches written to a temporary folder and read back as memory maps, any number of times.

    >>> with Spool() as spool:
    ...     spool.append(Batch(torch.ones(3, 2)))
    ...     [batch.features.shape for batch in spool]
    [torch.Size([3, 2])]
    """

    def __init__(self) -> None:
        # Windows keeps files that are mapped
        self._folder = tempfile.TemporaryDirectory(prefix="fdbd-spool-", ignore_cleanup_errors=True)
        self._columns: dict[str, _Column] = {}
        self._layers: list[str] = []

    def append(self, batch: Batch) -> None:
        """Write a batch; every batch has the same parts."""
        self._layers = list(batch.layers or {})
        given = {"features": batch.features, "logits": batch.logits, "labels": batch.labels}
        given.update({f"layer{i}": (batch.layers or {})[name] for i, name in enumerate(self._layers)})
        # Views are (V, N, P): samples first, so that rows can be appended.
        given["views"] = None if batch.views is None else batch.views.transpose(0, 1)
        parts = {name: part for name, part in given.items() if part is not None}
        if not self._columns:
            self._columns = {name: _Column(Path(self._folder.name) / name, part) for name, part in parts.items()}
        if set(parts) != set(self._columns):
            raise ValueError(
                f"a batch has {', '.join(parts)}, the first one {', '.join(self._columns)}: give every batch the same"
            )
        rows = {name: len(part) for name, part in parts.items()}
        if len(set(rows.values())) > 1:
            raise ValueError(f"the parts of a batch have different numbers of rows: {rows}; give one row per sample")
        for name, part in parts.items():
            self._columns[name].append(part)

    def __iter__(self) -> Iterator[Batch]:
        columns = {name: column.read() for name, column in self._columns.items()}
        rows = len(columns["features"]) if columns else 0
        for start in range(0, rows, _ROWS):
            piece = {name: torch.from_numpy(np.array(part[start : start + _ROWS])) for name, part in columns.items()}
            layers = {name: piece[f"layer{i}"] for i, name in enumerate(self._layers)} or None
            views = piece["views"].transpose(0, 1) if "views" in piece else None
            yield Batch(piece["features"], piece.get("logits"), piece.get("labels"), layers, views)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        for column in self._columns.values():
            column.file.close()
        self._folder.cleanup()


class _Column:
    """Rows of one shape, appended to a file."""

    def __init__(self, path: Path, example: Tensor) -> None:
        self.path = path
        self.shape = tuple(example.shape[1:])
        self.dtype = _storable(example).numpy().dtype
        self.rows = 0
        self.file = path.open("wb")

    def append(self, part: Tensor) -> None:
        rows = _storable(part).numpy().astype(self.dtype, copy=False)
        if rows.shape[1:] != self.shape:
            raise ValueError(f"a batch has rows of shape {rows.shape[1:]}, those before it {self.shape}")
        self.file.write(np.ascontiguousarray(rows).data)
        self.rows += rows.shape[0]

    def read(self) -> Any:
        self.file.flush()
        if not self.rows:
            return np.zeros((0, *self.shape), self.dtype)
        return np.memmap(self.path, self.dtype, mode="r", shape=(self.rows, *self.shape))


def _storable(part: Tensor) -> Tensor:
    part = part.detach().cpu()
    return part.float() if part.dtype in (torch.float16, torch.bfloat16) else part
