"""Features to fit on or to score, from Parquet or NPZ, in slices; rows that hold none are named one by one.

Both formats have ``features`` (N, P) and perhaps ``logits`` (N, C) and ``label`` (N,); in Parquet the first two are
lists, best of fixed size: those are read without a copy.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ..batch import Batch
from ..bench.extraction import cut
from ..extras import require
from .images import stamp
from .npz import NpzArray, array_names
from .rows import RowBatch

CHUNK_ROWS = 8192
"""Rows that are read and scored at once."""
ABSENT = "its features are null"


class FeatureRows(Protocol):
    """Features in a fixed order; their names are row numbers."""

    width: int
    """P."""
    key: str
    """Changes when the file is written anew."""
    source: str

    def __len__(self) -> int: ...

    def spans(self, size: int) -> list[range]:
        """All rows in runs of about `size` that are cheap to read apart."""

    def read(self, rows: range) -> Iterator[RowBatch]:
        """The rows of a span; their `Batch`es have labels where the file has. For any thread."""


def open_features(path: str | os.PathLike[str]) -> FeatureRows:
    """The features in a ``.parquet`` or ``.npz`` file."""
    return ParquetFeatures(path) if Path(path).suffix.lower() == ".parquet" else NpzFeatures(path)


def holds_features(data: str) -> bool:
    """Whether what a user typed is a file of features, and not of images."""
    path = Path(data).expanduser()
    if path.suffix.lower() == ".parquet":
        if not path.is_file():
            raise FileNotFoundError(f"no features at {data!r}: no such file")
        return True
    return path.suffix.lower() == ".npz" and path.is_file() and "features" in array_names(path)


class NpzFeatures:
    """Features in an NPZ file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.source, self.key = os.fspath(path), stamp([path])
        self._names = [name for name in ("features", "logits", "label") if name in array_names(path)]
        arrays = self._open()
        shape = arrays["features"].shape
        if len(shape) != 2 or any(len(array) != shape[0] for array in arrays.values()):
            shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            raise ValueError(f"{self.source} has {shapes}; expected features (N, P), logits (N, C) and label (N,)")
        self.width, self._len = shape[1], shape[0]

    def _open(self) -> dict[str, NpzArray]:
        return {name: NpzArray(self.source, name) for name in self._names}

    def __len__(self) -> int:
        return self._len

    def spans(self, size: int) -> list[range]:
        return cut(range(len(self)), size)

    def read(self, rows: range) -> Iterator[RowBatch]:
        arrays = self._open()
        for part in cut(rows, CHUNK_ROWS):
            found = {name: torch.from_numpy(array[part.start : part.stop].copy()) for name, array in arrays.items()}
            label = found.get("label")
            batch = Batch(found["features"], found.get("logits"), None if label is None else label.long())
            yield RowBatch(part, batch, {})


class ParquetFeatures:
    """Features in a Parquet file; a span is one or more row groups."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.source, self.key = os.fspath(path), stamp([path])
        file = self._open()
        names = file.schema_arrow.names
        if "features" not in names:
            raise ValueError(
                f"{self.source} has no column 'features' with lists of numbers; it has {', '.join(names) or 'none'}"
            )
        self._columns = [name for name in ("features", "logits", "label") if name in names]
        for name in self._columns[: 2 if "logits" in names else 1]:
            _check_list(file.schema_arrow.field(name), self.source)
        counts = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        self._starts = [0, *itertools.accumulate(counts)]
        self.width = self._find_width(file)

    def _open(self) -> Any:
        pa, parquet = require("pyarrow", "report"), require("pyarrow.parquet", "report")
        try:
            return parquet.ParquetFile(self.source, pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise ValueError(f"{self.source} is not a readable Parquet file ({_one_line(error)})") from None

    def _find_width(self, file: Any) -> int:
        kind = file.schema_arrow.field("features").type
        size = getattr(kind, "list_size", None)
        if size is not None:
            return int(size)
        for batch in file.iter_batches(batch_size=64, columns=["features"]):
            lengths = batch.column("features").value_lengths().drop_null()
            if len(lengths):
                return int(lengths[0].as_py())
        return 0

    def __len__(self) -> int:
        return int(self._starts[-1])

    def spans(self, size: int) -> list[range]:
        spans, start = [], 0
        for stop in self._starts[1:]:
            if stop - start >= size or (stop == len(self) and stop > start):
                spans.append(range(start, stop))
                start = stop
        return spans

    def read(self, rows: range) -> Iterator[RowBatch]:
        pa = require("pyarrow", "report")
        groups = [
            group
            for group, (start, stop) in enumerate(itertools.pairwise(self._starts))
            if rows.start <= start and stop <= rows.stop
        ]
        start = rows.start
        try:
            chunks = self._open().iter_batches(CHUNK_ROWS, groups, self._columns, use_threads=False)
            for chunk in chunks:
                yield _row_batch(chunk, range(start, start + len(chunk)), self.width)
                start += len(chunk)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.source}, rows from {start}: not readable ({_one_line(error)})") from None


def _row_batch(chunk: Any, rows: range, width: int) -> RowBatch:
    """A record batch with the columns of a file of features."""
    columns = dict(zip(chunk.schema.names, chunk.columns))
    features, errors = matrix(columns["features"], width)
    logits = None
    if "logits" in columns:
        size = columns["logits"].type
        classes = getattr(size, "list_size", None) or int(columns["logits"].value_lengths().drop_null()[0].as_py())
        logits, more = matrix(columns["logits"], classes)
        errors = {**{row: reason.replace("features", "logits") for row, reason in more.items()}, **errors}
    labels = None
    if "label" in columns:
        labels = torch.from_numpy(columns["label"].fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64))
    if errors:
        kept = torch.ones(len(rows), dtype=torch.bool)
        kept[list(errors)] = False
        features = features[kept]
        logits = None if logits is None else logits[kept]
        labels = None if labels is None else labels[kept]
    return RowBatch(rows, Batch(features, logits, labels), errors)


def matrix(column: Any, width: int) -> tuple[Tensor, dict[int, str]]:
    """(N, width) from an Arrow array of lists, without a copy where it can be, and what is wrong with which row.

    Rows that are null or of another width are named, and are zeros; a null among the numbers is NaN.
    """
    pa = require("pyarrow", "report")
    errors: dict[int, str] = {}
    if column.null_count or not pa.types.is_fixed_size_list(column.type):
        lengths = column.value_lengths().fill_null(-1).to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(lengths != width).tolist():
            length = lengths[row]
            errors[row] = ABSENT if length < 0 else f"it has {length} features, expected {width}"
        if errors:
            zeros = pa.array(np.zeros(width, np.float32)).cast(column.type.value_type)
            rows = [None if row in errors else row for row in range(len(column))]
            column = _filled(pa, column, rows, zeros)
    values = column.flatten()
    if values.null_count:
        values = (
            values.fill_null(float("nan"))
            if pa.types.is_floating(values.type)
            else values.cast(pa.float64()).fill_null(float("nan"))
        )
    if not pa.types.is_floating(values.type):
        values = values.cast(pa.float32())
    return from_dlpack(values).reshape(len(column), width), errors


def _filled(pa: Any, column: Any, rows: list[int | None], filler: Any) -> Any:
    """The lists at `rows`, with `filler` where there is None."""
    spare = pa.ListArray.from_arrays(pa.array([0, len(filler)], pa.int32()), filler).cast(column.type)
    together = pa.concat_arrays([column, spare])
    return together.take(pa.array([len(column) if row is None else row for row in rows]))


def _check_list(field: Any, source: str) -> None:
    types = require("pyarrow", "report").types
    kind = field.type
    is_list = types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind)
    if not is_list or not (types.is_floating(kind.value_type) or types.is_integer(kind.value_type)):
        raise ValueError(f"{source}: the column {field.name!r} is {kind}, expected lists of numbers")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
