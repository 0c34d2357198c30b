"""Fitting and calibrating on a cluster, whatever the rows come from.

Features become partial sums where they are read, and the driver merges the sums. Where a network runs, its features
come to the driver, which learns from them as in a local fit: that costs little beside the network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fdbd.core.batch import Batch, Head
from fdbd.decision.guard import Guard
from fdbd.detectors import Detector
from fdbd.fitting.driver import fit_by, fit_together, update_all
from fdbd.fitting.overlap import Sketch, sample_hashes
from fdbd.fitting.spool import Spool

Items = list[tuple[Any, Any]]
"""Batches with their labels: (inputs of the model, labels or None), or (a Batch of features, its labels or None)."""
Run = Callable[[Guard, Callable[[Items], Any]], Iterator[Any]]
"""Does some work with a guard on all batches of some rows, in the processes of a cluster; results come in any order."""


def fit_rows(guard: Guard, run: Run, dtype: torch.dtype | None) -> None:
    """Fit a guard in place, with the result of `Guard.fit`. A network runs once over the rows; features are read anew
    for each pass.

    Args:
        guard: to fit.
        run: over the training data.
        dtype: of features; None where the rows are inputs of the network.
    """
    head, guard.seen, guard.threshold, guard.agreement = guard.head, Sketch(), None, {}
    if dtype is None:
        with Spool() as spool:
            for found in run(guard, partial(_features, guard)):
                for batch, hashes in found:
                    spool.append(batch)
                    guard.seen.add_hashes(hashes)
                    if batch.logits is not None:
                        guard.compare("fit", batch.labels, batch.logits.argmax(dim=1))
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


def calibrate_rows(guard: Guard, run: Run, **threshold: Any) -> None:
    """Set a fitted guard's threshold (`tpr`, `alpha` and `per_class` of `Guard.calibrate`)."""
    guard.require_fitted()
    known = Sketch()
    scores, predicted = [], []
    for found in run(guard, partial(_scores, guard)):
        for some_scores, some_predicted, labels, hashes in found:
            scores.append(some_scores)
            predicted.append(some_predicted)
            guard.compare("calibration", labels, some_predicted)
            known.add_hashes(hashes)
    if not scores:
        raise ValueError("the calibration data hold no samples; give a dataset with rows")
    guard.warn_if_seen(known)
    guard.warn_of_labels("calibration")
    guard.set_threshold(torch.cat(scores), torch.cat(predicted), **threshold)


def _features(guard: Guard, items: Items) -> list[tuple[Batch, Tensor]]:
    """What the detector learns from, with hashes of the samples."""
    with torch.no_grad():
        return [(guard.training_batch(*item).cpu(), sample_hashes(item[0])) for item in items]


def _scores(guard: Guard, items: Items) -> list[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
    """Scores, predicted and given labels, and hashes of the samples."""
    found = []
    with torch.no_grad():
        for inputs, labels in items:
            observed = guard.observe(inputs)
            hashes = sample_hashes(inputs.features if isinstance(inputs, Batch) else inputs)
            found.append((guard.scores_of(observed).cpu(), observed.logits.argmax(dim=1).cpu(), labels, hashes))
    return found


def _partial_sums(empty: list[Any], head: Head, asking: list[Detector], items: Items) -> list[Any]:
    """A sketch of features and the statistics that these detectors ask for, from empty ones."""
    sketch, *statistics = copy.deepcopy(empty)  # one process sums many pieces
    for batch, _ in items:
        sketch.add(batch.features)
    update_all(statistics, [batch for batch, _ in items], head, asking)
    return [sketch, *statistics]
