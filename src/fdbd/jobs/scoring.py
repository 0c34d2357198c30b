"""Score files: every row of the input once in the output, in order, in memory that does not grow with the input.

Engines differ in where the tables of decisions are made: here, or by `fdbd.jobs.ray` on a cluster.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union

import torch

from fdbd.data.decoding import cut, in_order, prepare
from fdbd.data.features import FeatureRows, RowBatch, Widths, holds_features, open_features
from fdbd.data.inputs import ImageRows, open_images
from fdbd.decision.guard import NotCalibratedError
from fdbd.decision.guard_file import OpenedGuard, open_guard
from fdbd.jobs.output import Parts, decide_rows, schema
from fdbd.util.extras import require
from fdbd.util.files import hash_file
from fdbd.util.progress import Bar

PART_ROWS = 1024
"""Images of a part of the output: what a kill loses at most."""
FEATURE_PART_ROWS = 65_536
FEATURE_THREADS = 2

Engine = Literal["local", "ray"]
Rows = Union[ImageRows, FeatureRows]
Part = tuple[int, range]
"""Number of a part of the output, and its rows."""
Tables = Generator[tuple[int, range, Any], None, None]
"""Number and rows of a part, and a table of decisions on some of its rows."""


class Summary(NamedTuple):
    """What a run did."""

    rows: int
    """Of the output."""
    ood: int
    unreadable: int
    """Rows with an `error`; they count as OOD too."""
    computed: int
    """Rows that this run scored; the others were finished before."""
    seconds: float
    """Of scoring, without the time to load the model."""

    @property
    def rate(self) -> float:
        """Rows a second."""
        return self.computed / self.seconds if self.seconds else 0.0


def score_files(
    guard: str | os.PathLike[str],
    data: str,
    out: str | os.PathLike[str],
    *,
    engine: Engine = "local",
    address: str | None = None,
    model: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    trust: bool = False,
    device: str | None = None,
    split: str = "test",
    batch_size: int = 128,
    workers: int | None = None,
    restart: bool = False,
    progress: bool = True,
) -> Summary:
    """Score a folder of images, an NPZ file, a dataset, or Parquet/NPZ features, into Parquet or CSV.

    A run that was killed goes on where it ended when it is started again with the same guard, data and `out`.

    Args:
        guard: the guard's file.
        data: what to score: see `open_rows`.
        out: a ``.parquet`` or ``.csv`` file, which appears when it is whole; or a folder for Parquet parts.
        engine: where the model runs: in this process, or in the actors of a Ray cluster, each of whose nodes reads
            `data` by the same path; the output is the same.
        address: of the cluster, as for `fdbd.jobs.ray.connect`.
        model, checkpoint, trust, device: as for `open_guard`.
        split: which part of a dataset by name.
        batch_size: images that the model sees at once.
        workers: processes that decode images, None: one a core; on Ray, actors that hold the model, None: as many as
            the cluster's logical CPUs allow, less one.
        restart: throw away what an earlier run with another guard or other data left unfinished.
        progress: show a bar when it takes more than two seconds.
    """
    check_engine(engine, address, batch_size, workers)
    rows = open_rows(data, split)
    home = "cpu" if engine == "ray" else device  # on Ray the model goes to its device in the actors
    opened = open_guard(guard, model=model, checkpoint=checkpoint, trust=trust, device=home)
    _check_fit(opened, rows)
    parts = _parts_of(guard, rows, Path(out), restart)
    if engine == "ray":
        from fdbd.jobs import ray

        ray.connect(address)
        pool = ray.Workers.on(device, workers, batch_size)
        return _write_parts(parts, rows, lambda todo: ray.file_tables(opened, rows, todo, pool), progress)
    return _write_parts(parts, rows, lambda todo: _tables(opened, rows, todo, batch_size, workers), progress)


def _write_parts(parts: Parts, rows: Rows, tables_of: Callable[[Sequence[Part]], Tables], progress: bool) -> Summary:
    """Fill in the parts that are missing, and finish the output.

    Args:
        parts: of the output.
        rows: the input.
        tables_of: from parts to tables of decisions that cover each part once, the tables of a part one after another.
        progress: show a bar.
    """
    with parts.hold():
        spans = rows.spans(parts.settings["part_rows"])
        todo = [(number, span) for number, span in enumerate(spans) if not parts.has(number, span)]
        waiting = sum(len(span) for _, span in todo)
        done = len(rows) - waiting
        start = time.perf_counter()
        bar = Bar("scoring", len(rows)) if progress else None
        with contextlib.ExitStack() as stack:
            if bar is not None:
                stack.enter_context(bar)
            tables = stack.enter_context(contextlib.closing(tables_of(todo)))
            collected: list[Any] = []
            for number, span, table in tables:
                collected.append(table)
                done += len(table)
                if bar is not None:
                    bar.update(done)
                if sum(map(len, collected)) == len(span):
                    parts.write(number, require("pyarrow", "report").concat_tables(collected))
                    collected = []
        seconds = time.perf_counter() - start
        return Summary(*parts.finish(len(rows), len(spans)), waiting, seconds)


def check_engine(engine: str, address: str | None, batch_size: int, workers: int | None) -> None:
    """One sentence where these do not go together."""
    if batch_size < 1 or (workers is not None and workers < 1):
        raise ValueError(f"batch size is {batch_size} and workers are {workers}, expected at least 1")
    if engine not in ("local", "ray"):
        raise ValueError(f"engine is {engine!r}, expected 'local' or 'ray'")
    if address is not None and engine != "ray":
        raise ValueError("an address is that of a Ray cluster: say --engine ray (engine='ray') too")


def open_rows(data: str, split: str = "test") -> Rows:
    """Rows by what a user typed: a folder, a file of images or features, or the name of a dataset. Their paths are
    absolute: the workers of an engine may start in other folders."""
    path = Path(data).expanduser()
    data = str(path.absolute()) if path.exists() else data
    return open_features(data) if holds_features(data) else open_images(data, split)


def _check_fit(opened: OpenedGuard, rows: Rows) -> None:
    """One sentence where a guard cannot score these rows."""
    if opened.guard.threshold is None:
        raise NotCalibratedError("the guard has no threshold: calibrate it, then save it again")
    if isinstance(rows, ImageRows):
        if opened.preprocess is None:
            raise ValueError(
                f"the guard takes features, not images such as {rows.source}: it was fitted without a model; name the "
                "model with --model, or give a Parquet or NPZ file of features"
            )
    else:
        rows.check(Widths.of(opened.guard.detector.head))


def _parts_of(guard: str | os.PathLike[str], rows: Rows, out: Path, restart: bool) -> Parts:
    """The parts of the output: the same run again when guard and rows are the same."""
    is_images = isinstance(rows, ImageRows)
    identity = {"guard": hash_file(Path(guard)), "data": rows.key, "rows": len(rows)}
    settings = {"part_rows": PART_ROWS if is_images else FEATURE_PART_ROWS}
    return Parts(out, identity, schema(rows.names if isinstance(rows, ImageRows) else range(0)), settings, restart)


def _tables(opened: OpenedGuard, rows: Rows, todo: Sequence[Part], batch_size: int, workers: int | None) -> Tables:
    """Decisions on all rows of the parts, in order: number and rows of the part, and a table of some of its rows."""
    if isinstance(rows, ImageRows):
        return image_tables(opened, rows, todo, batch_size, workers)
    return _feature_tables(opened, rows, todo)


def image_tables(
    opened: OpenedGuard,
    rows: ImageRows,
    todo: Sequence[Part],
    batch_size: int,
    workers: int | None,
    processes: bool = True,
) -> Tables:
    """Decisions on the images of these parts, in order; `workers` decode them ahead, in processes or in threads."""
    assert opened.preprocess is not None
    pieces = [(number, span, piece) for number, span in todo for piece in cut(span, batch_size)]
    batches = prepare(
        rows.pixels, opened.preprocess, [piece for _, _, piece in pieces], workers=workers, processes=processes
    )
    with contextlib.closing(batches):
        for (number, span, piece), batch in zip(pieces, batches):
            errors = {failure.row - piece.start: failure.reason for failure in batch.failures}
            named = RowBatch(rows.names[piece.start : piece.stop], batch.inputs, errors)
            yield number, span, decide_rows(opened.guard, named, opened.class_names)


def feature_table(opened: OpenedGuard, rows: FeatureRows, span: range) -> Any:
    """Decisions on the features of a span."""
    batches = rows.read(span, Widths.of(opened.guard.detector.head))
    tables = [decide_rows(opened.guard, batch, opened.class_names) for batch in batches]
    return require("pyarrow", "report").concat_tables(tables)


def _feature_tables(opened: OpenedGuard, rows: FeatureRows, todo: Sequence[Part]) -> Tables:
    def decide(part: Part) -> Any:
        return feature_table(opened, rows, part[1])

    # Each thread reads and scores a part by itself: torch's own threads would only get in their way.
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(FEATURE_THREADS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for (number, span), table in zip(todo, in_order(pool, decide, todo, FEATURE_THREADS + 1)):
                yield number, span, table
    finally:
        torch.set_num_threads(threads)
