"""Fit, calibrate and ask a guard over Ray Datasets: Ray Data reads and moves the blocks, tasks do the work on them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from fdbd.core.batch import Head
from fdbd.data.features import RowBatch
from fdbd.data.preprocessing import Preprocess
from fdbd.decision.answers import NotCalibratedError
from fdbd.decision.guard import Guard
from fdbd.decision.threshold import check_target
from fdbd.detectors import Detector
from fdbd.jobs.output import COLUMNS, decide
from fdbd.jobs.ray.columns import INPUTS, Reader
from fdbd.jobs.ray.fitting import Items, Run, calibrate_rows, fit_rows
from fdbd.jobs.ray.pool import Workers, plain_errors
from fdbd.util.extras import require

ROWS_PER_SUM = 16_384
"""Features that one task boils down to one partial sum, so that small blocks do not send a large sum each."""

G = TypeVar("G", Guard, Detector)


def fit(
    guard: G,
    dataset: Any,
    *,
    head: Head | None = None,
    column: str | None = None,
    label: str | None = "label",
    preprocess: Preprocess | None = None,
    workers: Workers | int | None = None,
) -> G:
    """`Guard.fit` on data wherever they are in the cluster, with the same result for any number of blocks. A network
    runs once over the data, and its features come to the driver; a column of features is read anew for each pass, where
    the data are (``dataset.materialize()`` keeps them in memory).

    Args:
        guard: a guard, or a detector together with its `head`; fitted in place and returned.
        column: of the samples: ``features`` (N, P), or inputs of the model: ``image`` (uint8 arrays), ``bytes`` or
            ``path`` (encoded images), arrays under another name; None: the first of these names that is there.
        label: column of class indices, where there is one.
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
    decided = decide(guard, RowBatch(range(table.num_rows), inputs, errors), class_names).to_arrow()
    own = {name: decided.column(name) for name in decided.column_names[1:]}
    return require("pyarrow", "ray").table({**{name: table.column(name) for name in keep}, **own})


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
