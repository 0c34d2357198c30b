"""Rows of Ray's blocks, which are Arrow tables, to what a guard takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fdbd.core.batch import Batch
from fdbd.data.decoding import decode_rows
from fdbd.data.features import Widths, matrix
from fdbd.data.images import Pixels, decode
from fdbd.data.preprocessing import Preprocess
from fdbd.decision.guard import Guard
from fdbd.jobs.ray.fitting import Items
from fdbd.util.extras import require

INPUTS = ("features", "image", "bytes", "path")
"""Columns that hold samples, in the order in which they are looked for."""


class Reader:
    """Rows of a table to what a guard takes: a `Batch` of features, or a tensor of model inputs. Arguments are those of
    `fdbd.jobs.ray.fit`."""

    def __init__(
        self, guard: Guard, dataset: Any, column: str | None, preprocess: Preprocess | None, label: str | None = None
    ) -> None:
        columns = dataset.columns() or []
        if column is None:
            column = next((name for name in INPUTS if name in columns), None)
        if column is None or column not in columns:
            wanted = f"no column {column!r}" if column else f"none of the columns {', '.join(INPUTS)}"
            present = ", ".join(columns) or "no rows"
            raise ValueError(f"the dataset has {wanted}; it has {present}: say with column=... where the samples are")
        self.column, self.preprocess, self.label = column, preprocess, label
        self.is_features = guard.classifier is None or column == "features"
        self.widths = Widths.of(guard.head)

    def __call__(self, table: Any) -> Items:
        """All rows of a table, to fit or calibrate on; a row that cannot be read is an error."""
        inputs, errors = self.read(table)
        for reason in errors.values():
            raise ValueError(f"a row cannot be read: {reason}")
        labels = None
        if self.label is not None and self.label in table.column_names:
            values = _column_values(table, self.label)
            if values.dtype.kind not in "iu":
                raise TypeError(f"labels in column {self.label!r} are {values.dtype}, expected class indices")
            labels = _tensor(values).long()
        return [inputs._replace(labels=labels) if isinstance(inputs, Batch) else (inputs, labels)]

    def read(self, table: Any) -> tuple[Any, dict[int, str]]:
        """Inputs of the readable rows, and what is wrong with the others by their number."""
        if self.is_features:
            features, errors = _matrix(table, self.column, self.widths.features)
            logits = None
            if "logits" in table.column_names:
                logits, more = _matrix(table, "logits", self.widths.logits)
                errors = {**more, **errors}
            return Batch(features, logits).without(errors), errors
        values = _column_values(table, self.column)
        if values.dtype != np.uint8 and values.dtype.kind in "fiu":
            return _tensor(values), {}
        if self.preprocess is None:
            raise ValueError(f"column {self.column!r} holds images: give the preprocess of the model's training")
        if values.dtype == np.uint8:
            return self.preprocess(values), {}
        names = table.column("path").to_pylist() if "path" in table.column_names else None
        images, failures = decode_rows(_Encoded(values, names), self.preprocess, range(len(values)))
        return self.preprocess.normalise(images), {failure.row: failure.reason for failure in failures}


def _tensor(values: Any) -> Tensor:
    """A tensor of its own: Ray's arrays live in shared memory that cannot be written."""
    return torch.from_numpy(np.array(values))


def _column_values(table: Any, name: str) -> Any:
    """A column of a pyarrow table as an array (N, …), or (N,) of objects where the shapes differ."""
    accessor = require("ray.data.block", "ray").BlockAccessor.for_block(table.select([name]))
    values = accessor.to_numpy([name])[name]
    if values.dtype == object and len(values) and isinstance(values[0], np.ndarray):
        return np.stack(values) if len({value.shape for value in values}) == 1 else values
    return values


def _matrix(table: Any, name: str, width: int) -> tuple[Tensor, dict[int, str]]:
    """(N, width) of a column of lists or of Ray's own arrays, and what is wrong with which row."""
    pa = require("pyarrow", "ray")
    column = table.column(name)
    if pa.types.is_nested(column.type):
        return matrix(column.combine_chunks(), width)
    values = _column_values(table, name)
    if values.dtype == object or values.ndim != 2:
        raise ValueError(f"column {name!r} holds {values.dtype} {values.shape}, expected one list of numbers per row")
    return _tensor(values), {}


class _Encoded(Sequence[Pixels]):
    """Images of a column: arrays, or encoded ones that are decoded when asked for."""

    def __init__(self, values: Any, names: Sequence[str] | None) -> None:
        self.values, self.names = values, names

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: Any) -> Any:
        value = self.values[row]
        if isinstance(value, np.ndarray):
            return value
        return decode(value, name=None if self.names is None else str(self.names[row]))
