"""Scoring on Ray: a pool of actors that each hold the guard, over a dataset or over files."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fdbd.core.batch import Batch
from fdbd.data.features import RowBatch
from fdbd.data.inputs import ImageRows, Rows
from fdbd.data.preprocessing import Preprocess
from fdbd.decision.guard import Guard, NotCalibratedError
from fdbd.decision.guard_file import OpenedGuard
from fdbd.fitting.overlap import Sketch, sample_hashes
from fdbd.jobs.output import Decided, decide, schema
from fdbd.jobs.ray.columns import INPUTS, SEEN, Reader, column_values, refuse, tensor
from fdbd.jobs.ray.pool import Actor, Workers, plain_errors, quiet
from fdbd.jobs.scoring import Part, Tables, feature_table, image_tables
from fdbd.util.extras import require


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
    """A Dataset with the guard's decision on each row, computed when it is read or written.

    Rows come as blocks get ready, in any order: keep a column that names them. Reading waits for the actors: blocks on
    their way to them take at most their share of Ray's object store.

    Args:
        guard: fitted and calibrated.
        dataset: a ``ray.data.Dataset``, for instance ``ray.data.read_parquet(path)``.
        column: as for `fit`.
        preprocess: from uint8 images to what the model takes.
        keep: columns to put beside the decision; None: all but those that hold samples or decisions.
        class_names: one a class, for the column ``class``.
        workers: the pool of actors, or their number.

    Returns:
        the columns that were kept, then ``label``, ``class``, ``score``, ``p_value``, ``is_ood`` and ``error`` as
        `fdbd score` writes them: rows that could not be read are OOD, and ``error`` says why.
    """
    if guard.threshold is None:
        raise NotCalibratedError("the guard has no threshold: calibrate it before it scores")
    reader = Reader(guard, dataset, column, preprocess)
    columns = dataset.columns()
    own = schema(range(0)).names[1:]
    if keep is None:
        keep = [name for name in columns if name not in {*own, *INPUTS[:3], reader.column, "logits"} or name == "path"]
    for name in keep:
        if name not in columns or name in own:
            raise ValueError(
                f"cannot keep {name!r}: the dataset has {', '.join(columns)}, of which scores replace {', '.join(own)}"
            )
    return Workers.of(workers).map(dataset, Decisions, (guard, reader, tuple(keep), tuple(class_names)))


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
    """Set a fitted guard's threshold from in-distribution data apart from those of the fit: `Guard.calibrate`, on data
    as for `score`. A row that cannot be read is an error."""
    if tpr is not None and alpha is not None:
        raise ValueError("give tpr (share of in-distribution samples to accept) or alpha (false alarms), not both")
    guard.detector.require_fitted()
    reader = Reader(guard, dataset, column, preprocess)
    known = Sketch()
    scores, labels = [], []
    with plain_errors():
        for table in _tables(Workers.of(workers).map(dataset, Scores, (guard, reader))):
            scores.append(tensor(column_values(table, "score")))
            labels.append(tensor(column_values(table, "label")))
            known.add_hashes(tensor(column_values(table, SEEN)))
    if not scores:
        raise ValueError("the calibration data hold no samples; give a dataset with rows")
    guard._warn_if_seen(known)
    guard.set_threshold(torch.cat(scores), torch.cat(labels), tpr=tpr, alpha=alpha, per_class=per_class)
    return guard


def file_tables(opened: OpenedGuard, rows: Rows, todo: Sequence[Part], workers: Workers) -> Tables:
    """Decisions on the rows of these parts of `score_files`' output, a table a part, in the order in which they get
    ready. A part is one piece of work."""
    if not todo:
        return
    spans = dict(todo)
    work = [{"part": number, "start": span.start, "stop": span.stop} for number, span in todo]
    dataset = require("ray.data", "ray").from_items(work, override_num_blocks=len(work))
    with quiet(), plain_errors():
        tables = _tables(workers.map(dataset, FileDecisions, (opened, rows, workers.batch_size), batch_size=1))
        yield from whole_parts(tables, spans)


def whole_parts(tables: Iterable[Any], spans: Mapping[int, range]) -> Tables:
    """Number, rows and table of each part once all of its rows have come, in order. Ray cuts large tables, and gives
    the pieces of several parts in any order; their columns ``part`` and ``place`` say where a row belongs."""
    pa, compute = require("pyarrow", "ray"), require("pyarrow.compute", "ray")
    pieces: dict[int, list[Any]] = {}
    for table in tables:
        for number in table.column("part").unique().to_pylist():
            own = pieces.setdefault(number, [])
            own.append(table.filter(compute.equal(table.column("part"), number)))
            if sum(map(len, own)) == len(spans[number]):
                whole = pa.concat_tables(pieces.pop(number)).sort_by("place")
                yield number, spans[number], whole.drop_columns(["part", "place"])


def _tables(dataset: Any) -> Generator[Any, None, None]:
    """The blocks of a dataset as pyarrow tables, each as it gets ready."""
    yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow")


class Decisions(Actor):
    """An actor that holds a guard and puts its decisions beside the columns to keep."""

    def start(self, guard: Guard, reader: Reader, keep: Sequence[str], class_names: Sequence[str]) -> None:
        self.guard, self.reader = guard.to(self.device), reader
        self.keep, self.class_names = keep, class_names

    def __call__(self, table: Any) -> Any:
        inputs, errors = self.reader(table)
        decided = decide(self.guard, RowBatch(range(table.num_rows), inputs, errors), self.class_names).to_arrow()
        kept = {name: table.column(name) for name in self.keep}
        own = {name: decided.column(name) for name in decided.column_names[1:]}
        return require("pyarrow", "ray").table({**kept, **own})


class Scores(Actor):
    """An actor that gives scores, predicted labels and hashes of the samples, to calibrate on."""

    def start(self, guard: Guard, reader: Reader) -> None:
        self.guard, self.reader = guard.to(self.device), reader

    def __call__(self, table: Any) -> dict[str, Any]:
        inputs, errors = self.reader(table)
        refuse(errors)
        with torch.no_grad():
            plain, scored = self.guard._observe(inputs)
            labels = self.guard._logits(plain).argmax(dim=1)
            scores = self.guard.detector.score(scored)
        seen = sample_hashes(inputs.features if isinstance(inputs, Batch) else inputs)
        return {"score": scores.cpu().numpy(), "label": labels.cpu().numpy(), SEEN: seen.numpy()}


class FileDecisions(Actor):
    """An actor that reads and scores one part of the output of `score_files` at a time."""

    def start(self, opened: OpenedGuard, rows: Rows, batch_size: int) -> None:
        self.opened = opened._replace(guard=opened.guard.to(self.device))
        self.rows, self.batch_size = rows, batch_size

    def __call__(self, work: Any) -> Any:
        [part] = work.to_pylist()
        span = range(part["start"], part["stop"])
        pa = require("pyarrow", "ray")
        if isinstance(self.rows, ImageRows):
            # In threads: a fork of a worker of Ray, which has threads of its own, can hang.
            found = image_tables(self.opened, self.rows, [(part["part"], span)], self.batch_size, 1, processes=False)
            table = Decided.concat([table for _, _, table in found]).to_arrow()
        else:
            table = feature_table(self.opened, self.rows, span).to_arrow()
        numbers, places = np.full(len(span), part["part"]), np.arange(span.start, span.stop)
        return table.append_column("part", pa.array(numbers)).append_column("place", pa.array(places))
