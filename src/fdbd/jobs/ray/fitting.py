"""Fitting on Ray: each block of training data becomes one partial sum where it lies, and the driver merges them."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import numpy as np
import torch

from fdbd.core.batch import Batch, Head
from fdbd.data.preprocessing import Preprocess
from fdbd.decision.guard import Guard
from fdbd.detectors import Detector
from fdbd.fitting.driver import fit_by, update_all
from fdbd.fitting.overlap import Sketch, sample_hashes
from fdbd.jobs.ray.columns import (
    SEEN,
    Reader,
    column_values,
    feature_dtype,
    from_columns,
    labels_in,
    refuse,
    tensor,
    to_columns,
)
from fdbd.jobs.ray.pool import Actor, Workers, plain_errors, with_plain_errors
from fdbd.util.extras import require

ROWS_A_SUM = 16_384
"""Training rows that one task boils down to one partial sum, so that small blocks do not send a large sum each."""
ATTEMPTS = 3
"""How often a fit starts over when nodes die."""

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
    """Show a guard or a detector its training data, wherever in the cluster they are.

    The result is that of `Guard.fit` on the same rows, for any number of blocks. A network runs once over the data, and
    what the detector learns from stays in Ray's object store until the fit ends; features are read anew for each pass
    (``dataset.materialize()`` keeps them).

    Args:
        guard: a guard, or a detector together with its `head`; fitted in place and returned.
        dataset: a ``ray.data.Dataset``.
        head: for a detector alone.
        column: of the samples: ``features`` (N, P), or inputs of the model: ``image`` (uint8 arrays), ``bytes`` or
            ``path`` (encoded images), arrays under another name; None: the first of these names that is there.
        label: column of class indices, where there is one.
        preprocess: from uint8 images to what the model takes.
        workers: the pool of actors that run the network, or their number.
    """
    if isinstance(guard, Detector):
        if head is None:
            raise ValueError(f"{guard.label} is fitted together with a head: give fit(detector, dataset, head=...)")
        fit(Guard(head, guard), dataset, column=column, label=label)
        return guard
    reader = Reader(guard, dataset, column, preprocess)
    lost = require("ray", "ray").exceptions.ObjectLostError
    for attempt in range(ATTEMPTS):
        try:
            with plain_errors():
                _fit(guard, dataset, reader, label, Workers.of(workers))
            break
        except lost:  # a node took features with it, and no actor is left to compute them again
            if attempt == ATTEMPTS - 1:
                raise
    return guard


def _fit(guard: Guard, dataset: Any, reader: Reader, label: str | None, workers: Workers) -> None:
    head = guard._find_head()
    if reader.is_features:
        guard._features_alone(Batch(torch.zeros(0, head.num_features)))  # says so where features are not enough
    else:
        dataset = workers.map(dataset, Features, (guard, reader, label)).materialize()
    seen: list[Sketch] = []

    def sum_up(statistics: list[Any], asking: list[Detector]) -> list[Any]:
        partial = PartialSums([Sketch(), *statistics], head, asking, reader if reader.is_features else None, label)
        tables = dataset.map_batches(partial, batch_size=ROWS_A_SUM, batch_format="pyarrow")
        sketch, *sums = merged(with_plain_errors(tables))
        seen.append(sketch)
        return sums

    guard.threshold = None
    fit_by(sum_up, [guard.detector], head, feature_dtype(dataset, reader.column if reader.is_features else "features"))
    guard._seen = seen[0] if seen else Sketch()


def merged(partial: Any) -> list[Any]:
    """The total of a dataset of partial sums."""
    cloudpickle = require("ray.cloudpickle", "ray")
    total: list[Any] = []
    for row in partial.iter_rows():
        sums = cloudpickle.loads(row["sums"])
        for mine, other in zip(total, sums):
            mine.merge(other)
        total = total or sums
    if not total:
        raise ValueError("the training data hold no samples; give a dataset with rows")
    return total


class Features(Actor):
    """An actor that runs the network over training data and keeps what the detector learns from."""

    def start(self, guard: Guard, reader: Reader, label: str | None) -> None:
        self.guard, self.reader, self.label = guard.to(self.device), reader, label

    def __call__(self, table: Any) -> dict[str, Any]:
        inputs, errors = self.reader(table)
        refuse(errors)
        with torch.no_grad():
            batch = self.guard._training_batch(inputs, labels_in(table, self.label))
        return {**to_columns(batch), SEEN: sample_hashes(inputs).numpy()}


class PartialSums:
    """A table of training data to a table of one row: the statistics of its samples, after a sketch of them.

    Args:
        empty: a Sketch, then statistics that have seen nothing.
        head: the linear head.
        asking: the detectors that asked for them.
        reader: of a column of features; None: the table is what `Features` made.
        label: column of class indices.
    """

    def __init__(
        self, empty: list[Any], head: Head, asking: list[Detector], reader: Reader | None, label: str | None
    ) -> None:
        self.empty, self.head, self.asking, self.reader, self.label = empty, head, asking, reader, label

    def __call__(self, table: Any) -> dict[str, Any]:
        sketch, *statistics = copy.deepcopy(self.empty)  # one process sums many tables
        if self.reader is None:
            batch = from_columns(table)
            sketch.add_hashes(tensor(column_values(table, SEEN)))
        else:
            batch, errors = self.reader(table)
            refuse(errors)
            batch = batch._replace(labels=labels_in(table, self.label))
            sketch.add(batch.features)
        update_all(statistics, [batch], self.head, self.asking)
        sums = require("ray.cloudpickle", "ray").dumps([sketch, *statistics])
        return {"sums": np.array([sums], dtype=object)}
