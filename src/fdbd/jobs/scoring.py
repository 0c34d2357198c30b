"""Score files: every row of the input once in the output, in order, in memory that does not grow
with the input."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import numpy as np
import torch

from fdbd.core.pixels import open_image, upright_size
from fdbd.core.preprocessing import Preprocess
from fdbd.core.tokenizer import TextTokenizer
from fdbd.data.columns import ENDINGS, ColumnFile, TextRows, open_columns
from fdbd.data.decoding import in_order, prepare
from fdbd.data.features import FeatureRows, RowBatch, Widths
from fdbd.data.images import Images, Names, cut
from fdbd.data.inputs import Rows, open_rows
from fdbd.data.label_maps import MaskFolder, mask_of
from fdbd.decision.guard_file import OpenedGuard, open_guard
from fdbd.decision.rows import Decided, decide_map_rows, decide_rows, text_column
from fdbd.jobs.output import Output
from fdbd.util.files import refuse_overlap
from fdbd.util.progress import Bar

if TYPE_CHECKING:
    from fdbd.jobs.ray import Workers

Preparation = Union[Preprocess, TextTokenizer]
"""Turns an image or a text into what the model takes."""
PART_ROWS = 1024
"""Images or texts of a part of the output: what a kill loses at most."""
FEATURE_PART_ROWS = 65_536
FEATURE_THREADS = 2
MAP_BATCH_SIZE = 8
"""The most images in a batch if the model predicts maps: its inner maps are large."""

Part = tuple[int, range]
"""The number of a part of the output, and its rows."""
Tables = Generator[tuple[Part, Sequence[Decided]], None, None]
"""Parts with decisions on some of their rows, part after part."""


@dataclass(frozen=True)
class Engine:
    """Where a job runs the model, and how."""

    name: str = "local"
    """"local": in this process; "ray": in the workers of a cluster, each of whose nodes reads data
    by the same path."""
    address: str | None = None
    """Address of the cluster, as for `fdbd.jobs.ray.connect`."""
    device: str | None = "auto"
    """As torch names it; on Ray, "cuda" gives each worker a GPU."""
    batch_size: int = 128
    workers: int | None = None
    """Processes that decode images, or on Ray tasks that run the model at once; None: as many as
    there is room for."""
    progress: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"the batch size is {self.batch_size}, expected at least 1")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"there are {self.workers} workers, expected at least 1")
        if self.name not in ("local", "ray"):
            raise ValueError(f"engine is {self.name!r}, expected 'local' or 'ray'")
        if self.address is not None and self.name != "ray":
            raise ValueError(
                "an address names a Ray cluster: give --engine ray (engine='ray') with it"
            )

    @property
    def home(self) -> str | None:
        """Where the model is loaded: on Ray it goes to its device in the workers."""
        return "cpu" if self.name == "ray" else self.device

    def cluster(self) -> Workers | None:
        """The workers of the cluster, which is joined now; None if the model runs in this
        process."""
        if self.name != "ray":
            return None
        from fdbd.jobs import ray

        ray.connect(self.address)
        gpus = 1.0 if self.device == "cuda" else 0.0
        return ray.Workers(self.workers, gpus=gpus, batch_size=self.batch_size)


def engine_for_maps(engine: Engine) -> Engine:
    """The engine with batches that a model of maps can hold; ValueError if it is a cluster."""
    if engine.name != "local":
        raise ValueError(
            "a model that predicts maps runs in this process alone: leave --engine out"
        )
    return replace(engine, batch_size=min(engine.batch_size, MAP_BATCH_SIZE))


class Summary(NamedTuple):
    """What a run did."""

    rows: int
    """Rows of the output."""
    ood: int
    unreadable: int
    """Rows with an `error`; they count as OOD too."""
    computed: int
    """Rows that this run scored; the others were finished before."""
    seconds: float
    """Seconds of scoring, without the time to load the model."""
    skipped: dict[str, int]
    """Entries of a folder that were skipped, by reason."""
    discoveries: int | None = None
    """Rows that are OOD at the false discovery rate, if one was asked for."""

    @property
    def rows_per_second(self) -> float:
        """Rows that this run scored, per second."""
        return self.computed / self.seconds if self.seconds else 0.0

    @property
    def ood_rate(self) -> float:
        """Share of the rows of the output that are OOD, a fraction."""
        return self.ood / self.rows if self.rows else 0.0

    def to_dict(self) -> dict[str, object]:
        """JSON values."""
        return {
            **self._asdict(),
            "rows_per_second": self.rows_per_second,
            "ood_rate": self.ood_rate,
        }


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
    text: str | None = None,
    keep: Sequence[str] = (),
    masks: str | os.PathLike[str] | None = None,
) -> Summary:
    """Score a folder of images, an NPZ file, a dataset, features in Parquet, NPZ or CSV, or texts
    in Parquet, CSV or JSON Lines, into Parquet or CSV.

    A run that was killed continues where it ended when it is started again with the same guard,
    data and `out`.

    Args:
        guard, model, checkpoint, trust: as for `open_guard`.
        data, split: as for `open_rows`.
        out: a ``.parquet`` or ``.csv`` file, which appears when it is whole; or a folder for
            Parquet parts.
        engine: where the model runs; the output is the same.
        restart: discard what an earlier run with another guard or dataset left unfinished.
        nearest: also write the class behind the nearest decision boundary of each row.
        fdr: also write which rows are OOD at this false discovery rate, as
            `Decision.discoveries` finds them.
        text: the column of the texts, for a model of texts.
        keep: columns of the input to carry through to the output, such as ids.
        masks: for a guard that decides on maps, the folder to which the mask of each image is
            written, see `MaskFolder`.
    """
    refuse_overlap(out, [guard, data, checkpoint, model])
    rows = open_rows(data, split, text)
    kept = _open_kept(rows, keep)
    names = rows.names if isinstance(rows, Images) else range(0)
    kinds = {}
    if kept is not None:
        kinds = {name: kept.kind(name) for name in keep}
    output = Output(Path(out), names, restart, nearest=nearest, fdr=fdr, keep=kinds)
    opened = open_guard(guard, model=model, checkpoint=checkpoint, trust=trust, device=engine.home)
    is_of_maps = opened.guard.map_threshold is not None
    if is_of_maps:
        engine = engine_for_maps(engine)
        output.add_ood_share()
    mask_folder = None if masks is None else MaskFolder(Path(masks))
    scoring = Scoring(opened, rows, engine, nearest, kept, tuple(keep), mask_folder)
    return scoring.write(output, engine.cluster())


def _open_kept(rows: Rows, keep: Sequence[str]) -> ColumnFile | None:
    """The file whose columns are carried through; None if none are asked for."""
    if not keep:
        return None
    is_table = not isinstance(rows, Images) and Path(rows.source).suffix.lower() in ENDINGS
    if not is_table:
        raise ValueError(
            f"--keep carries columns of a table through, and {rows.source} is not one: give "
            f"{', '.join(ENDINGS)}"
        )
    kept = open_columns(rows.source)
    kept.require(keep, "--keep")
    return kept


@dataclass(frozen=True)
class Scoring:
    """A guard's decisions on rows, part by part."""

    opened: OpenedGuard
    rows: Rows
    engine: Engine = Engine()
    nearest: bool = False
    kept: ColumnFile | None = None
    """The file whose columns `keep` are carried through."""
    keep: tuple[str, ...] = ()
    masks: MaskFolder | None = None
    """Where the masks of a guard of maps go."""

    def __post_init__(self) -> None:
        # An error if there is no threshold.
        self.opened.guard.stages.require_any_threshold()
        self._check_maps()
        if isinstance(self.rows, FeatureRows):
            self.rows.check(self.widths)
        elif isinstance(self.rows, TextRows):
            if self.tokenizer is None:
                raise ValueError(
                    f"the guard has no tokenizer for texts such as those of {self.rows.source}: it "
                    "takes images or features; fit one with fdbd fit hf:MODEL DATA --text COLUMN"
                )
        elif self.opened.preprocess is None and self.tokenizer is None:
            raise ValueError(
                f"the guard takes features, not images such as {self.rows.source}, since its file "
                "names no model: name it with --model, or give a Parquet or NPZ file of features"
            )
        elif self.opened.preprocess is None:
            raise ValueError(
                f"the guard takes texts, not images such as {self.rows.source}: give a file, and "
                "its column of texts with --text"
            )

    @property
    def is_of_maps(self) -> bool:
        """Whether the guard decides on each position of a map."""
        return self.opened.guard.map_threshold is not None

    def _check_maps(self) -> None:
        """ValueError for what only one of the two kinds of guards can do."""
        if not self.is_of_maps:
            if self.masks is not None:
                raise ValueError(
                    "--masks is for a guard that decides on maps, and this one gives one verdict "
                    "per image: leave it out"
                )
            return
        if self.nearest:
            raise ValueError(
                "--nearest names one boundary per image, and the guard decides on maps: leave it "
                "out"
            )
        if not isinstance(self.rows, Images):
            raise ValueError(
                f"the guard decides on maps of images, and {self.rows.source} holds none: give "
                "images"
            )

    @cached_property
    def tokenizer(self) -> TextTokenizer | None:
        """How texts are prepared; None if the model takes none."""
        return self.opened.tokenizer

    @property
    def preparation(self) -> Preparation | None:
        """Turns a row into what the model takes; None for features."""
        if isinstance(self.rows, TextRows):
            return self.tokenizer
        return self.opened.preprocess

    def write(self, output: Output, pool: Workers | None = None) -> Summary:
        """Fill in the parts of an output that are missing, and finish it."""
        part_rows = FEATURE_PART_ROWS if isinstance(self.rows, FeatureRows) else PART_ROWS
        identity = {
            "guard": self.opened.sha256,
            "data": self.rows.key,
            "rows": len(self.rows),
            "part_rows": part_rows,
            "columns": output.columns,
        }
        with output.hold(identity):
            spans = self.rows.spans(part_rows)
            missing: list[Part] = []
            for number, span in enumerate(spans):
                if not output.has(number, span):
                    missing.append((number, span))
            start = time.perf_counter()
            self._write_parts(output, missing, pool)
            seconds = time.perf_counter() - start
            totals = output.finish(len(self.rows), len(spans))
        return Summary(
            totals.rows,
            totals.ood,
            totals.unreadable,
            computed=_count_rows(missing),
            seconds=seconds,
            skipped=self.rows.skipped if isinstance(self.rows, Images) else {},
            discoveries=totals.discoveries,
        )

    def _write_parts(self, output: Output, missing: Sequence[Part], pool: Workers | None) -> None:
        """Score the rows of these parts, and write each part when it is whole."""
        if pool is None:
            tables = self.tables(missing)
        else:
            tables = pool.run(self.opened.guard, self.part, missing)
        done = len(self.rows) - _count_rows(missing)
        # Decisions come batch by batch; those of a part wait until it is whole.
        waiting: list[Decided] = []
        rows_waiting = 0
        with (
            Bar("scoring", len(self.rows), enabled=self.engine.progress) as bar,
            contextlib.closing(tables) as found,
        ):
            for (number, span), decided in found:
                new_rows = sum(len(table["is_ood"]) for table in decided)
                waiting += decided
                rows_waiting += new_rows
                done += new_rows
                bar.update(done)
                if rows_waiting == len(span):
                    output.write(number, waiting)
                    waiting = []
                    rows_waiting = 0

    def tables(self, parts: Sequence[Part]) -> Tables:
        """Decisions on the rows of these parts, in order, in this process."""
        if isinstance(self.rows, FeatureRows):
            yield from self._feature_tables(parts, self.rows)
        else:
            yield from self._network_tables(parts)

    def _network_tables(self, parts: Sequence[Part]) -> Tables:
        """Batch by batch: images of the next part are decoded while the model is at this one."""
        part_of_batch = []
        for part in parts:
            for _ in cut(part[1], self.engine.batch_size):
                part_of_batch.append(part)
        spans = [span for _, span in parts]
        for part, decided in zip(part_of_batch, self.decide(spans)):
            yield part, [decided]

    def _feature_tables(self, parts: Sequence[Part], rows: FeatureRows) -> Tables:
        """Part by part: each thread reads and scores a part by itself, and torch's own threads
        would only get in their way."""
        threads_before = torch.get_num_threads()
        workers = 1 if rows.is_sequential else FEATURE_THREADS
        pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
        try:
            with pool:
                yield from zip(parts, in_order(pool, self.part, parts, workers + 1))
        finally:
            torch.set_num_threads(threads_before)

    @cached_property
    def guard_id(self) -> str:
        """The guard's id, which every row carries."""
        return self.opened.guard.id

    @property
    def widths(self) -> Widths:
        """Numbers that the guard takes in each row of features and of logits."""
        head = self.opened.guard.detector.head
        return Widths(head.num_features, head.num_classes)

    def part(self, part: Part) -> list[Decided]:
        """Decisions on the rows of one part. Images are decoded by a thread: a fork of a worker of
        Ray can hang."""
        _, span = part
        return list(self.decide([span], processes=False))

    def decide(
        self, spans: Sequence[range], processes: bool = True
    ) -> Generator[Decided, None, None]:
        """Decisions on the rows of these spans, in order, batch by batch."""
        opened = self.opened
        rows = self.rows
        batches = read_batches(rows, spans, self.widths, self.preparation, self.engine, processes)
        with contextlib.closing(batches):
            for numbers, inputs, errors in batches:
                names: Names = numbers
                if isinstance(rows, Images):
                    names = rows.names[numbers[0] : numbers[-1] + 1]
                batch = RowBatch(names, inputs, errors)
                if self.is_of_maps:
                    decided = self._decide_maps(batch)
                else:
                    decided = decide_rows(opened.guard, batch, opened.class_names, self.nearest)
                decided["guard"] = text_column([self.guard_id] * len(names))
                yield self._with_kept(decided, numbers)

    def _decide_maps(self, batch: RowBatch) -> Decided:
        """Decisions of a guard of maps. The masks are written first, so that a part of the output
        that is there has all of its masks."""
        decided, decision = decide_map_rows(self.opened.guard, batch, self.opened.class_names)
        if self.masks is None or decision is None:
            return decided
        assert isinstance(self.rows, Images)
        assert self.opened.preprocess is not None
        readable = []
        for place, name in enumerate(batch.names):
            if place not in batch.errors:
                readable.append(str(name))
        for name, is_ood in zip(readable, decision.is_ood.cpu().numpy()):
            if isinstance(self.rows.names, range):
                height, width = self.rows[int(name)].shape[:2]
            else:
                height, width = size_of_file(self.rows, name)
            mask = mask_of(is_ood, self.opened.preprocess, height, width)
            self.masks.write(name, mask)
        return decided

    def _with_kept(self, decided: Decided, numbers: range) -> Decided:
        """The decisions with the columns that are carried through, which follow the first
        column."""
        if self.kept is None:
            return decided
        first = next(iter(decided))
        columns: Decided = {first: decided.pop(first)}
        for name, values in zip(self.keep, self.kept.read(numbers, self.keep)):
            columns[name] = _kept_column(values, self.kept.kind(name))
        return {**columns, **decided}


def _kept_column(values: list[Any], kind: str) -> Any:
    """Values of the input as a column of the output, masked where they are missing."""
    is_missing = [value is None for value in values]
    if kind == "string":
        return np.ma.array(text_column(_filled(values, "")), mask=is_missing)
    types: dict[str, Any] = {"int64": np.int64, "double": np.float64, "bool": np.bool_}
    numbers = np.array(_filled(values, 0), types[kind])
    return np.ma.array(numbers, mask=is_missing)


def _filled(values: list[Any], filling: Any) -> list[Any]:
    """The values with `filling` in place of those that are missing."""
    return [filling if value is None else value for value in values]


def size_of_file(rows: Images, name: str) -> tuple[int, int]:
    """Height and width of an image file, from its header."""
    with open_image(Path(rows.images.folder, name)) as image:
        return upright_size(image)


def read_batches(
    rows: Rows,
    spans: Sequence[Any],
    widths: Widths,
    preparation: Preparation | None,
    engine: Engine,
    processes: bool = True,
    labels: bool = False,
) -> Generator[tuple[Any, Any, Mapping[int, str]], None, None]:
    """For each batch of these spans, in order: its row numbers, the inputs of the readable rows,
    and what is wrong with the others by their place in the batch. Features come with labels if
    wanted; images are decoded ahead, in processes or by a thread."""
    if isinstance(rows, FeatureRows):
        for span in spans:
            yield from rows.read(span, widths, labels)
    elif isinstance(rows, TextRows):
        assert isinstance(preparation, TextTokenizer)
        yield from _text_batches(rows, spans, preparation, engine.batch_size)
    else:
        assert isinstance(preparation, Preprocess)
        yield from _image_batches(rows, spans, preparation, engine, processes)


def _text_batches(
    rows: TextRows, spans: Sequence[Any], tokenizer: TextTokenizer, batch_size: int
) -> Generator[tuple[Any, Any, Mapping[int, str]], None, None]:
    encode = tokenizer.encoder()
    for span in spans:
        for piece in cut(span, batch_size):
            texts, errors = rows.read(piece)
            yield piece, encode(texts), errors


def _image_batches(
    rows: Images, spans: Sequence[Any], preprocess: Preprocess, engine: Engine, processes: bool
) -> Generator[tuple[Any, Any, Mapping[int, str]], None, None]:
    """For each batch: its row numbers, the images that could be read, ready for the model, and why
    each of the others could not, by its place in the batch."""
    pieces = []
    for span in spans:
        pieces += cut(span, engine.batch_size)
    prepared = prepare(
        rows.images,
        preprocess,
        pieces,
        workers=engine.workers if processes else 1,
        processes=processes,
        pin=engine.device != "cpu" and torch.cuda.is_available(),
    )
    with contextlib.closing(prepared):
        for piece, inputs, failures in prepared:
            yield piece, inputs, {piece.index(row): reason for row, reason in failures}


def _count_rows(parts: Sequence[Part]) -> int:
    return sum(len(span) for _, span in parts)
