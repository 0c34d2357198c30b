"""Fits and calibrations by work on a cluster, whatever the rows come from: files, or a Ray Dataset.

Features become partial sums where they are read, and the driver merges the sums; if a network runs,
its features come to the driver.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Unpack

from fdbd.core.batch import Batch, Head
from fdbd.decision.guard import Guard
from fdbd.decision.stages import CalibrationScores, TrainingBatch
from fdbd.decision.threshold import Target
from fdbd.detectors import Detector
from fdbd.fitting.driver import add_batches, fit_by, fit_detector
from fdbd.fitting.overlap import Sketch
from fdbd.fitting.spool import Spool
from fdbd.fitting.statistics import Together
from fdbd.jobs.ray.pool import Workers

if TYPE_CHECKING:
    from fdbd.jobs.fitting import Loader

Items = list[Any]
"""Batches as loaders give them: (inputs of the model, labels or None), or `Batch`es of features."""
Run = Callable[[Guard, Callable[[Items], Any]], Iterator[Any]]
"""Does some work with a guard on all batches of some rows, in the processes of a cluster; results
come in any order."""


def fit_rows(guard: Guard, run: Run, first: Batch | None) -> None:
    """Fit a guard in place, with the result of `Guard.fit`. If the rows are features, `first` is
    their first batch, and the rows are read once per pass of the detector. If `first` is None, the
    network runs once over the rows, and its features come to this process."""
    stages = guard.stages
    stages.begin_fit()
    head = guard.head
    if first is None:
        with Spool() as spool:
            for found in run(guard, partial(_features, guard)):
                for each in found:
                    spool.append(stages.note(each))
            fit_detector(guard.detector, spool, head)
    else:
        # An error if features are not enough.
        stages.features_alone(first)

        def sum_up(statistics: Together) -> Together:
            seen = Sketch()
            total = copy.deepcopy(statistics)
            for sketch, sums in run(
                guard, partial(_partial_sums, statistics, head, guard.detector)
            ):
                seen.merge(sketch)
                total.merge(sums)
            stages.record.seen = seen
            return total

        fit_by(sum_up, guard.detector, head, first.features.dtype)
    stages.end_fit()


def no_rows(guard: Guard) -> Batch:
    """Features (0, P) as the guard's head takes them."""
    return Batch(torch.zeros(0, guard.head.num_features))


def calibrate_rows(guard: Guard, run: Run, **target: Unpack[Target]) -> None:
    """Set a fitted guard's threshold."""

    def scored() -> Iterator[CalibrationScores]:
        for batches in run(guard, partial(_scores, guard)):
            yield from batches

    guard.calibrate(scored(), **target, progress=False)


def fit_loaders(
    guard: Guard,
    training: Loader,
    calibration: Loader,
    workers: Workers,
    *,
    held_out: Loader | None = None,
    **target: Unpack[Target],
) -> None:
    """Fit and calibrate a guard on the rows of two loaders, which then know how many they gave and
    left out. The pieces of work are the loaders' spans, read by the same path on every node. With
    "auto", its detectors are weighed by the rows held out, which are few, in this process."""
    first = None
    if training.preparation is None:
        first = next(iter(training), no_rows(guard))
    if guard.auto is not None:
        # How much of the data a member keeps depends on how many there are.
        guard.stages.make_pool(int(training.chosen.sum()))
    fit_rows(guard, partial(_run_loader, training, workers), first)
    if held_out is not None:
        guard.stages.choose_from(held_out, progress=False)
    calibrate_rows(guard, partial(_run_loader, calibration, workers), **target)


def _run_loader(
    loader: Loader, workers: Workers, guard: Guard, work: Callable[[Items], Any]
) -> Iterator[Any]:
    # For each span, how many rows it gave, and why others were left out.
    notes: dict[Any, tuple[int, list[str]]] = {}
    for span, (note, result) in workers.run(guard, partial(_read, loader, work), loader.spans):
        notes[span] = note
        yield result
    loader.num_given = sum(given for given, _ in notes.values())
    loader.errors = []
    for span in loader.spans:
        _, errors = notes[span]
        loader.errors += errors
    loader.check_given()


def _read(
    loader: Loader, work: Callable[[Items], Any], span: Any
) -> tuple[tuple[int, list[str]], Any]:
    loader = copy.copy(loader)
    items = list(loader.read([span], processes=False))
    return (loader.num_given, loader.errors), work(items)


def _features(guard: Guard, items: Items) -> list[TrainingBatch]:
    found = []
    with torch.no_grad():
        for item in items:
            training = guard.stages.training_batch(item)
            found.append(training._replace(batch=training.batch.cpu()))
    return found


def _scores(guard: Guard, items: Items) -> list[CalibrationScores]:
    found = []
    with torch.no_grad():
        for item in items:
            part = guard.stages.calibration_scores(item)
            found.append(part._replace(scores=part.scores.cpu(), predicted=part.predicted.cpu()))
    return found


def _partial_sums(
    empty: Together, head: Head, detector: Detector, items: Items
) -> tuple[Sketch, Together]:
    sketch = Sketch()
    # A copy, since this process may sum further pieces from the same empty statistics.
    sums = copy.deepcopy(empty)
    for batch in items:
        sketch.add(batch.features)
    add_batches(sums, items, head, detector)
    return sketch, sums
