"""Score files: every row of the input once in the output, in order, in memory that does not grow
with the input."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fdbd.core.batch import Batch
from fdbd.core.preprocessing import Preprocess
from fdbd.data.decoding import in_order, prepare
from fdbd.data.features import RowBatch, Widths
from fdbd.data.images import Images, cut
from fdbd.data.inputs import Rows, open_rows
from fdbd.decision.guard_file import OpenedGuard, open_guard
from fdbd.jobs.output import Decided, Output, decide
from fdbd.util.files import refuse_overlap
from fdbd.util.progress import Bar

if TYPE_CHECKING:
    from fdbd.jobs.ray import Workers

PART_ROWS = 1024  # images of a part of the output: what a kill loses at most
FEATURE_PART_ROWS = 65_536
FEATURE_THREADS = 2

Part = tuple[int, range]  # number of a part of the output, and its rows
Tables = Generator[tuple[Part, Sequence[Decided]], None, None]
"""Parts with decisions on some of their rows, part after part."""


@dataclass(frozen=True)
class Engine:
    """Where a job runs the model, and how."""

    name: str = "local"
    """"local": in this process; "ray": in the workers of a cluster, each of whose nodes reads data
    by the same path."""
    address: str | None = None  #: of the cluster, as for `fdbd.jobs.ray.connect`
    device: str | None = "auto"  #: as torch names it; on Ray, "cuda" gives each worker a GPU
    batch_size: int = 128
    workers: int | None = None
    """Processes that decode images, or on Ray tasks that run the model at once; None: as many as
    there is room for."""
    progress: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1 or (self.workers is not None and self.workers < 1):
            raise ValueError(
                f"batch size is {self.batch_size} and workers are {self.workers}, expected at least 1"
            )
        if self.name not in ("local", "ray"):
            raise ValueError(f"engine is {self.name!r}, expected 'local' or 'ray'")
        if self.address is not None and self.name != "ray":
            raise ValueError(
                "an address is that of a Ray cluster: say --engine ray (engine='ray') too"
            )

    @property
    def home(self) -> str | None:
        """Where the model is loaded: on Ray it goes to its device in the workers."""
        return "cpu" if self.name == "ray" else self.device

    def cluster(self) -> Workers | None:
        """The workers of the cluster, which is joined now; None where the model runs in this
        process."""
        if self.name != "ray":
            return None
        from fdbd.jobs import ray

        ray.connect(self.address)
        return ray.Workers(
            self.workers, gpus=1.0 if self.device == "cuda" else 0.0, batch_size=self.batch_size
        )


class Summary(NamedTuple):
    """What a run did."""

    rows: int  #: of the output
    ood: int
    unreadable: int  #: rows with an `error`; they count as OOD too
    computed: int  #: rows that this run scored; the others were finished before
    seconds: float  #: of scoring, without the time to load the model
    skipped: dict[str, int]  #: entries of a folder that were skipped, by reason
    discoveries: int | None = (
        None  #: rows that are OOD at the false discovery rate that was asked for
    )

    @property
    def rate(self) -> float:
        """Rows per second."""
        return self.computed / self.seconds if self.seconds else 0.0


def score_files(
    guard: str | os.PathLike[str],
    data: str,
    out: str | os.PathLike[str],
    engine: Engine = Engine(),
    model: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    trust: bool = False,
    *,
    split: str = "test",
    restart: bool = False,
    nearest: bool = False,
    fdr: float | None = None,
) -> Summary:
    """Score a folder of images, an NPZ file, a dataset, or Parquet/NPZ features, into Parquet or
    CSV.

    A run that was killed continues where it ended when it is started again with the same guard,
    data and `out`.

    Args:
        guard, model, checkpoint, trust: as for `open_guard`.
        data, split: as for `open_rows`.
        out: a ``.parquet`` or ``.csv`` file, which appears when it is whole; or a folder for
            Parquet parts.
        engine: where the model runs; the output is the same.
        restart: throw away what an earlier run with another guard or other data left unfinished.
        nearest: also write the class beyond the nearest decision boundary of each row.
        fdr: also write which rows are OOD at this false discovery rate, as `Decision.discoveries`
            finds them.
    """
    refuse_overlap(out, [guard, data, checkpoint, model])
    rows = open_rows(data, split)
    names = rows.names if isinstance(rows, Images) else range(0)
    output = Output(Path(out), names, restart, nearest=nearest, fdr=fdr)
    opened = open_guard(guard, model=model, checkpoint=checkpoint, trust=trust, device=engine.home)
    return Scoring(opened, rows, engine, nearest).write(output, engine.cluster())


@dataclass(frozen=True)
class Scoring:
    """A guard's decisions on rows, part by part."""

    opened: OpenedGuard
    rows: Rows
    engine: Engine = Engine()
    nearest: bool = False

    def __post_init__(self) -> None:
        guard, rows = self.opened.guard, self.rows
        _ = guard.calibrated  # an error where there is no threshold
        if not isinstance(rows, Images):
            rows.check(self.widths)
        elif self.opened.preprocess is None:
            raise ValueError(
                f"the guard takes features, not images such as {rows.source}: it was fitted without a model; name the "
                "model with --model, or give a Parquet or NPZ file of features"
            )

    def write(self, output: Output, pool: Workers | None = None) -> Summary:
        """Fill in the parts of an output that are missing, and finish it."""
        rows, part_rows = (
            self.rows,
            PART_ROWS if isinstance(self.rows, Images) else FEATURE_PART_ROWS,
        )
        identity = {
            "guard": self.opened.sha256,
            "data": rows.key,
            "rows": len(rows),
            "part_rows": part_rows,
        }
        with output.hold({**identity, "columns": output.columns}):
            spans = rows.spans(part_rows)
            todo = [
                (number, span) for number, span in enumerate(spans) if not output.has(number, span)
            ]
            waiting = sum(len(span) for _, span in todo)
            done, start = len(rows) - waiting, time.perf_counter()
            tables = (
                self.tables(todo) if pool is None else pool.run(self.opened.guard, self.part, todo)
            )
            with (
                Bar("scoring", len(rows), enabled=self.engine.progress) as bar,
                contextlib.closing(tables) as found,
            ):
                collected: list[Decided] = []
                for (number, span), some in found:
                    collected += some
                    done += _count(some)
                    bar.update(done)
                    if _count(collected) == len(span):
                        output.write(number, collected)
                        collected = []
            seconds = time.perf_counter() - start
            total, ood, unreadable, discoveries = output.finish(len(rows), len(spans))
        skipped = rows.skipped if isinstance(rows, Images) else {}
        return Summary(total, ood, unreadable, waiting, seconds, skipped, discoveries)

    def tables(self, todo: Sequence[Part]) -> Tables:
        """Decisions on the rows of these parts, in order."""
        if isinstance(self.rows, Images):
            parts = (part for part in todo for _ in cut(part[1], self.engine.batch_size))
            for part, table in zip(parts, self.decide([span for _, span in todo])):
                yield part, [table]
            return
        # Each thread reads and scores a part by itself: torch's own threads would only get in their
        # way.
        threads, workers = (
            torch.get_num_threads(),
            1 if self.rows.is_sequential else FEATURE_THREADS,
        )
        try:
            with ThreadPoolExecutor(
                workers, initializer=torch.set_num_threads, initargs=(1,)
            ) as pool:
                yield from zip(todo, in_order(pool, self.part, todo, workers + 1))
        finally:
            torch.set_num_threads(threads)

    @property
    def widths(self) -> Widths:
        """Numbers that the guard takes in each row of features and of logits."""
        head = self.opened.guard.detector.head
        return Widths(head.num_features, head.num_classes)

    def part(self, part: Part) -> list[Decided]:
        """Decisions on the rows of one part. Images are decoded by a thread: a fork of a worker of
        Ray can hang."""
        return list(self.decide([part[1]], processes=False))

    def decide(
        self, spans: Sequence[range], processes: bool = True
    ) -> Generator[Decided, None, None]:
        """Decisions on the rows of these spans, in order, batch by batch."""
        guard, preprocess, rows = self.opened.guard, self.opened.preprocess, self.rows
        batches = read_batches(rows, spans, self.widths, preprocess, self.engine, processes)
        with contextlib.closing(batches):
            for numbers, inputs, errors in batches:
                names = (
                    rows.names[numbers[0] : numbers[-1] + 1]
                    if isinstance(rows, Images)
                    else numbers
                )
                yield decide(
                    guard, RowBatch(names, inputs, errors), self.opened.class_names, self.nearest
                )


def read_batches(
    rows: Rows,
    spans: Sequence[Any],
    widths: Widths,
    preprocess: Preprocess | None,
    engine: Engine,
    processes: bool = True,
    labels: bool = False,
) -> Generator[tuple[Any, Tensor | Batch, Mapping[int, str]], None, None]:
    """For each batch of these spans, in order: its row numbers, the inputs of the readable rows,
    and what is wrong with the others by their place in the batch. Features come with labels if
    wanted; images are decoded ahead, in processes or by a thread."""
    if not isinstance(rows, Images):
        for span in spans:
            yield from rows.read(span, widths, labels)
        return
    assert preprocess is not None
    pieces = [piece for span in spans for piece in cut(span, engine.batch_size)]
    workers, pin = (
        engine.workers if processes else 1,
        engine.device != "cpu" and torch.cuda.is_available(),
    )
    with contextlib.closing(
        prepare(rows.images, preprocess, pieces, workers=workers, processes=processes, pin=pin)
    ) as prepared:
        for piece, inputs, failures in prepared:
            yield piece, inputs, {piece.index(row): reason for row, reason in failures}


def _count(tables: Sequence[Decided]) -> int:
    return sum(len(table["is_ood"]) for table in tables)
