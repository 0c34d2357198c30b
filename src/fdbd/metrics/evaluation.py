"""`evaluate`: all measures of one detector on one pair of ID and OOD samples, each with its
interval; and their `average` over OOD sets that share their ID samples, with an interval that knows
they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from fdbd.core.batch import ArrayLike
from fdbd.core.configuration import expect
from fdbd.metrics.comparison import influences, standard_error
from fdbd.metrics.intervals import Interval, aupr_interval, auroc_interval, fpr_interval
from fdbd.metrics.points import Counts, area, average_precision, false_positive_rate, oriented

Metric = Literal["auroc", "fpr", "aupr_in", "aupr_out"]


class Estimate(float):
    """A number with its confidence interval: a float in every respect, with `low` and `high`.

    >>> e = Estimate(0.9, 0.85, 0.94)
    >>> e > 0.8, e.low, f"{e:.1f}", e
    (True, 0.85, '0.9', Estimate(0.9, low=0.85, high=0.94))
    """

    low: float
    high: float

    def __new__(cls, value: float, low: float, high: float) -> Estimate:
        self = super().__new__(cls, value)
        self.low = float(low)
        self.high = float(high)
        return self

    @property
    def interval(self) -> Interval:
        """(low, high)."""
        return self.low, self.high

    def to_dict(self) -> dict[str, float]:
        """Plain floats: value, low, high."""
        return {"value": float(self), "low": self.low, "high": self.high}

    def __reduce__(self) -> tuple[type[Estimate], tuple[float, float, float]]:
        return Estimate, (float(self), self.low, self.high)

    def __repr__(self) -> str:
        return f"Estimate({float(self)!r}, low={self.low!r}, high={self.high!r})"


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`. All measures are fractions with intervals at the level
    `confidence`.

    >>> found = evaluate([3.0, 4.0, 5.0], [1.0, 2.0, 3.5])
    >>> found.num_id, found.num_ood, round(float(found.auroc), 3)
    (3, 3, 0.889)
    """

    auroc: Estimate
    #: false-positive rate at the rate `tpr`, in the convention `positive`
    fpr: Estimate
    #: ID as positive, whatever `positive` is
    aupr_in: Estimate
    #: OOD as positive
    aupr_out: Estimate
    tpr: float
    positive: Literal["id", "ood"]
    confidence: float
    num_id: int
    num_ood: int

    @property
    def fpr95(self) -> Estimate:
        """`fpr`, if `tpr` is 0.95."""
        if self.tpr != 0.95:
            raise AttributeError(f"this evaluation is at tpr={self.tpr:g}, not 0.95: read .fpr")
        return self.fpr

    def to_dict(self) -> dict[str, object]:
        """Plain numbers and strings, for JSON."""
        found: dict[str, object] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            found[field.name] = value.to_dict() if isinstance(value, Estimate) else value
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Evaluation:
        """The evaluation from what `to_dict` returned."""
        read: dict[str, Any] = {}
        for field in fields(cls):
            value = values[field.name]
            read[field.name] = Estimate(**value) if isinstance(value, dict) else value
        return cls(**read)

    def __str__(self) -> str:
        named = {
            "AUROC": self.auroc,
            f"FPR{100 * self.tpr:g}": self.fpr,
            "AUPR-in": self.aupr_in,
            "AUPR-out": self.aupr_out,
        }
        shown = []
        for title, value in named.items():
            limits = f"[{as_percent(value.low)}, {as_percent(value.high)}]"
            shown.append(f"{title} {as_percent(value)} {limits}")
        sizes = f"{self.num_id} ID, {self.num_ood} OOD"
        return f"{', '.join(shown)} (%, {self.positive.upper()} positive, {sizes})"


def evaluate(
    id_scores: ArrayLike,
    ood_scores: ArrayLike,
    *,
    tpr: float = 0.95,
    positive: Literal["id", "ood"] = "id",
    confidence: float = 0.95,
    bootstrap: int = 10_000,
    seed: int = 0,
) -> Evaluation:
    """AUROC, FPR@TPR, AUPR-in and AUPR-out of scores (higher = more in-distribution), each with an
    interval.

    Args:
        id_scores: (N,) scores of in-distribution samples; tensor, array or list. ±inf is a score,
            NaN an error.
        ood_scores: (M,) scores of out-of-distribution samples.
        tpr: the true-positive rate that the threshold of FPR@TPR keeps, a fraction.
        positive: "id": FPR is the share of OOD accepted when `tpr` of ID are (as in the paper);
            "ood": the share of ID flagged when `tpr` of OOD are (OpenOOD, pytorch-ood). The other
            measures do not depend on it.
        confidence: of the intervals, a fraction.
        bootstrap: number of random draws behind the interval of FPR@TPR.
        seed: of these draws; the same seed gives the same interval.

    `fdbd.metrics.intervals` describes how the intervals are constructed.

    >>> result = evaluate([2.0, 3.0, 4.0, 5.0], [0.0, 1.0, 2.5])
    >>> round(result.auroc, 4), result.auroc.low < result.auroc < result.auroc.high
    (0.9167, True)
    >>> round(result.fpr95, 4), result.positive
    (0.3333, 'id')
    """
    expect("confidence", confidence, 0 < confidence < 1, "a fraction between 0 and 1")
    expect("bootstrap", bootstrap, bootstrap >= 100, "at least 100 draws for an interval")
    counts = Counts.from_scores(id_scores, ood_scores)
    ood_positive = counts.swapped()
    chosen = oriented(counts, positive)
    fpr = false_positive_rate(chosen, tpr)
    fpr_limits = fpr_interval([chosen], tpr, confidence, bootstrap, seed)
    return Evaluation(
        auroc=Estimate(area(counts), *auroc_interval(counts, confidence)),
        fpr=Estimate(fpr, *fpr_limits),
        aupr_in=Estimate(average_precision(counts), *aupr_interval(counts, confidence)),
        aupr_out=Estimate(
            average_precision(ood_positive), *aupr_interval(ood_positive, confidence)
        ),
        tpr=float(tpr),
        positive=positive,
        confidence=float(confidence),
        num_id=counts.num_positive,
        num_ood=counts.num_negative,
    )


def average(
    evaluations: Sequence[Evaluation],
    metric: Metric,
    id_scores: ArrayLike | None = None,
    ood_scores: Sequence[ArrayLike] = (),
) -> Estimate:
    """Mean of a measure over OOD sets, with an interval that knows that they share their ID
    samples.

    For AUROC and AUPR it is the mean of the sets' intervals, scaled by the ratio of two standard
    errors: that of the mean, and the mean of the sets' own. For FPR@TPR it comes from the random
    draws behind the sets' intervals, made for all sets together.

    Args:
        evaluations: one per OOD set.
        metric: the measure.
        id_scores: (N,) scores of the ID samples; None: not known, and the interval is the mean of
            the sets' intervals, which is too wide.
        ood_scores: scores of each OOD set.

    >>> inside, near, far = [3.0, 4.0, 5.0, 6.0], [1.0, 3.5], [0.0, 1.0]
    >>> found = [evaluate(inside, near), evaluate(inside, far)]
    >>> round(float(average(found, "auroc", inside, [near, far])), 4)
    0.9375
    """
    mean = mean_estimate([getattr(evaluation, metric) for evaluation in evaluations])
    if len(evaluations) == 1 or id_scores is None:
        return mean
    if metric == "fpr":
        limits = _joint_fpr_interval(evaluations[0], id_scores, ood_scores)
        return Estimate(mean, *limits)
    sets = [influences(id_scores, scores, metric) for scores in ood_scores]
    separate = sum(standard_error([part]) for part in sets) / len(sets)
    ratio = 1.0
    if separate > 0:
        ratio = standard_error(sets) / separate
    return Estimate(mean, mean - ratio * (mean - mean.low), mean + ratio * (mean.high - mean))


def mean_estimate(parts: Sequence[Estimate]) -> Estimate:
    """The mean of several estimates, with the mean of their limits, as if all erred alike."""
    value = sum(float(part) for part in parts) / len(parts)
    low = sum(part.low for part in parts) / len(parts)
    high = sum(part.high for part in parts) / len(parts)
    return Estimate(value, low, high)


def _joint_fpr_interval(
    one: Evaluation, id_scores: ArrayLike, ood_scores: Sequence[ArrayLike]
) -> Interval:
    """The interval of FPR@TPR's mean over sets that share their ID samples; `one` is the evaluation
    on any of them."""
    counts = []
    for scores in ood_scores:
        counts.append(oriented(Counts.from_scores(id_scores, scores), one.positive))
    shared: Literal["positive", "negative"] = "negative"
    if one.positive == "id":
        shared = "positive"
    return fpr_interval(counts, one.tpr, one.confidence, shared=shared)


def as_percent(fraction: float) -> str:
    """A fraction as a percentage with two decimals, without the sign.

    >>> as_percent(0.94114)
    '94.11'
    """
    return f"{100 * float(fraction):.2f}"
