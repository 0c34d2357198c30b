"""Fit, calibrate and ask a guard over Ray Datasets: Ray Data reads and moves the blocks, which are Arrow tables."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fdbd.core.batch import Batch, Head
from fdbd.data.decoding import decode_rows
from fdbd.data.features import RowBatch, Widths, matrix
from fdbd.data.images import Pixels, decode
from fdbd.data.preprocessing import Preprocess
from fdbd.decision.answers import NotCalibratedError
from fdbd.decision.guard import Guard
from fdbd.decision.threshold import check_target
from fdbd.detectors import Detector
from fdbd.jobs.output import COLUMNS, decide, to_arrow
from fdbd.jobs.ray.pool import Items, Run, Workers, calibrate_rows, fit_rows, plain_errors
from fdbd.util.extras import require

INPUTS = ("features", "image", "bytes", "path")  # columns that hold samples, in the order in which they are tried
ROWS_PER_SUM = 16_384  # features that one task sums up, so that small blocks do not send a large sum each

G = TypeVar("G", Guard, Detector)


def fit(
    guard: G,
    dataset: Any,
    *,
    head: Head | None = None,
    column: str | None = None,
    label: str | None = "y",
    preprocess: Preprocess | None = None,
    workers: Workers | int | None = None,
) -> G:
    """`Guard.fit` on data wherever they are in the cluster, with the same result for any number of blocks. A network
    runs once over the data, and its features come to the driver; a column of features is read again for each pass,
    where the data are (``dataset.materialize()`` keeps them in memory).

    Args:
        guard: a guard, or a detector together with its `head`; fitted in place and returned.
        column: of the samples: ``features`` (N, P), or inputs of the model: ``image`` (uint8 arrays), ``bytes`` or
            ``path`` (encoded images), arrays under another name; None: the first of these names that is there.
        label: column of class indices, if there is one; for ``y``, ``label`` in data without it, as in feature files.
        preprocess: from uint8 images to what the model takes.
        workers: how the work is spread, or how much of it is done at once.

    >>> import ray.data
    >>> rows = ray.data.from_items([{"features": row.tolist()} for row in torch.rand(50, 3)])
    >>> fit(Guard(Head(torch.eye(3))), rows).detector
    FDBD(normalizer='deviation', nearest=None)
    """
    if isinstance(guard, Detector):
        if head is None:
            raise ValueError(f"{guard.label} is fitted together with a head: give fit(detector, dataset, head=...)")
        fit(Guard(head, guard), dataset, column=column, label=label, workers=workers)
        return guard
    pool, reader = Workers.of(workers), Reader(guard, dataset, column, preprocess, label)
    dtype = None
    if reader.is_features:
        tables = dataset.limit(1).iter_batches(batch_format="pyarrow")
        dtype = next((reader.read(table)[0].features.dtype for table in tables), torch.float32)
        pool = replace(pool, batch_size=ROWS_PER_SUM)
    fit_rows(guard, _runner(dataset, pool, reader), dtype)
    return guard


def calibrate(
    guard: Guard,
    dataset: Any,
    *,
    tpr: float | None = None,
    alpha: float | None = None,
    per_class: bool = False,
    column: str | None = None,
    preprocess: Preprocess | None = None,
    workers: Workers | int | None = None,
) -> Guard:
    """Set a fitted guard's threshold from in-distribution data that neither the network's training nor the fit has
    seen: `Guard.calibrate`, on data as for `score`. A row that cannot be read is an error.

    >>> import fdbd, ray.data
    >>> rows = ray.data.from_items([{"features": row.tolist()} for row in torch.rand(50, 3)])
    >>> guard = Guard(Head(torch.eye(3))).fit(fdbd.Batch(torch.rand(50, 3)))
    >>> calibrate(guard, rows, alpha=0.1).threshold
    Threshold(conformal, alpha=0.1, 50 calibration scores)
    """
    check_target(tpr, alpha)
    run = _runner(dataset, Workers.of(workers), Reader(guard, dataset, column, preprocess))
    calibrate_rows(guard, run, tpr=tpr, alpha=alpha, per_class=per_class)
    return guard


def score(
    guard: Guard,
    dataset: Any,
    *,
    column: str | None = None,
    preprocess: Preprocess | None = None,
    keep: Sequence[str] | None = None,
    class_names: Sequence[str] = (),
    workers: Workers | int | None = None,
) -> Any:
    """A Dataset with the guard's decision on each row, computed when it is read or written. Rows come as blocks get
    ready, in any order: keep a column that names them.

    Args:
        guard: fitted and calibrated.
        dataset: a ``ray.data.Dataset``, for instance ``ray.data.read_parquet(path)``.
        column, preprocess, workers: as for `fit`.
        keep: columns to put beside the decision; None: all but those that hold samples or decisions.
        class_names: one per class, for the column ``class``.

    Returns:
        the columns that were kept, then ``label``, ``class``, ``score``, ``p_value``, ``is_ood`` and ``error`` as
        `fdbd score` writes them: rows that could not be read are OOD, and ``error`` says why.

    >>> import fdbd, ray.data
    >>> guard = Guard(Head(torch.eye(3))).fit(fdbd.Batch(torch.rand(50, 3))).calibrate(fdbd.Batch(torch.rand(50, 3)))
    >>> rows = ray.data.from_items([{"id": number, "features": [0.1, 0.2, number]} for number in range(4)])
    >>> score(guard, rows).columns()
    ['id', 'label', 'class', 'score', 'p_value', 'is_ood', 'error']
    """
    if guard.threshold is None:
        raise NotCalibratedError("the guard has no threshold: calibrate it before it scores")
    reader, columns, own = Reader(guard, dataset, column, preprocess), dataset.columns(), COLUMNS
    if keep is None:
        keep = [name for name in columns if name not in {*own, *INPUTS[:3], reader.column, "logits"} or name == "path"]
    for name in keep:
        if name not in columns or name in own:
            raise ValueError(
                f"cannot keep {name!r}: the dataset has {', '.join(columns)}, of which scores replace {', '.join(own)}"
            )
    work = partial(_decide_table, guard, reader, tuple(keep), tuple(class_names))
    return _mapped(dataset, Workers.of(workers), guard, work)


def _decide_table(guard: Guard, reader: Reader, keep: Sequence[str], class_names: Sequence[str], table: Any) -> Any:
    inputs, errors = reader.read(table)
    decided = to_arrow(decide(guard, RowBatch(range(table.num_rows), inputs, errors), class_names))
    columns = {**{name: table[name] for name in keep}, **{name: decided[name] for name in COLUMNS}}
    return require("pyarrow", "ray").table(columns)


def _mapped(dataset: Any, workers: Workers, guard: Guard, work: Callable[[Any], Any]) -> Any:
    """The dataset of the results of the work on its tables, which is done when it is read."""
    shared = workers.shared(guard, work)

    def task(table: Any) -> Any:
        return shared(table)

    task.__name__ = f"task with {workers.needs}"  # so Ray Data calls it where it makes no progress
    mapped = dataset.map_batches(
        task,
        compute=require("ray.data", "ray").TaskPoolStrategy(size=workers.count),
        num_cpus=workers.cpus,
        num_gpus=workers.gpus or None,
        max_calls=0,
        batch_size=workers.batch_size,
        batch_format="pyarrow",
    )
    mapped.context.execution_no_progress_timeout_s = workers.patience
    mapped.context.raise_original_map_exception = True  # Ray's own error for it would arrive without a cause
    return mapped


def _runner(dataset: Any, workers: Workers, reader: Reader) -> Run:
    """Work on the rows of a Dataset."""

    def run(guard: Guard, work: Callable[[Items], Any]) -> Iterator[Any]:
        mapped = _mapped(dataset, workers, guard, partial(_pickled, reader, work))
        try:
            with plain_errors():
                for row in mapped.iter_rows():
                    yield pickle.loads(row["result"])
        except require("ray.data.exceptions", "ray").ExecutionTimeoutError:
            raise TimeoutError(f"no result for {workers.patience:g} seconds: {workers.waits_for()}") from None

    return run


def _pickled(reader: Reader, work: Callable[[Items], Any], table: Any) -> dict[str, Any]:
    return {"result": np.array([pickle.dumps(work(reader(table)))], dtype=object)}


class Reader:
    """From rows of a table to a `Batch` of features or a tensor of model inputs; arguments are those of `fit`."""

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
        self.column, self.preprocess = column, preprocess
        self.label = "label" if label == "y" and "y" not in columns else label
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
