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
        self.low, self.high = float(low), float(high)
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
    """What `evaluate` found. All measures are fractions with intervals at the level `confidence`.

    >>> found = evaluate([3.0, 4.0, 5.0], [1.0, 2.0, 3.5])
    >>> found.num_id, found.num_ood, round(float(found.auroc), 3)
    (3, 3, 0.889)
    """

    auroc: Estimate
    fpr: Estimate  #: false-positive rate at the true-positive rate `tpr`, in the convention `positive`
    aupr_in: Estimate  #: ID as positive, whatever `positive` is
    aupr_out: Estimate  #: OOD as positive
    tpr: float
    positive: Literal["id", "ood"]
    confidence: float
    num_id: int
    num_ood: int

    @property
    def fpr95(self) -> Estimate:
        """`fpr`, when `tpr` is 0.95."""
        if self.tpr != 0.95:
            raise AttributeError(f"this evaluation is at tpr={self.tpr:g}, not 0.95: read .fpr")
        return self.fpr

    def to_dict(self) -> dict[str, object]:
        """Plain numbers and strings, for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value.to_dict() if isinstance(value, Estimate) else value
            for name, value in values.items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Evaluation:
        """What `to_dict` gave."""
        given: Any = ((field.name, values[field.name]) for field in fields(cls))
        read: dict[str, Any] = {
            name: Estimate(**part) if isinstance(part, dict) else part for name, part in given
        }
        return cls(**read)

    def __str__(self) -> str:
        named = {"AUROC": self.auroc, f"FPR{100 * self.tpr:g}": self.fpr}
        named |= {"AUPR-in": self.aupr_in, "AUPR-out": self.aupr_out}
        shown = (
            f"{k} {as_percent(v)} [{as_percent(v.low)}, {as_percent(v.high)}]"
            for k, v in named.items()
        )
        return f"{', '.join(shown)} (%, {self.positive.upper()} positive, {self.num_id} ID, {self.num_ood} OOD)"


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
    counts = Counts.of(id_scores, ood_scores)
    chosen, swapped = oriented(counts, positive), counts.swapped()
    return Evaluation(
        auroc=Estimate(area(counts), *auroc_interval(counts, confidence)),
        fpr=Estimate(
            false_positive_rate(chosen, tpr),
            *fpr_interval([chosen], tpr, confidence, bootstrap, seed),
        ),
        aupr_in=Estimate(average_precision(counts), *aupr_interval(counts, confidence)),
        aupr_out=Estimate(average_precision(swapped), *aupr_interval(swapped, confidence)),
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
    """Mean of a measure over OOD sets. Its interval is, for AUROC and AUPR, the mean of the sets'
    intervals, scaled by the ratio of the mean's standard error to the mean of the sets' standard
    errors; for FPR@TPR it comes from the draws behind the sets' intervals, made together, so
    that the ID samples vary once for all sets.

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
    parts: list[Estimate] = [getattr(evaluation, metric) for evaluation in evaluations]
    value, low, high = (
        sum(each) / len(parts) for each in zip(*((float(p), p.low, p.high) for p in parts))
    )
    if len(parts) == 1 or id_scores is None:
        return Estimate(value, low, high)
    if metric == "fpr":
        first = evaluations[0]
        counts = [oriented(Counts.of(id_scores, scores), first.positive) for scores in ood_scores]
        shared: Literal["positive", "negative"] = (
            "positive" if first.positive == "id" else "negative"
        )
        return Estimate(value, *fpr_interval(counts, first.tpr, first.confidence, shared=shared))
    sets = [influences(id_scores, scores, metric) for scores in ood_scores]
    separate = sum(standard_error([part]) for part in sets) / len(sets)
    ratio = standard_error(sets) / separate if separate > 0 else 1.0
    return Estimate(value, value - ratio * (value - low), value + ratio * (high - value))


def as_percent(fraction: float) -> str:
    """A fraction as a percentage with two decimals, without the sign.

    >>> as_percent(0.94114)
    '94.11'
    """
    return f"{100 * float(fraction):.2f}"
