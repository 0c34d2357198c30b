"""Files on Ray: the spans of rows that `score_files` and `fit_files` cut their input into are the pieces of work, read
by the same path on every node."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from fdbd.data.images import Images
from fdbd.data.inputs import Rows
from fdbd.decision.guard import Guard
from fdbd.decision.guard_file import OpenedGuard
from fdbd.jobs.fitting import Loader
from fdbd.jobs.output import Decided
from fdbd.jobs.ray.fitting import Items, Run, calibrate_rows, fit_rows
from fdbd.jobs.ray.pool import Workers
from fdbd.jobs.scoring import Part, Tables, feature_part, image_tables


def file_tables(opened: OpenedGuard, rows: Rows, workers: Workers, nearest: bool, todo: Sequence[Part]) -> Tables:
    """Decisions on the rows of these parts of `score_files`' output, in the order in which they get ready. A part is
    one piece of work."""
    return workers.run(opened.guard, partial(_score_part, opened, rows, workers.batch_size, nearest), todo)


def _score_part(opened: OpenedGuard, rows: Rows, batch_size: int, nearest: bool, part: Part) -> list[Decided]:
    if not isinstance(rows, Images):
        return feature_part(opened, rows, nearest, part)
    # In threads: a fork of a worker of Ray, which has threads of its own, can hang.
    found = image_tables(opened, rows, batch_size, 1, nearest, [part], processes=False)
    return [table for _, tables in found for table in tables]


def fit_loaders(guard: Guard, training: Loader, calibration: Loader, workers: Workers, **threshold: Any) -> None:
    """Fit and calibrate a guard on the rows of two loaders, which then know how many they gave and left out.

    Args:
        guard: to fit, in place.
        training, calibration: images, or features.
        workers: how the work is spread.
        threshold: `tpr`, `alpha` and `per_class` of `Guard.calibrate`.
    """
    dtype = None
    if training.preprocess is None:
        batches = (batch for span in training.spans for batch in _read(training, span)[1])
        dtype = next((batch.features.dtype for batch in batches), torch.float32)
    fit_rows(guard, _runner(training, workers), dtype)
    calibrate_rows(guard, _runner(calibration, workers), **threshold)


def _runner(loader: Loader, workers: Workers) -> Run:
    """Work on the spans of a loader, which then knows what was read."""

    def run(guard: Guard, work: Callable[[Items], Any]) -> Iterator[Any]:
        notes: dict[range, tuple[int, list[str]]] = {}
        for span, (note, result) in workers.run(guard, partial(_noted, loader, work), loader.spans):
            notes[span] = note
            yield result
        loader.num_given = sum(given for given, _ in notes.values())
        loader.errors = [error for span in loader.spans for error in notes[span][1]]
        loader.check_given()

    return run


def _noted(loader: Loader, work: Callable[[Items], Any], span: range) -> tuple[Any, Any]:
    note, items = _read(loader, span)
    return note, work(items)


def _read(loader: Loader, span: range) -> tuple[tuple[int, list[str]], Items]:
    """How many rows a span gave and why others were left out, and its batches."""
    loader = copy.copy(loader)
    items = list(loader.read([span], processes=False))
    return (loader.num_given, loader.errors), items
