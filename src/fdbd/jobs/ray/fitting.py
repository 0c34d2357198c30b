"""Fitting and calibrating on a cluster, whatever the rows come from: files, or a Ray Dataset.

Features become partial sums where they are read, and the driver merges the sums. Where a network runs, its features
come to the driver, which learns from them as in a local fit: that costs little beside the network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from fdbd.core.batch import Batch, Head
from fdbd.decision.guard import CalibrationScores, Guard
from fdbd.decision.threshold import Target
from fdbd.detectors import Detector
from fdbd.fitting.driver import fit_by, fit_together, update_all
from fdbd.fitting.overlap import Sketch
from fdbd.fitting.spool import Spool
from fdbd.jobs.ray.pool import Workers

if TYPE_CHECKING:
    from fdbd.jobs.fitting import Loader

Items = list[Any]
"""Batches as loaders give them: (inputs of the model, labels or None), or `Batch`es of features."""
Run = Callable[[Guard, Callable[[Items], Any]], Iterator[Any]]
"""Does some work with a guard on all batches of some rows, in the processes of a cluster; results come in any order."""


def fit_rows(guard: Guard, run: Run, dtype: torch.dtype | None) -> None:
    """Fit a guard in place, with the result of `Guard.fit`. A network runs once over the rows, which then have no
    `dtype`; features of a dtype are read anew for each pass."""
    head, guard.seen, guard.threshold, guard.agreement = guard.head, Sketch(), None, {}
    if dtype is None:
        with Spool() as spool:
            for found in run(guard, partial(_features, guard)):
                for each in found:
                    spool.append(guard.noted(*each))
            fit_together([guard.detector], spool, head)
    else:
        guard.features_alone(Batch(torch.zeros(0, head.num_features)))  # says so where features are not enough

        def sum_up(statistics: list[Any], asking: list[Detector]) -> list[Any]:
            empty = [Sketch(), *statistics]
            total = copy.deepcopy(empty)
            for sums in run(guard, partial(_partial_sums, empty, head, asking)):
                for mine, other in zip(total, sums):
                    mine.merge(other)
            guard.seen = total[0]
            return total[1:]

        fit_by(sum_up, [guard.detector], head, dtype)
    guard.warn_of_labels("fit")


def calibrate_rows(guard: Guard, run: Run, **target: Unpack[Target]) -> None:
    """Set a fitted guard's threshold."""
    guard.require_fitted()
    guard.calibrate_on((batch for found in run(guard, partial(_scores, guard)) for batch in found), **target)


def fit_loaders(
    guard: Guard, training: Loader, calibration: Loader, workers: Workers, **target: Unpack[Target]
) -> None:
    """Fit and calibrate a guard on the rows of two loaders, which then know how many they gave and left out. The pieces
    of work are the loaders' spans, read by the same path on every node."""
    dtype = None
    if training.preprocess is None:
        batches = (batch for span in training.spans for batch in _read(training, list, span)[1])
        dtype = next((batch.features.dtype for batch in batches), torch.float32)
    fit_rows(guard, partial(_run_loader, training, workers), dtype)
    calibrate_rows(guard, partial(_run_loader, calibration, workers), **target)


def _run_loader(loader: Loader, workers: Workers, guard: Guard, work: Callable[[Items], Any]) -> Iterator[Any]:
    """Work on the spans of a loader, which then knows what was read."""
    notes: dict[range, tuple[int, list[str]]] = {}
    for span, (note, result) in workers.run(guard, partial(_read, loader, work), loader.spans):
        notes[span] = note
        yield result
    loader.num_given = sum(given for given, _ in notes.values())
    loader.errors = [error for span in loader.spans for error in notes[span][1]]
    loader.check_given()


def _read(loader: Loader, work: Callable[[Items], Any], span: range) -> tuple[tuple[int, list[str]], Any]:
    """How many rows a span gave and why others were left out, and the work on its batches."""
    loader = copy.copy(loader)
    items = list(loader.read([span], processes=False))
    return (loader.num_given, loader.errors), work(items)


def _features(guard: Guard, items: Items) -> list[tuple[Batch, Tensor]]:
    with torch.no_grad():
        return [(batch.cpu(), hashes) for batch, hashes in map(guard.training_batch, items)]


def _scores(guard: Guard, items: Items) -> list[CalibrationScores]:
    with torch.no_grad():
        found = list(map(guard.calibration_scores, items))
    return [batch._replace(scores=batch.scores.cpu(), predicted=batch.predicted.cpu()) for batch in found]


def _partial_sums(empty: list[Any], head: Head, asking: list[Detector], items: Items) -> list[Any]:
    """A sketch of features and the statistics that these detectors ask for, from empty ones."""
    sketch, *statistics = copy.deepcopy(empty)  # one process sums many pieces
    for batch in items:
        sketch.add(batch.features)
    update_all(statistics, items, head, asking)
    return [sketch, *statistics]
