"""Figures that need features and not only scores: boundary distance by deviation level, and where
single samples stand.

Each is a dict of plain numbers, ready for JSON; they are drawn when ``Results.figures`` is first
asked for.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fdbd import geometry
from fdbd.core.pixels import ImageError, thumbnail
from fdbd.core.ranks import count_to_accept
from fdbd.data.features import FeatureSet
from fdbd.fitting.statistics import Mean
from fdbd.metrics import auroc
from fdbd.util.pages import score_range
from fdbd.util.terminal import one_line

if TYPE_CHECKING:
    from fdbd.bench.runner import Benchmark

Floats = NDArray[np.float64]

LEVELS = 8
FEWEST = 5
"""Samples that a group takes before its mean and spread say anything."""
BINS = 40
NEAREST = 9
"""Boundaries shown for a sample."""
HUGE = 1e100
"""Deviations and distances beyond this count as not finite: their squares would not be."""
ID_SAMPLES = {"odd": 0.02, "typical": 0.5, "clear": 0.98}
OOD_SAMPLES = {"clear": 0.05, "typical": 0.5, "look-alike": 0.95}
"""Which samples are shown, by the quantile of their score."""


class NoFigure(ValueError):
    """A figure has nothing to show for these data; the message says why."""


class Standing(NamedTuple):
    """Where the finite rows of a set lie: (N,) each, with the row numbers they come from."""

    samples: FeatureSet
    rows: NDArray[np.int64]
    deviation: Floats
    """‖z − μ‖, not below the smallest denominator of fDBD."""
    distance: Floats
    """avgDistDB, the average distance to the boundaries of the predicted class."""

    @property
    def scores(self) -> Floats:
        """regDistDB, fDBD's score."""
        return self.distance / self.deviation


def figures(benchmark: Benchmark) -> dict[str, Any]:
    """All figures by name; ``{"error": why}`` for one that has nothing to show for these data."""
    found: dict[str, Any] = {}
    try:
        found["deviation"] = deviation_profile(benchmark)
    except NoFigure as error:
        found["deviation"] = {"error": one_line(error)}
    try:
        found["samples"] = sample_standings(benchmark)
    except NoFigure as error:
        found["samples"] = {"error": one_line(error)}
    return found


def deviation_profile(benchmark: Benchmark, levels: int = LEVELS) -> dict[str, Any]:
    """Average boundary distance by deviation level, ID against OOD: why the paper divides one by
    the other.

    Samples are grouped by ‖z − μ‖ at quantiles in which ID and OOD have the same weight; for each
    group the mean and the standard deviation of avgDistDB are kept. Each OOD set also has two
    AUROCs of avgDistDB: over all pairs of an ID and an OOD sample, and over the pairs of the same
    level only.

    Args:
        benchmark: head, training mean and features.
        levels: number of groups, at least 1.

    Returns:
        ``edges`` (levels + 1 deviations) and ``sets``, the ID set first, each with ``name``,
        ``count``, ``deviation``, ``mean``, ``std`` (a list over levels; None if a group has
        fewer than 5 samples) and, for OOD sets, ``auroc`` and ``auroc_by_level``.
    """
    parts = standings(benchmark)
    inside = parts[0]
    of_ood = np.concatenate([part.deviation for part in parts[1:]])
    edges = balanced_edges([inside.deviation, of_ood], levels)
    id_by_level = [inside.distance[group] for group in _level_groups(inside, edges)]
    sets: list[dict[str, Any]] = []
    for part in parts:
        groups = _level_groups(part, edges)
        described = {"name": part.samples.name, **_by_level(part, groups)}
        if part is not inside:
            by_level = [part.distance[group] for group in groups]
            described["auroc"] = _separation([inside.distance], [part.distance])
            described["auroc_by_level"] = _separation(id_by_level, by_level)
        sets.append(described)
    return {"edges": [short(edge) for edge in edges], "sets": sets}


def _level_groups(part: Standing, edges: Floats) -> list[NDArray[np.intp]]:
    """The places of a set's samples in each level. A deviation that equals an inner edge belongs to
    the level above."""
    level = np.searchsorted(edges[1:-1], part.deviation, side="right")
    return [np.flatnonzero(level == number) for number in range(len(edges) - 1)]


def _by_level(part: Standing, groups: Sequence[NDArray[np.intp]]) -> dict[str, Any]:
    """Numbers of each group: its size, means and spread; None for a group that is too small."""

    def each(values: Floats, measure: Callable[[Floats], Any]) -> list[float | None]:
        found: list[float | None] = []
        for group in groups:
            if len(group) < FEWEST:
                found.append(None)
            else:
                found.append(short(measure(values[group])))
        return found

    return {
        "count": [len(group) for group in groups],
        "deviation": each(part.deviation, np.mean),
        "mean": each(part.distance, np.mean),
        "std": each(part.distance, lambda values: values.std(ddof=1)),
    }


def _separation(inside: Sequence[Floats], outside: Sequence[Floats]) -> float | None:
    """AUROC over the pairs of an ID and an OOD sample of the same group; None if there is none."""
    areas = []
    weights = []
    for id_distances, ood_distances in zip(inside, outside):
        if len(id_distances) and len(ood_distances):
            areas.append(auroc(id_distances, ood_distances))
            weights.append(len(id_distances) * len(ood_distances))
    if not areas:
        return None
    return short(np.average(areas, weights=weights))


def sample_standings(benchmark: Benchmark) -> dict[str, Any]:
    """A few samples with their boundary distances and their place among the fDBD scores of the ID
    set.

    The samples of the ID set are those at the 2nd, 50th and 98th percentile of the score. Those of
    each OOD set are at the 5th, 50th and 95th percentile; the last of them looks like ID. Distances
    are divided by ‖z − μ‖, so that their mean over all boundaries is the score.

    Returns:
        ``low``, ``high``, ``counts`` (the ID score histogram) and ``sets``, the ID set first:
        ``name`` and ``samples``, each with ``kind``, ``row``, ``predicted``, ``label``, ``score``,
        ``rank`` (share of ID scores below), ``boundaries`` (the nearest, as [class, distance]),
        ``others`` (how many more there are) and, if the images are at hand, ``image`` (a
        thumbnail) and ``file`` (its folder and name).
    """
    parts = standings(benchmark)
    inside = parts[0]
    if not len(inside.rows):
        raise NoFigure(f"{inside.samples.name} has no finite features")
    reference = np.sort(inside.scores)
    low, high = score_range([reference])
    sets = []
    for part in parts:
        kinds = ID_SAMPLES if part is inside else OOD_SAMPLES
        shown = []
        for kind, place in _places_at(kinds, part.scores).items():
            rank = np.searchsorted(reference, part.scores[place]) / len(reference)
            shown.append({"kind": kind, "rank": short(rank), **_sample(benchmark, part, place)})
        sets.append({"name": part.samples.name, "samples": shown})
    return {
        "low": short(low),
        "high": short(high),
        "counts": bin_counts(reference, low, high, BINS),
        "sets": sets,
    }


def _places_at(kinds: Mapping[str, float], scores: Floats) -> dict[str, int]:
    """For each kind of sample, the place of the score at its share of all scores; none if there are
    no scores."""
    order = np.argsort(scores, kind="stable")
    if not len(order):
        return {}
    found = {}
    for kind, share in kinds.items():
        found[kind] = int(order[round(share * (len(order) - 1))])
    return found


def _sample(benchmark: Benchmark, part: Standing, place: int) -> dict[str, Any]:
    """One sample with its nearest boundaries, nearest first, in units of its deviation; and its
    thumbnail and the end of its path, if the image is still there."""
    row = int(part.rows[place])
    batch = part.samples.rows(slice(row, row + 1))
    features = batch.features.double().cpu()
    logits = benchmark.head(features) if batch.logits is None else batch.logits.double().cpu()
    label = None
    if batch.labels is not None:
        label = int(batch.labels[0])
    [distances] = geometry.distances(features, benchmark.head, logits=logits)
    distances = distances / float(part.deviation[place])
    reachable = [c for c in distances.argsort().tolist() if math.isfinite(distances[c])]
    boundaries = [[c, short(float(distances[c]))] for c in reachable[:NEAREST]]
    found: dict[str, Any] = {
        "row": row,
        "score": short(part.scores[place]),
        "predicted": int(logits.argmax()),
        "label": label,
        "boundaries": boundaries,
        "others": max(0, len(reachable) - NEAREST),
    }
    images = part.samples.images
    if images is not None:
        with contextlib.suppress(ImageError, ImportError):
            found["image"] = thumbnail(images[row])
            found["file"] = None
            if images.paths is not None:
                found["file"] = "/".join(images.paths[row].parts[-2:])
    return found


def training_mean(benchmark: Benchmark) -> Tensor:
    """(P,) float64 mean of the training features."""
    if benchmark.statistics is not None:
        return benchmark.statistics.mean().to("cpu", torch.float64)
    found = Mean(benchmark.head.num_features)
    for batch in benchmark.train:
        found.update(batch)
    return found.mean()


def standings(benchmark: Benchmark, dtype: torch.dtype | None = None) -> list[Standing]:
    """The ID set, then each OOD set; distances are computed in `dtype`, by default that of the
    features."""
    mean = training_mean(benchmark)
    try:
        folded = geometry.Folded(benchmark.head, mean, normalizer=None, dtype=dtype)
    except ValueError as error:
        # Such as a head whose classes all have the same weights: there is no boundary.
        raise NoFigure(str(error)) from error
    floor = torch.finfo(torch.float32).eps * max(1.0, float(torch.linalg.vector_norm(mean)))
    found = []
    for samples in (benchmark.test, *benchmark.ood):
        deviations = [np.zeros(0)]
        distances = [np.zeros(0)]
        for batch in samples.batches():
            z = batch.features if dtype is None else batch.features.to(dtype)
            logits = benchmark.head(z) if batch.logits is None else batch.logits
            distances.append(folded.score(z, logits.argmax(dim=1)).double().cpu().numpy())
            deviations.append(torch.linalg.vector_norm(z.double().cpu() - mean, dim=1).numpy())
        deviation = np.concatenate(deviations)
        distance = np.concatenate(distances)
        rows = np.flatnonzero((deviation < HUGE) & (np.abs(distance) < HUGE))
        found.append(Standing(samples, rows, np.maximum(deviation[rows], floor), distance[rows]))
    return found


def balanced_edges(sides: Sequence[Floats], levels: int, grid: int = 1001) -> Floats:
    """(levels + 1,) quantiles of all sides together, each with the same weight whatever its
    size."""
    quantiles = [np.quantile(side, np.linspace(0, 1, grid)) for side in sides if len(side)]
    if not quantiles:
        raise NoFigure("there are no finite features to group by deviation")
    return np.quantile(np.concatenate(quantiles), np.linspace(0, 1, levels + 1))


def short(value: float, digits: int = 5) -> float:
    """A number rounded to a few significant digits: enough for a screen, and the JSON stays
    small."""
    return float(f"{float(value):.{digits}g}")


def bin_counts(scores: Floats, low: float, high: float, bins: int) -> list[int]:
    """How many scores fall in each of `bins` equal bins of [low, high]; those beyond, ±inf too, in
    the end bins."""
    counts: list[int] = np.histogram(np.clip(scores, low, high), bins, (low, high))[0].tolist()
    return counts


def accepting_score(scores: Floats, share: float) -> float:
    """The largest threshold that at least `share` of the scores reach."""
    return float(np.sort(scores)[::-1][count_to_accept(len(scores), share) - 1])
