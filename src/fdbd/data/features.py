"""Features: those of a dataset under a model, and those in Parquet or NPZ files, which are read in
slices. Files have ``features`` (N, P) and perhaps ``logits`` (N, C) and ``y`` (N,), the true
classes as indices (or ``label``, as in version 0.1.0); in Parquet the first two are lists, best of
fixed size, which are read without a copy."""

from __future__ import annotations

import hashlib
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from fdbd.core.batch import Batch
from fdbd.data.images import Images, Names, cut
from fdbd.data.npz import NpzArray, array_names
from fdbd.data.parquet_footer import RowGroup, read_row_groups
from fdbd.util.extras import require
from fdbd.util.files import check_unchanged, readable, stamp, stamp_key

CHUNK_ROWS = 8192
"""Rows that are read and scored at once."""
# A Parquet row group is read as a whole. It may hold so many numbers more than its rows would have
# if they were of the right width.
SPARE_VALUES = 1 << 26
# A Parquet file is taken for damaged if its footer claims more than FREE_ROWS + MAX_ROWS_PER_BYTE ·
# bytes rows: null rows take almost no space, so that a small file may well hold millions.
FREE_ROWS = 1 << 24
MAX_ROWS_PER_BYTE = 64


@dataclass(frozen=True)
class FeatureSet:
    """N samples of a dataset as a classifier's head sees them: what a benchmark is made of.

    >>> samples = FeatureSet("mine", torch.zeros(5, 2, dtype=torch.float16))
    >>> len(samples), samples.rows(slice(0, 2)).features.dtype
    (5, torch.float32)
    """

    #: the dataset's name
    name: str
    #: (N, P), any floating dtype; batches come out in float32 (or float64)
    features: Tensor
    #: (N,) class indices; None: not known
    labels: Tensor | None = None
    #: (N, C); None: computed from the head
    logits: Tensor | None = None
    #: a key of the samples themselves (such as the images), the same under every model; "": not
    #: known
    samples: str = ""
    #: pooled earlier layers by name, (N, P_layer) each
    layers: Mapping[str, Tensor] | None = None
    #: the samples as images, in the same order; None: not at hand
    images: Images | None = None

    def __len__(self) -> int:
        return self.features.shape[0]

    @property
    def key(self) -> str:
        """Identifies these samples in this order: `samples`, or a hash of the features."""
        if self.samples:
            return self.samples
        values = self.features.detach().cpu().contiguous().view(torch.uint8)
        return f"features {hashlib.sha256(values.numpy().data).hexdigest()[:32]}"

    def batches(self, size: int = 8192) -> Iterator[Batch]:
        """The samples in order, at most `size` at a time."""
        return (self.rows(slice(start, start + size)) for start in range(0, len(self), size))

    __iter__ = batches

    def rows(self, rows: slice | Tensor) -> Batch:
        """Some samples as one Batch."""
        dtype = torch.float64 if self.features.dtype == torch.float64 else torch.float32
        return (
            Batch(self.features, self.logits, self.labels, self.layers).rows(rows).to(dtype=dtype)
        )


class RowBatch(NamedTuple):
    """Some rows of the input, in order; those that could not be read are named in `errors`."""

    names: Names
    """The names of all rows: a range of row numbers, or paths."""
    inputs: Tensor | Batch
    """The readable rows, in order: images ready for the model, or features."""
    errors: Mapping[int, str]
    """Why a row could not be read, by its position in `names`."""


class Widths(NamedTuple):
    """How many numbers a row has if it suits a head."""

    features: int
    logits: int


class FeatureRows(ABC):
    """Features of a file, in a fixed order; their names are row numbers."""

    is_sequential = False
    """Whether rows are cheap to read only in order, by one thread."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.source = os.fspath(path)
        self.key = stamp_key(path)
        """Changes when the file does."""
        self._stamp = stamp(path)
        self._len = 0

    def _choose_columns(self, names: Sequence[str]) -> None:
        """Set which columns of a file are read, in order, and which of them holds the true
        classes."""
        self._label = "y" if "y" in names else "label"
        self._names = [name for name in ("features", "logits", self._label) if name in names]

    def __len__(self) -> int:
        return self._len

    @abstractmethod
    def check(self, widths: Widths, labels: bool = False) -> None:
        """ValueError if the file as a whole does not suit a head, or has labels that are not class
        indices."""

    @abstractmethod
    def read(self, rows: range, widths: Widths, labels: bool = False) -> Iterator[RowBatch]:
        """The rows of a span of a file that `check` has passed, with their labels if wanted and
        present. Raises if the file is no longer the one that was opened."""

    def spans(self, size: int) -> list[range]:
        """All rows in runs of about `size` that are cheap to read apart."""
        return cut(range(len(self)), size)

    def _columns(self, labels: bool) -> list[str]:
        """The columns to read, with or without that of the true classes."""
        if labels:
            return self._names
        return [name for name in self._names if name != self._label]

    def _check_width(self, name: str, found: int, widths: Widths) -> None:
        expected = getattr(widths, name)
        if len(self) and found != expected:
            raise ValueError(
                f"{self.source} has {found} {name} per row, expected the head's {expected}"
            )

    def _check_label(self, kind: Any, is_number: bool) -> None:
        if not is_number:
            what = f"{self.source}: the column {self._label!r} is {kind}"
            raise ValueError(f"{what}, expected class indices; leave it out or map it")


def open_features(path: str | os.PathLike[str]) -> FeatureRows:
    """The features in a ``.parquet``, ``.npz`` or ``.csv`` file."""
    suffix = Path(path).suffix.lower()
    if suffix == ".parquet":
        return ParquetFeatures(path)
    if suffix == ".csv":
        from fdbd.data.csv_features import CsvFeatures

        return CsvFeatures(os.fspath(path))
    return NpzFeatures(path)


def holds_features(data: str) -> bool:
    """Whether what a user typed is a file of features, and not of images."""
    path = Path(data).expanduser()
    if path.suffix.lower() in (".parquet", ".csv"):
        if not path.is_file():
            what = "no such regular file" if path.exists() else "no such file"
            raise FileNotFoundError(f"no features at {data!r}: {what}")
        return True
    return path.suffix.lower() == ".npz" and path.is_file() and "features" in array_names(path)


class NpzFeatures(FeatureRows):
    """Features in an NPZ file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._choose_columns(array_names(path))
        self._arrays = self._open(labels=False)
        self._len = len(self._arrays["features"])
        self.is_sequential = any(array.is_compressed for array in self._arrays.values())

    def _open(self, labels: bool) -> dict[str, NpzArray]:
        return {name: NpzArray(self.source, name, self._stamp) for name in self._columns(labels)}

    def check(self, widths: Widths, labels: bool = False) -> None:
        arrays = self._open(labels)
        for name, array in arrays.items():
            is_number = array.dtype.kind in "biuf"
            # Labels are class indices, or zeros and ones for a head of many labels.
            possible = (1, 2) if name == self._label else (2,)
            if len(array) != len(self) or len(array.shape) not in possible:
                shapes = ", ".join(f"{each} {found.shape}" for each, found in arrays.items())
                raise ValueError(
                    f"{self.source} has {shapes}; expected features (N, P), logits (N, C) and y"
                    " (N,), or (N, C) for a head of many labels"
                )
            if name == self._label:
                self._check_label(array.dtype, is_number)
            elif not is_number or array.dtype.itemsize > 8:
                what = f"{self.source}: the array {name!r} is {array.dtype}"
                raise ValueError(f"{what}, expected numbers of at most 64 bits")
            else:
                self._check_width(name, array.shape[1], widths)

    def read(self, rows: range, widths: Widths, labels: bool = False) -> Iterator[RowBatch]:
        # Rows that are read in order go on in arrays that are open already; others, which several
        # threads may read, are opened anew.
        names = self._columns(labels)
        if not self.is_sequential or not set(names) <= set(self._arrays):
            self._arrays = self._open(labels)
        arrays = self._arrays
        for part in cut(rows, CHUNK_ROWS):
            values: dict[str, Tensor] = {}
            for name in names:
                found = arrays[name][part.start : part.stop]
                dtype = np.dtype(np.int64) if name == self._label else _torch_dtype(found.dtype)
                values[name] = torch.from_numpy(found.astype(dtype))
            batch = Batch(values["features"], values.get("logits"), values.get(self._label))
            yield RowBatch(part, batch, {})


def _torch_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The floating dtype, in this machine's byte order, that numbers of a file are scored in:
    float64 for integers that float32 does not hold exactly."""
    if dtype.kind == "f":
        return dtype.newbyteorder("=")
    return np.result_type(dtype, np.float32)


class ParquetFeatures(FeatureRows):
    """Features in a Parquet file; a span is one or more row groups."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        with readable(self.source, "Parquet file"):
            file = self._open()
            schema = file.schema_arrow
            # pyarrow's own description of a damaged column would end the process.
            groups = read_row_groups(self.source)
            if len(groups) != file.metadata.num_row_groups:
                raise ValueError("its footer is damaged: its row groups cannot be told apart")
            counts = [group.rows for group in groups]
        self._choose_columns(schema.names)
        self._check_names(schema.names)
        self._starts = [0, *itertools.accumulate(counts)]
        self._len = self._starts[-1]
        self._check_footer(counts)
        self._types = {name: schema.field(name).type for name in self._names}
        self._values: dict[str, list[int]] = {}
        """The count of numbers in each row group, by column."""
        for name in self._columns(labels=False):
            self._check_type(name)
            with readable(self.source, "Parquet file"):
                leaf = _leaf(file.schema, name)
                self._values[name] = [_values_of(group, leaf) for group in groups]

    def _check_names(self, columns: Sequence[str]) -> None:
        """ValueError unless there are features, and each column that is read is there once."""
        for name in self._names:
            if columns.count(name) > 1:
                raise ValueError(f"{self.source} has several columns called {name!r}, expected one")
        if "features" not in self._names:
            others = ", ".join(columns) or "none"
            raise ValueError(
                f"{self.source} has no column 'features' with lists of numbers; it has {others}"
            )

    def _check_footer(self, counts: Sequence[int]) -> None:
        """ValueError if the footer claims more rows than a file of this size may hold."""
        size = os.path.getsize(self.source)
        most = FREE_ROWS + MAX_ROWS_PER_BYTE * size
        if min(counts, default=0) < 0 or len(self) > most:
            raise ValueError(
                f"{self.source} is damaged: its footer claims {len(self):,} rows in {size:,} bytes"
            )

    def _check_type(self, name: str) -> None:
        """ValueError unless a column holds lists of numbers."""
        types = require("pyarrow", "report").types
        kind = self._types[name]
        is_list = types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind)
        holds_numbers = is_list and (
            types.is_floating(kind.value_type) or types.is_integer(kind.value_type)
        )
        if not holds_numbers:
            raise ValueError(
                f"{self.source}: the column {name!r} is {kind}, expected lists of numbers"
            )

    def _open(self) -> Any:
        return require("pyarrow.parquet", "report").ParquetFile(self.source, pre_buffer=False)

    def check(self, widths: Widths, labels: bool = False) -> None:
        types = require("pyarrow", "report").types
        for name, values in self._values.items():
            # None: each row has a size of its own.
            size = getattr(self._types[name], "list_size", None)
            if size is not None:
                self._check_width(name, size, widths)
            width = getattr(widths, name)
            for (start, stop), count in zip(itertools.pairwise(self._starts), values):
                if count > (stop - start) * max(1, width) + SPARE_VALUES:
                    what = (
                        f"{count:,} {name} are far more than {width} per row, too many to be read"
                    )
                    raise ValueError(f"{self.source}, rows {start} to {stop}: {what}")
        if labels and self._label in self._types:
            kind = self._types[self._label]
            is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
            self._check_label(kind, is_number)

    def spans(self, size: int) -> list[range]:
        spans = []
        start = 0
        for stop in self._starts[1:]:
            is_last = stop == len(self)
            if stop - start >= size or (is_last and stop > start):
                spans.append(range(start, stop))
                start = stop
        return spans

    def read(self, rows: range, widths: Widths, labels: bool = False) -> Iterator[RowBatch]:
        groups = []
        for group, (first, end) in enumerate(itertools.pairwise(self._starts)):
            if rows.start <= first and end <= rows.stop:
                groups.append(group)
        check_unchanged(self.source, self._stamp)
        with readable(self.source, "Parquet file"):
            start = rows.start
            for chunk in self._open().iter_batches(
                CHUNK_ROWS, groups, self._columns(labels), use_threads=False
            ):
                names = range(start, start + len(chunk))
                yield self._row_batch(names, dict(zip(chunk.schema.names, chunk.columns)), widths)
                start += len(chunk)
            check_unchanged(self.source, self._stamp)

    def _row_batch(self, names: range, columns: Mapping[str, Any], widths: Widths) -> RowBatch:
        features, errors = matrix(columns["features"], widths.features)
        logits = None
        labels = None
        if "logits" in columns:
            logits, more = matrix(columns["logits"], widths.logits, "logits")
            errors = {**more, **errors}
        if self._label in columns:
            int64 = require("pyarrow", "report").int64()
            # A missing label is −1, which means none.
            indices = columns[self._label].cast(int64, safe=False).fill_null(-1)
            labels = torch.from_numpy(indices.to_numpy(zero_copy_only=False).copy())
        return RowBatch(names, Batch(features, logits, labels).without(errors), errors)


def _leaf(schema: Any, name: str) -> int:
    """Index of the Parquet column that holds the numbers of a column of lists."""
    for number in range(len(schema)):
        leaf = schema.column(number)
        if leaf.path.startswith(f"{name}.") and leaf.max_repetition_level:
            return number
    raise OSError(f"the column {name!r} has no numbers")


def _values_of(group: RowGroup, leaf: int) -> int:
    """The count of numbers in one column of a row group."""
    if leaf >= len(group.values):
        raise ValueError(f"its footer is damaged: a row group has {len(group.values)} columns")
    return group.values[leaf]


def matrix(column: Any, width: int, what: str = "features") -> tuple[Tensor, dict[int, str]]:
    """(N, width) from an Arrow array of lists, without a copy if possible, and what is wrong
    with which row.

    Rows that are null or of another width are named, and are zeros; a null among the numbers is
    NaN."""
    errors = _wrong_rows(column, width, what)
    if not errors:
        return _numbers(column).reshape(-1, width), errors
    pa = require("pyarrow", "report")
    is_right = np.ones(len(column), dtype=bool)
    is_right[list(errors)] = False
    found = _numbers(column.filter(pa.array(is_right))).reshape(-1, width)
    whole = found.new_zeros(len(column), width)
    whole[torch.from_numpy(is_right)] = found
    return whole, errors


def _wrong_rows(column: Any, width: int, what: str) -> dict[int, str]:
    """What is wrong with each list of an Arrow array that is null or has another length."""
    pa = require("pyarrow", "report")
    if not column.null_count and pa.types.is_fixed_size_list(column.type):
        # Their length was compared when the file was opened.
        return {}
    lengths = column.value_lengths().fill_null(-1).to_numpy(zero_copy_only=False)
    errors = {}
    for row in np.flatnonzero(lengths != width).tolist():
        if lengths[row] < 0:
            errors[row] = f"its {what} are null"
        else:
            errors[row] = f"it has {lengths[row]} {what}, expected {width}"
    return errors


def _numbers(column: Any) -> Tensor:
    """The numbers in an Arrow array of lists, one after the other: float32 or float64."""
    pa = require("pyarrow", "report")
    values = column.flatten()
    if not pa.types.is_floating(values.type):
        # Small integers are exact in float32.
        is_small = values.type.bit_width <= 16 and not values.null_count
        wanted = pa.float32() if is_small else pa.float64()
        values = values.cast(wanted, safe=False)
    if values.null_count:
        values = values.fill_null(float("nan"))
    return from_dlpack(values)
