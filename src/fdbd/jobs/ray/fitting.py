"""Fitting and calibrating on a cluster, whatever the rows come from.

Features become partial sums where they are read, and the driver merges the sums. Where a network runs, its features
come to the driver, which learns from them as in a local fit: that costs little beside the network.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from fdbd.core.batch import Batch, Head
from fdbd.decision.guard import Guard
from fdbd.detectors import Detector
from fdbd.fitting.driver import fit_by, fit_together, update_all
from fdbd.fitting.overlap import Sketch, sample_hashes
from fdbd.fitting.spool import Spool
from fdbd.jobs.ray.pool import Work

Items = list[tuple[Any, Any]]
"""Batches with their labels: (inputs of the model, labels or None), or (a Batch of features, None)."""


class Source(Protocol):
    """Reads a piece of work, in a process of the cluster."""

    is_features: bool

    def __call__(self, piece: Any) -> tuple[Any, Items]:
        """A note for the driver, and batches."""


class Rows(Protocol):
    """Rows that a cluster can reach."""

    @property
    def source(self) -> Source: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of features."""

    def run(self, work: Work) -> Iterator[Any]:
        """The results of the work on all pieces of the rows, in any order."""


def fit_rows(guard: Guard, rows: Rows) -> None:
    """Fit a guard in place, with the result of `Guard.fit`. A network runs once over the rows; features are read anew
    for each pass."""
    head, seen = guard.head, Sketch()
    guard.threshold = None
    if not rows.source.is_features:
        with Spool() as spool:
            for found in rows.run(Features(guard, rows.source)):
                for batch, hashes in found:
                    spool.append(batch)
                    seen.add_hashes(hashes)
            fit_together([guard.detector], spool, head)
    else:
        guard.features_alone(Batch(torch.zeros(0, head.num_features)))  # says so where features are not enough

        def sum_up(statistics: list[Any], asking: list[Detector]) -> list[Any]:
            for sketch, *sums in rows.run(PartialSums([Sketch(), *statistics], head, asking, rows.source)):
                seen.merge(sketch)
                for total, part in zip(statistics, sums):
                    total.merge(part)
            return statistics

        fit_by(sum_up, [guard.detector], head, rows.dtype)
    guard.seen = seen


def calibrate_rows(guard: Guard, rows: Rows, **threshold: Any) -> None:
    """Set a fitted guard's threshold (`tpr`, `alpha` and `per_class` of `Guard.calibrate`)."""
    guard.detector.require_fitted()
    known = Sketch()
    scores, labels = [], []
    for found in rows.run(Scores(guard, rows.source)):
        for some_scores, some_labels, hashes in found:
            scores.append(some_scores)
            labels.append(some_labels)
            known.add_hashes(hashes)
    if not scores:
        raise ValueError("the calibration data hold no samples; give a dataset with rows")
    guard.warn_if_seen(known)
    guard.set_threshold(torch.cat(scores), torch.cat(labels), **threshold)


class Features(Work):
    """Runs the network over training data: what the detector learns from, and hashes of the samples."""

    def __call__(self, piece: Any) -> tuple[Any, list[tuple[Batch, Tensor]]]:
        note, items = self.source(piece)
        with torch.no_grad():
            return note, [(self.guard.training_batch(*item).cpu(), sample_hashes(item[0])) for item in items]


class Scores(Work):
    """Gives scores, predicted labels and hashes of the samples, to calibrate on."""

    def __call__(self, piece: Any) -> tuple[Any, list[tuple[Tensor, Tensor, Tensor]]]:
        note, items = self.source(piece)
        found = []
        with torch.no_grad():
            for inputs, _ in items:
                observed = self.guard.observe(inputs)
                hashes = sample_hashes(inputs.features if isinstance(inputs, Batch) else inputs)
                found.append((self.guard.scores_of(observed).cpu(), observed.logits.argmax(dim=1).cpu(), hashes))
        return note, found


class PartialSums(Work):
    """Boils a piece of the training data down to statistics, after a sketch of its samples.

    Args:
        empty: a Sketch, then statistics that have seen nothing.
        head: the linear head.
        asking: the detectors that asked for them.
        source: of features.
    """

    def __init__(self, empty: list[Any], head: Head, asking: list[Detector], source: Source) -> None:
        self.empty, self.head, self.asking, self.source = empty, head, asking, source

    def start(self, device: str) -> None:
        """Sums are taken on the CPU."""

    def __call__(self, piece: Any) -> tuple[Any, list[Any]]:
        note, items = self.source(piece)
        sketch, *statistics = copy.deepcopy(self.empty)  # one process sums many pieces
        for batch, _ in items:
            sketch.add(batch.features)
        update_all(statistics, [batch for batch, _ in items], self.head, self.asking)
        return note, [sketch, *statistics]
