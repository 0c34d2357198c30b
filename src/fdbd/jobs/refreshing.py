"""A new threshold for a guard from fresh data, beside the old one.

Fresh data are scores that `fdbd score` wrote, features, or images; only images need the network.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fdbd.data.columns import TextRows
from fdbd.data.features import FeatureRows
from fdbd.data.images import Images
from fdbd.data.inputs import open_rows
from fdbd.decision.guard import Guard
from fdbd.decision.guard_file import OpenedGuard, load, open_guard
from fdbd.decision.threshold import Target, Threshold
from fdbd.fitting.overlap import Sketch
from fdbd.jobs.classes import match_classes
from fdbd.jobs.fitting import Loader
from fdbd.jobs.scored import ScoredRows, holds_scores, read_scored
from fdbd.jobs.scoring import Engine, Preparation
from fdbd.metrics.proportion import Proportion
from fdbd.util.progress import track


class Fresh(NamedTuple):
    """Scores of fresh in-distribution data."""

    guard: Guard
    """The guard of the file; without its network if the data are not images."""
    scores: Tensor
    """(n,) finite, in the precision of the guard's threshold."""
    predicted: Tensor
    """(n,) predicted classes."""
    left_out: int
    """Rows that could not be read or have no finite score."""
    cautions: list[str]
    rows: ScoredRows | None = None
    """The scored rows; None if the data were features or images."""


class Refreshed(NamedTuple):
    """An old and a new threshold on the same fresh data."""

    old: Threshold | None
    new: Threshold
    old_false_alarms: Proportion | None
    """Share of the fresh data that the old threshold flags."""
    new_false_alarms: Proportion


def read_fresh(
    guard: str | os.PathLike[str],
    data: str,
    engine: Engine,
    *,
    model: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    trust: bool = False,
    text: str | None = None,
) -> Fresh:
    """Scores of data under the guard in a file."""
    path = Path(data).expanduser()
    if path.exists() and holds_scores(path):
        return _from_scores(load(guard), read_scored(path))
    rows = open_rows(data, "test", text)
    opened = open_guard(
        guard,
        model=model,
        checkpoint=checkpoint,
        trust=trust,
        device=engine.home,
        features=isinstance(rows, FeatureRows),
    )
    labels = None
    if isinstance(rows, Images):
        if opened.preprocess is None:
            raise ValueError(
                f"the guard takes features, not images such as {rows.source}: name the model with "
                "--model"
            )
        head = opened.guard.detector.head
        labels = match_classes(rows, head.num_classes, opened.class_names).labels
    preparation: Preparation | None = opened.preprocess
    if isinstance(rows, TextRows):
        preparation = opened.tokenizer
    loader = Loader(rows, opened.guard.detector.head, preparation, engine, labels)
    return _from_loader(opened, loader)


def _from_scores(guard: Guard, rows: ScoredRows) -> Fresh:
    cautions = []
    if rows.guard is not None and rows.guard != guard.id:
        cautions.append(
            f"{rows.source!r} was scored by the guard {rows.guard}, and this is {guard.id}: the "
            "scores fit this guard only if the two differ in nothing but the threshold"
        )
    return _chosen(guard, rows, np.flatnonzero(rows.is_scored), len(rows), cautions)


def of_rows(fresh: Fresh, places: NDArray[np.int64]) -> Fresh:
    """The fresh data at some places of the scored rows."""
    rows = fresh.rows
    assert rows is not None
    scored = places[rows.is_scored[places]]
    return _chosen(fresh.guard, rows, scored, len(places), fresh.cautions)


def _chosen(
    guard: Guard, rows: ScoredRows, places: NDArray[np.int64], given: int, cautions: list[str]
) -> Fresh:
    dtype = torch.float64
    if guard.threshold is not None:
        # The file holds scores of this precision, so no digit is lost.
        dtype = guard.threshold.value.dtype
    scores = torch.from_numpy(rows.scores[places]).to(dtype)
    predicted = torch.from_numpy(rows.labels[places])
    return Fresh(guard, scores, predicted, given - len(places), cautions, rows)


def _from_loader(opened: OpenedGuard, loader: Loader) -> Fresh:
    guard = opened.guard
    seen = Sketch()
    scores = [torch.zeros(0)]
    predicted = [torch.zeros(0, dtype=torch.int64)]
    with torch.no_grad():
        for item in track(loader, "scoring"):
            found = guard.stages.calibration_scores(item)
            scores.append(found.scores.cpu())
            predicted.append(found.predicted.cpu())
            seen.add_hashes(found.hashes)
    all_scores = torch.cat(scores[1:] or scores)
    all_predicted = torch.cat(predicted)
    is_finite = torch.isfinite(all_scores)
    cautions = []
    known = guard.stages.record.seen
    if known is not None and seen.overlap(known) > 0.5:
        cautions.append(
            "most of the fresh data were also used for the fit: scores on them are too good, and "
            "the new threshold will raise more false alarms than promised"
        )
    left_out = len(loader.errors) + int((~is_finite).sum())
    return Fresh(guard, all_scores[is_finite], all_predicted[is_finite], left_out, cautions)


def refresh(
    fresh: Fresh,
    tpr: float | None = None,
    alpha: float | None = None,
    per_class: bool | None = None,
) -> Refreshed:
    """The threshold that fresh data give, beside the old one. An argument that is None is taken
    from the old threshold. ValueError if the fresh samples are too few for the target."""
    guard = fresh.guard
    old = guard.threshold
    target = _target(old, tpr, alpha, per_class)
    if not len(fresh.scores):
        raise ValueError("there is no in-distribution sample with a finite score to calibrate on")
    classes = guard.detector.head.num_classes
    new = Threshold.from_scores(fresh.scores, fresh.predicted, num_classes=classes, **target)
    old_rate = None
    if old is not None:
        old_rate = _false_alarms(old, fresh)
    return Refreshed(old, new, old_rate, _false_alarms(new, fresh))


def _target(
    old: Threshold | None, tpr: float | None, alpha: float | None, per_class: bool | None
) -> Target:
    """What to ask of the new threshold."""
    if old is not None:
        if tpr is None and alpha is None:
            if old.kind == "conformal":
                alpha = old.target
            else:
                tpr = old.target
        if per_class is None:
            per_class = old.per_class
    return Target(tpr=tpr, alpha=alpha, per_class=bool(per_class))


def _false_alarms(threshold: Threshold, fresh: Fresh) -> Proportion:
    flagged = threshold.is_ood(fresh.scores, fresh.predicted)
    return Proportion.from_counts(int(flagged.sum()), len(flagged))
