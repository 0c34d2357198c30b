"""Files on Ray: the spans of rows that `score_files` and `fit_files` cut their input into are the pieces of work, read
by the same path on every node."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fdbd.data.inputs import ImageRows, Rows
from fdbd.decision.guard import Guard
from fdbd.decision.guard_file import OpenedGuard
from fdbd.jobs.fitting import Loader
from fdbd.jobs.output import Decided
from fdbd.jobs.ray.fitting import Items, Source, calibrate_rows, fit_rows
from fdbd.jobs.ray.pool import Work, Workers
from fdbd.jobs.scoring import Part, Tables, feature_table, image_tables


def file_tables(opened: OpenedGuard, rows: Rows, todo: Sequence[Part], workers: Workers) -> Tables:
    """Decisions on the rows of these parts of `score_files`' output, one table per part, in the order in which they get
    ready. A part is one piece of work."""
    for (number, span), (_, table) in workers.run(ScoredParts(opened, rows, workers.batch_size), todo):
        yield number, span, table


class ScoredParts(Work):
    """Reads and scores parts of the output of `score_files`."""

    def __init__(self, opened: OpenedGuard, rows: Rows, batch_size: int) -> None:
        super().__init__(opened.guard)
        self.opened, self.rows, self.batch_size = opened, rows, batch_size

    def __call__(self, part: Part) -> tuple[None, Decided]:
        if not isinstance(self.rows, ImageRows):
            return None, feature_table(self.opened, self.rows, part[1])
        # In threads: a fork of a worker of Ray, which has threads of its own, can hang.
        found = image_tables(self.opened, self.rows, [part], self.batch_size, 1, processes=False)
        return None, Decided.concat([table for _, _, table in found])


def fit_loaders(guard: Guard, training: Loader, calibration: Loader, workers: Workers, **threshold: Any) -> None:
    """Fit and calibrate a guard on the rows of two loaders, which then know how many they gave and left out.

    Args:
        guard: to fit, in place.
        training, calibration: images, or features.
        workers: how the work is spread.
        threshold: `tpr`, `alpha` and `per_class` of `Guard.calibrate`.
    """
    fit_rows(guard, _LoaderRows(training, workers))
    calibrate_rows(guard, _LoaderRows(calibration, workers), **threshold)


class _LoaderRows:
    """The rows of a loader; each of its spans is a piece of work."""

    def __init__(self, loader: Loader, workers: Workers) -> None:
        self.loader, self.workers, self.source = loader, workers, _Spans(loader)

    @property
    def dtype(self) -> torch.dtype:
        batches = (batch for span in self.loader.spans for batch, _ in self.source(span)[1])
        return next((batch.features.dtype for batch in batches), torch.float32)

    def run(self, work: Work) -> Iterator[Any]:
        """The results; then the loader knows what was read."""
        notes: dict[range, tuple[int, list[str]]] = {}
        for span, (note, result) in self.workers.run(work, self.loader.spans):
            notes[span] = note
            yield result
        self.loader.num_given = sum(given for given, _ in notes.values())
        self.loader.errors = [error for span in self.loader.spans for error in notes[span][1]]
        self.loader.check_given()


class _Spans(Source):
    """Reads a span of a loader, and notes how many rows it gave and why others were left out."""

    def __init__(self, loader: Loader) -> None:
        self.loader, self.is_features = loader, loader.preprocess is None

    def __call__(self, span: range) -> tuple[tuple[int, list[str]], Items]:
        loader = copy.copy(self.loader)
        items = list(loader.read([span], processes=False))
        return (loader.num_given, loader.errors), [(batch, None) for batch in items] if self.is_features else items
