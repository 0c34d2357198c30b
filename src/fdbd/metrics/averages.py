"""The mean of a measure over OOD sets that share their ID samples, with an interval that knows they do."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from fdbd.core.batch import ArrayLike
from fdbd.metrics.comparison import Influences, placements, standard_error
from fdbd.metrics.counts import Counts, Floats, as_scores
from fdbd.metrics.evaluation import Estimate, Evaluation
from fdbd.metrics.intervals import fpr_interval, precision_influences
from fdbd.metrics.points import oriented

Metric = Literal["auroc", "fpr", "aupr_in", "aupr_out"]


def average(
    evaluations: Sequence[Evaluation],
    metric: Metric,
    id_scores: ArrayLike | None = None,
    ood_scores: Sequence[ArrayLike] = (),
) -> Estimate:
    """Mean of a measure over OOD sets.

    AUROC and AUPR: the mean of the sets' intervals, scaled by the ratio of the mean's standard error (joint, from each
    sample's influence) to the mean of the sets' standard errors. FPR@TPR: the draws behind the sets' intervals, made
    together, so that the ID samples vary once for all sets.

    Args:
        evaluations: one per OOD set.
        metric: the measure.
        id_scores: (N,) scores of the ID samples; None: not known, and the interval is the mean of the sets' intervals,
            which is too wide.
        ood_scores: scores of each OOD set.

    >>> from fdbd.metrics import evaluate
    >>> inside, near, far = [3.0, 4.0, 5.0, 6.0], [1.0, 3.5], [0.0, 1.0]
    >>> found = [evaluate(inside, near), evaluate(inside, far)]
    >>> round(float(average(found, "auroc", inside, [near, far])), 4)
    0.9375
    """
    parts: list[Estimate] = [getattr(evaluation, metric) for evaluation in evaluations]
    value, low, high = (sum(each) / len(parts) for each in zip(*((float(p), p.low, p.high) for p in parts)))
    if len(parts) == 1 or id_scores is None:
        return Estimate(value, low, high)
    inside = as_scores(id_scores, "id_scores")
    sets = [as_scores(scores, "ood_scores") for scores in ood_scores]
    if metric == "fpr":
        first = evaluations[0]
        counts = [oriented(Counts.of(inside, outside), first.positive) for outside in sets]
        shared: Literal["positive", "negative"] = "positive" if first.positive == "id" else "negative"
        return Estimate(value, *fpr_interval(counts, first.tpr, first.confidence, shared=shared))
    influences = [_influences(metric, inside, outside) for outside in sets]
    separate = sum(standard_error([part]) for part in influences) / len(influences)
    ratio = standard_error(influences) / separate if separate > 0 else 1.0
    return Estimate(value, value - ratio * (value - low), value + ratio * (high - value))


def _influences(metric: Metric, inside: Floats, outside: Floats) -> Influences:
    if metric == "auroc":
        return placements(inside, outside)
    counts = Counts.of(inside, outside)
    if metric == "aupr_in":
        of_id, of_ood = precision_influences(counts)
    else:
        of_ood, of_id = (part[::-1] for part in precision_influences(counts.swapped()))
    ascending = counts.scores[::-1]
    places = [len(ascending) - 1 - np.searchsorted(ascending, scores) for scores in (inside, outside)]
    return Influences(of_id[places[0]], of_ood[places[1]])
