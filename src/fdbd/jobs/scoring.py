"""Score files: every row of the input once in the output, in order, in memory that does not grow with the input.

Engines differ in where the tables of decisions are made: here, or by `fdbd.jobs.ray` on a cluster.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from fdbd.data.decoding import in_order, prepare
from fdbd.data.features import FeatureRows, RowBatch, Widths
from fdbd.data.images import Images, cut
from fdbd.data.inputs import Rows, open_rows
from fdbd.decision.answers import NotCalibratedError
from fdbd.decision.guard_file import OpenedGuard, open_guard
from fdbd.jobs.output import Decided, Output, decide
from fdbd.util.devices import device_of
from fdbd.util.files import refuse_overlap
from fdbd.util.progress import Bar

PART_ROWS = 1024
"""Images of a part of the output: what a kill loses at most."""
FEATURE_PART_ROWS = 65_536
FEATURE_THREADS = 2

Engine = Literal["local", "ray"]
Part = tuple[int, range]
"""Number of a part of the output, and its rows."""
Tables = Generator[tuple[Part, Sequence[Decided]], None, None]
"""Parts with decisions on some of their rows, part after part."""


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
    skipped: dict[str, int]
    """Entries of a folder that were passed over, by reason."""
    discoveries: int | None = None
    """Rows that are OOD at the false discovery rate that was asked for."""

    @property
    def rate(self) -> float:
        """Rows per second."""
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
    device: str | None = "auto",
    split: str = "test",
    batch_size: int = 128,
    workers: int | None = None,
    restart: bool = False,
    nearest: bool = False,
    fdr: float | None = None,
    progress: bool = True,
) -> Summary:
    """Score a folder of images, an NPZ file, a dataset, or Parquet/NPZ features, into Parquet or CSV.

    A run that was killed goes on where it ended when it is started again with the same guard, data and `out`.

    Args:
        guard: the guard's file.
        data: what to score, as in `fdbd.data.inputs.open_rows`.
        out: a ``.parquet`` or ``.csv`` file, which appears when it is whole; or a folder for Parquet parts.
        engine: where the model runs: in this process, or in the workers of a Ray cluster, each of whose nodes reads
            `data` by the same path; the output is the same.
        address: of the cluster, as for `fdbd.jobs.ray.connect`.
        model, checkpoint, trust, device: as for `open_guard`.
        split: which part of a dataset by name.
        batch_size: images that the model sees at once.
        workers: processes that decode images, None: one per core; on Ray, tasks that run the model at once, None: as
            many as the cluster has room for.
        restart: throw away what an earlier run with another guard or other data left unfinished.
        nearest: also write the class beyond the nearest decision boundary of each row.
        fdr: also write which rows are OOD at this false discovery rate, as `Decision.discoveries` finds them.
        progress: show a bar when it takes more than two seconds.
    """
    check_engine(engine, address, batch_size, workers)
    refuse_overlap(out, [guard, data, checkpoint, model])
    rows = open_rows(data, split)
    names = rows.names if isinstance(rows, Images) else range(0)
    output = Output(Path(out), names, restart, nearest=nearest, fdr=fdr)
    home = "cpu" if engine == "ray" else device  # on Ray the model goes to its device in the workers
    opened = open_guard(guard, model=model, checkpoint=checkpoint, trust=trust, device=home)
    _check_fit(opened, rows)
    identity = {"guard": opened.sha256, "data": rows.key, "rows": len(rows), **({"nearest": True} if nearest else {})}
    tables: Callable[[Sequence[Part]], Tables]
    if engine == "ray":
        from fdbd.jobs import ray

        ray.connect(address)
        tables = partial(ray.file_tables, opened, rows, ray.Workers.on(device, workers, batch_size), nearest)
    elif isinstance(rows, Images):
        tables = partial(image_tables, opened, rows, batch_size, workers, nearest)
    else:
        tables = partial(_feature_tables, opened, rows, nearest)
    return _write_parts(output, identity, rows, tables, progress)


def _write_parts(
    output: Output,
    identity: Mapping[str, Any],
    rows: Rows,
    tables_of: Callable[[Sequence[Part]], Tables],
    progress: bool,
) -> Summary:
    """Fill in the parts that are missing, and finish the output."""
    part_rows = PART_ROWS if isinstance(rows, Images) else FEATURE_PART_ROWS
    with output.hold(identity, {"part_rows": part_rows}):
        spans = rows.spans(output.settings["part_rows"])
        todo = [(number, span) for number, span in enumerate(spans) if not output.has(number, span)]
        waiting = sum(len(span) for _, span in todo)
        done = len(rows) - waiting
        start = time.perf_counter()
        with Bar("scoring", len(rows), enabled=progress) as bar, contextlib.closing(tables_of(todo)) as found:
            collected: list[Decided] = []
            for (number, span), tables in found:
                collected += tables
                done += sum(map(len, tables))
                bar.update(done)
                if sum(map(len, collected)) == len(span):
                    output.write(number, collected)
                    collected = []
        seconds = time.perf_counter() - start
        skipped = rows.skipped if isinstance(rows, Images) else {}
        counts = output.finish(len(rows), len(spans))
        return Summary(counts.rows, counts.ood, counts.unreadable, waiting, seconds, skipped, counts.discoveries)


def check_engine(engine: str, address: str | None, batch_size: int, workers: int | None) -> None:
    """One sentence where these do not go together."""
    if batch_size < 1 or (workers is not None and workers < 1):
        raise ValueError(f"batch size is {batch_size} and workers are {workers}, expected at least 1")
    if engine not in ("local", "ray"):
        raise ValueError(f"engine is {engine!r}, expected 'local' or 'ray'")
    if address is not None and engine != "ray":
        raise ValueError("an address is that of a Ray cluster: say --engine ray (engine='ray') too")


def _check_fit(opened: OpenedGuard, rows: Rows) -> None:
    """One sentence where a guard cannot score these rows."""
    if opened.guard.threshold is None:
        raise NotCalibratedError("the guard has no threshold: calibrate it, then save it again")
    classes, names = opened.guard.detector.head.num_classes, opened.class_names
    if names and len(names) != classes:
        raise ValueError(f"the guard names {len(names)} classes, and its head has {classes}: fit a new guard")
    if isinstance(rows, Images):
        if opened.preprocess is None:
            raise ValueError(
                f"the guard takes features, not images such as {rows.source}: it was fitted without a model; name the "
                "model with --model, or give a Parquet or NPZ file of features"
            )
    else:
        rows.check(Widths.of(opened.guard.detector.head))


def image_tables(
    opened: OpenedGuard,
    rows: Images,
    batch_size: int,
    workers: int | None,
    nearest: bool,
    todo: Sequence[Part],
    processes: bool = True,
) -> Tables:
    """Decisions on the images of these parts, in order; `workers` decode them ahead, in processes or in threads."""
    assert opened.preprocess is not None
    pieces = [(part, piece) for part in todo for piece in cut(part[1], batch_size)]
    batches = prepare(
        rows.images,
        opened.preprocess,
        [piece for _, piece in pieces],
        workers=workers,
        processes=processes,
        pin=device_of(opened.guard).type == "cuda",
    )
    with contextlib.closing(batches):
        for (part, piece), batch in zip(pieces, batches):
            errors = {failure.row - piece.start: failure.reason for failure in batch.failures}
            named = RowBatch(rows.names[piece.start : piece.stop], batch.inputs, errors)
            yield part, [decide(opened.guard, named, opened.class_names, nearest)]


def feature_part(opened: OpenedGuard, rows: FeatureRows, nearest: bool, part: Part) -> list[Decided]:
    """Decisions on the features of a part."""
    batches = rows.read(part[1], Widths.of(opened.guard.detector.head))
    return [decide(opened.guard, batch, opened.class_names, nearest) for batch in batches]


def _feature_tables(opened: OpenedGuard, rows: FeatureRows, nearest: bool, todo: Sequence[Part]) -> Tables:
    # Each thread reads and scores a part by itself: torch's own threads would only get in their way.
    threads, workers = torch.get_num_threads(), 1 if rows.is_sequential else FEATURE_THREADS
    work = partial(feature_part, opened, rows, nearest)
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from zip(todo, in_order(pool, work, todo, workers + 1))
    finally:
        torch.set_num_threads(threads)
