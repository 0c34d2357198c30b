"""Fit, calibrate and ask a guard over Ray Datasets: Ray Data reads and moves the blocks, which are
Arrow tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from fdbd.core.batch import Batch, Head
from fdbd.core.pixels import ImageError, decode
from fdbd.core.preprocessing import Preprocess
from fdbd.data.features import RowBatch, Widths, matrix
from fdbd.decision.guard import Data, Guard
from fdbd.decision.rows import COLUMNS, decide_rows, to_arrow
from fdbd.decision.threshold import check_target
from fdbd.detectors import Detector
from fdbd.jobs.ray.fits import Items, Run, calibrate_rows, fit_rows, no_rows
from fdbd.jobs.ray.pool import Workers
from fdbd.util.extras import require

INPUTS = ("features", "image", "bytes", "path")
"""Columns that hold samples, in the order in which they are tried."""
ROWS_PER_SUM = 16_384
"""Features that one task sums up, so that small blocks do not send a large sum each."""

G = TypeVar("G", Guard, Detector)


def fit(
    guard: G,
    dataset: Any,
    *,
    head: Head | None = None,
    column: str | None = None,
    label: str | None = "y",
    preprocess: Preprocess | None = None,
    held_out: Data | None = None,
    workers: Workers | int | None = None,
) -> G:
    """`Guard.fit` on data wherever they are in the cluster, with the same result for any number of
    blocks. A network runs once over the data, and its features come to the driver; a column of
    features is read again for each pass, where the data are (``dataset.materialize()`` keeps them
    in memory).

    Args:
        guard: a guard, or a detector together with its `head`; fitted in place and returned.
        column: of the samples: ``features`` (N, P), or inputs of the model: ``image`` (uint8
            arrays), ``bytes`` or ``path`` (encoded images), arrays under another name; None: the
            first of these names that is there.
        label: column of class indices, if there is one; for ``y``, ``label`` in data without it, as
            in feature files.
        preprocess: from uint8 images to what the model takes.
        held_out: with "auto", what `Guard.fit` takes; detectors are weighed by it in this process.
        workers: how the work is spread, or how much of it is done at once.

    >>> import ray.data
    >>> rows = ray.data.from_items([{"features": row.tolist()} for row in torch.rand(50, 3)])
    >>> fit(Guard(Head(torch.eye(3))), rows).detector
    FDBD(normalizer='deviation', nearest=None)
    """
    if isinstance(guard, Detector):
        if head is None:
            raise ValueError(
                f"{guard.label} is fitted together with a head: give fit(detector, dataset, "
                "head=...)"
            )
        fit(Guard(head, guard), dataset, column=column, label=label, workers=workers)
        return guard
    if held_out is None and guard.auto is not None:
        raise ValueError(
            "on a cluster auto weighs detectors by data of their own: give fit(guard, dataset, "
            "held_out=...), some 300 samples"
        )
    if held_out is not None and guard.auto is None:
        raise ValueError('held_out is what "auto" weighs detectors by: leave it out')
    pool = Workers.from_count(workers)
    reader = Reader(guard, dataset, column, preprocess, label)
    first = None
    if reader.is_features:
        pool = replace(pool, batch_size=ROWS_PER_SUM)
        first = _first_features(guard, dataset, reader)
    if guard.auto is not None:
        # How much of the data a member keeps depends on how many there are.
        guard.stages.make_pool(dataset.count())
    fit_rows(guard, _runner(dataset, pool, reader), first)
    if held_out is not None:
        guard.stages.choose_from(held_out)
    return guard


def _first_features(guard: Guard, dataset: Any, reader: Reader) -> Batch:
    """The first row of a dataset of features; no rows if the dataset is empty."""
    for table in dataset.limit(1).iter_batches(batch_format="pyarrow"):
        features, _ = reader.read(table)
        return cast(Batch, features)
    return no_rows(guard)


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
    """Set a fitted guard's threshold from in-distribution data that neither the network's training
    nor the fit has seen: `Guard.calibrate`, on data as for `score`. A row that cannot be read is an
    error.

    >>> import fdbd, ray.data
    >>> rows = ray.data.from_items([{"features": row.tolist()} for row in torch.rand(50, 3)])
    >>> guard = Guard(Head(torch.eye(3))).fit(fdbd.Batch(torch.rand(50, 3)))
    >>> calibrate(guard, rows, alpha=0.1).threshold
    Threshold(conformal, alpha=0.1, 50 calibration scores)
    """
    check_target(tpr, alpha)
    run = _runner(dataset, Workers.from_count(workers), Reader(guard, dataset, column, preprocess))
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
    """A Dataset with the guard's decision on each row, computed when it is read or written. Rows
    come as blocks get ready, in any order: keep a column that names them.

    Args:
        guard: fitted and calibrated.
        dataset: a ``ray.data.Dataset``, for instance ``ray.data.read_parquet(path)``.
        column, preprocess, workers: as for `fit`.
        keep: columns to put beside the decision; None: all but those that hold samples or
            decisions.
        class_names: one per class, for the column ``class``.

    Returns:
        the columns that were kept, then ``label``, ``class``, ``score``, ``p_value``, ``is_ood``
        and ``error`` as `fdbd score` writes them: rows that could not be read are OOD, and
        ``error`` says why.

    >>> import fdbd, ray.data
    >>> guard = (
    ...     Guard(Head(torch.eye(3)))
    ...     .fit(fdbd.Batch(torch.rand(50, 3)))
    ...     .calibrate(fdbd.Batch(torch.rand(50, 3)))
    ... )
    >>> rows = ray.data.from_items(
    ...     [{"id": number, "features": [0.1, 0.2, number]} for number in range(4)]
    ... )
    >>> score(guard, rows).columns()
    ['id', 'label', 'class', 'score', 'p_value', 'is_ood', 'error']
    """
    guard.stages.require_threshold()
    reader = Reader(guard, dataset, column, preprocess)
    columns = dataset.columns()
    if keep is None:
        dropped = {*COLUMNS, *INPUTS, reader.column, "logits"} - {"path"}
        keep = [name for name in columns if name not in dropped]
    for name in keep:
        if name not in columns or name in COLUMNS:
            raise ValueError(
                f"cannot keep {name!r}: the dataset has {', '.join(columns)}; scores replace "
                f"{', '.join(COLUMNS)}"
            )
    work = partial(_decide_table, guard, reader, tuple(keep), tuple(class_names))
    return Workers.from_count(workers).mapped(dataset, guard, work)


def _decide_table(
    guard: Guard, reader: Reader, keep: Sequence[str], class_names: Sequence[str], table: Any
) -> Any:
    inputs, errors = reader.read(table)
    batch = RowBatch(range(table.num_rows), inputs, errors)
    decided = to_arrow(decide_rows(guard, batch, class_names))
    columns = {name: table[name] for name in keep}
    for name in COLUMNS:
        columns[name] = decided[name]
    return require("pyarrow", "ray").table(columns)


def _runner(dataset: Any, workers: Workers, reader: Reader) -> Run:
    """Work on the rows of a Dataset."""

    def run(guard: Guard, work: Callable[[Items], Any]) -> Iterator[Any]:
        return workers.results(dataset, guard, partial(_read_and_do, reader, work))

    return run


def _read_and_do(reader: Reader, work: Callable[[Items], Any], table: Any) -> Any:
    return work(reader(table))


class Reader:
    """Turns rows of a table into a `Batch` of features or a tensor of model inputs; its arguments
    are those of `fit`."""

    def __init__(
        self,
        guard: Guard,
        dataset: Any,
        column: str | None,
        preprocess: Preprocess | None,
        label: str | None = None,
    ) -> None:
        columns = dataset.columns() or []
        self.column = _find_column(columns, column)
        self.preprocess = preprocess
        self.label = label
        if label == "y" and "y" not in columns:
            self.label = "label"
        self.is_features = guard.classifier is None or column == "features"
        self.widths = Widths(guard.head.num_features, guard.head.num_classes)

    def __call__(self, table: Any) -> Items:
        """All rows of a table, to fit or calibrate on; a row that cannot be read is an error."""
        inputs, errors = self.read(table)
        for reason in errors.values():
            raise ValueError(f"a row cannot be read: {reason}")
        labels = self._labels(table)
        if isinstance(inputs, Batch):
            return [inputs._replace(labels=labels)]
        return [(inputs, labels)]

    def _labels(self, table: Any) -> Tensor | None:
        """The class indices in a table; None if there are none."""
        if self.label is None or self.label not in table.column_names:
            return None
        values = table.column(self.label).to_numpy()
        if values.dtype.kind not in "iu":
            raise TypeError(
                f"labels in column {self.label!r} are {values.dtype}, expected class indices"
            )
        return torch.from_numpy(values.astype(np.int64))

    def read(self, table: Any) -> tuple[Any, dict[int, str]]:
        """Inputs of the readable rows, and what is wrong with the others by their number."""
        if self.is_features:
            return self._features(table)
        values = self._values(table)
        if values.dtype != np.uint8 and values.dtype.kind in "fiu":
            # A copy: Ray's arrays are in memory that cannot be written.
            return torch.from_numpy(np.array(values)), {}
        if self.preprocess is None:
            raise ValueError(
                f"column {self.column!r} holds images: give the preprocess of the model's training"
            )
        if values.dtype == np.uint8:
            return self.preprocess(values), {}
        names = [None] * len(values)
        if "path" in table.column_names:
            names = table.column("path").to_pylist()
        return _decoded(values, names, self.preprocess)

    def _features(self, table: Any) -> tuple[Batch, dict[int, str]]:
        features, errors = _matrix(table, self.column, self.widths.features)
        logits = None
        if "logits" in table.column_names:
            logits, more = _matrix(table, "logits", self.widths.logits)
            errors = {**more, **errors}
        return Batch(features, logits).without(errors), errors

    def _values(self, table: Any) -> Any:
        """The samples as one array if they are of one shape, else as an array of objects."""
        block = require("ray.data.block", "ray")
        accessor = block.BlockAccessor.for_block(table.select([self.column]))
        values = accessor.to_numpy([self.column])[self.column]
        shapes = {getattr(value, "shape", None) for value in values}
        if values.dtype == object and len(shapes) == 1 and None not in shapes:
            return np.stack(values)
        return values


def _find_column(columns: Sequence[str], column: str | None) -> str:
    """The column that holds the samples: the one that was named, or the first that usually does."""
    if column is None:
        for name in INPUTS:
            if name in columns:
                return name
    elif column in columns:
        return column
    wanted = f"no column {column!r}" if column else f"none of the columns {', '.join(INPUTS)}"
    present = ", ".join(columns) or "no rows"
    raise ValueError(
        f"the dataset has {wanted}; it has {present}: say with column=... where the samples are"
    )


def _decoded(
    values: Any, names: Sequence[str | None], preprocess: Preprocess
) -> tuple[Tensor, dict[int, str]]:
    """Encoded images, paths or pixels of several sizes as the model takes them, and what is wrong
    with the others by their number."""
    images = []
    errors: dict[int, str] = {}
    for row, (value, name) in enumerate(zip(values, names)):
        try:
            pixels = value if isinstance(value, np.ndarray) else decode(value, name=name)
            images.append(preprocess.fit(pixels))
        except (ImageError, MemoryError) as error:
            errors[row] = str(error) or "there is not enough memory to prepare it"
    shape = (-1, preprocess.height, preprocess.width, 3)
    array = np.array(images, np.uint8).reshape(shape)
    return preprocess.normalise(array), errors


def _matrix(table: Any, name: str, width: int) -> tuple[Tensor, dict[int, str]]:
    """(N, width) of a column of lists or of Ray's own arrays, and what is wrong with which row."""
    pa = require("pyarrow", "ray")
    column = table.column(name).combine_chunks()
    kind = table.schema.field(name).type
    if isinstance(kind, pa.ExtensionType) and len(getattr(kind, "shape", None) or ()) == 1:
        column = column.storage
    if not isinstance(column, (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)):
        raise ValueError(f"column {name!r} holds {kind}, expected one list of numbers per row")
    return matrix(column, width)
