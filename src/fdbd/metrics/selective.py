"""Selective prediction: one score rejects what the classifier gets wrong and what is OOD.

A *failure* is a sample that must not be accepted: an ID sample with a wrong prediction, or any OOD
sample. At a threshold, the *coverage* is the share of samples that are accepted and the *risk* the
share of failures among those. Every measure here takes scores (higher = more trustworthy), whether
the prediction of each ID sample is right, and, if there are any, the scores of OOD samples.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np

from fdbd.core.batch import ArrayLike
from fdbd.core.configuration import expect
from fdbd.core.ranks import count_to_accept
from fdbd.metrics.comparison import Influences, standard_error
from fdbd.metrics.evaluation import Estimate, Evaluation, evaluate
from fdbd.metrics.intervals import clopper_pearson, logit_limits
from fdbd.metrics.points import Floats, as_scores

# Samples on either side of the threshold from which the accuracy at the threshold is estimated.
FEWEST_NEIGHBOURS = 20


class Decisions(NamedTuple):
    """ID and OOD samples in one array, with what decides each measure."""

    #: (N + M,) of the ID samples, then of the OOD samples
    scores: Floats
    #: (N + M,) 1 for a failure, 0 for a right prediction
    failed: Floats
    #: N
    num_id: int

    @classmethod
    def from_scores(
        cls, id_scores: ArrayLike, correct: ArrayLike, ood_scores: ArrayLike | None = None
    ) -> Decisions:
        """Check what was given, and join it."""
        inside = as_scores(id_scores, "id_scores")
        right = as_flags(correct, len(inside))
        if ood_scores is None:
            return cls(inside, 1.0 - right, len(inside))
        outside = as_scores(ood_scores, "ood_scores")
        scores = np.concatenate([inside, outside])
        failed = np.concatenate([1.0 - right, np.ones(len(outside))])
        return cls(scores, failed, len(inside))


def as_flags(correct: ArrayLike, count: int) -> Floats:
    """(count,) ones and zeros from booleans, or from numbers that are 0 or 1."""
    values: Any = correct
    if hasattr(values, "tolist"):
        # An array, or a tensor on any device.
        values = values.tolist()
    flags = np.asarray(values, dtype=np.float64)
    if flags.shape != (count,):
        raise ValueError(f"correct has shape {flags.shape}, expected ({count},): one per ID sample")
    if not np.isin(flags, (0.0, 1.0)).all():
        raise ValueError("correct holds other values than True and False (or 1 and 0)")
    return flags


class Levels(NamedTuple):
    """The distinct scores from the highest down, and what is accepted at each. Samples that tie are
    accepted together, so that no measure depends on their order."""

    #: (N,) the level of each sample
    level_of: np.ndarray
    #: (L,) samples at each level
    counts: Floats
    #: (L,) failures at each level
    failures: Floats

    @classmethod
    def from_decisions(cls, decisions: Decisions) -> Levels:
        distinct, inverse = np.unique(-decisions.scores, return_inverse=True)
        counts = np.bincount(inverse, minlength=len(distinct)).astype(np.float64)
        failures = np.bincount(inverse, weights=decisions.failed, minlength=len(distinct))
        return cls(inverse, counts, failures.astype(np.float64))


def risk_coverage(
    id_scores: ArrayLike,
    correct: ArrayLike,
    ood_scores: ArrayLike | None = None,
    *,
    points: int = 200,
) -> tuple[Floats, Floats]:
    """The risk-coverage curve: coverages, ascending, and the risk at each; (M,), M ≤ points.

    Without `ood_scores`, failures are wrong predictions alone.

    >>> coverage, risk = risk_coverage([4.0, 3.0, 2.0, 1.0], [True, True, False, True])
    >>> coverage.tolist(), risk.round(3).tolist()
    ([0.25, 0.5, 0.75, 1.0], [0.0, 0.0, 0.333, 0.25])
    """
    expect("points", points, points >= 2, "at least 2: the two ends of the curve")
    levels = Levels.from_decisions(Decisions.from_scores(id_scores, correct, ood_scores))
    accepted = np.cumsum(levels.counts)
    coverage = accepted / accepted[-1]
    risk = np.cumsum(levels.failures) / accepted
    if len(coverage) > points:
        kept = np.unique(np.searchsorted(coverage, np.linspace(coverage[0], 1, points)))
        return coverage[kept], risk[kept]
    return coverage, risk


def aurc(
    id_scores: ArrayLike,
    correct: ArrayLike,
    ood_scores: ArrayLike | None = None,
    *,
    confidence: float = 0.95,
) -> Estimate:
    """Area under the risk-coverage curve: the mean risk over the thresholds that the samples set
    (Geifman et al., 2019); smaller is better.

    >>> found = aurc([4.0, 3.0, 2.0, 1.0], [True, True, False, True])
    >>> round(float(found), 4)  # the mean of 0, 0, 1/3 and 1/4
    0.1458
    """
    decisions = Decisions.from_scores(id_scores, correct, ood_scores)
    influences = aurc_influences(decisions)
    return _with_interval(decisions, influences, confidence, _worst_aurc)


def augrc(
    id_scores: ArrayLike,
    correct: ArrayLike,
    ood_scores: ArrayLike | None = None,
    *,
    confidence: float = 0.95,
) -> Estimate:
    """Area under the generalised risk-coverage curve (Traub et al., 2024): the mean probability
    that a sample is accepted and a failure; smaller is better.

    It equals (1 − AUROC_f)·a·(1 − a) + (1 − a)²/2, a the share of samples that are not failures and
    AUROC_f that of failures against the others. Unlike AURC it gives each failure the same weight,
    wherever the ones above it stand.

    >>> found = augrc([4.0, 3.0, 2.0, 1.0], [True, True, False, True])
    >>> round(float(found), 5)  # AUROC_f = 2/3, a = 3/4
    0.09375
    """
    decisions = Decisions.from_scores(id_scores, correct, ood_scores)
    influences = augrc_influences(decisions)
    return _with_interval(decisions, influences, confidence, lambda unseen: unseen)


def accuracy_at_coverage(
    id_scores: ArrayLike, correct: ArrayLike, coverage: float, *, confidence: float = 0.95
) -> Estimate:
    """The classifier's accuracy on the ID samples that are accepted when at least a share
    `coverage` of them are, by the strictest such threshold.

    The interval knows that the threshold was estimated from the same samples: to the binomial
    variance of the accepted it adds that of a threshold which accepts a few samples more or fewer,
    which matters if the samples next to it are right less often than the others.

    >>> found = accuracy_at_coverage([4.0, 3.0, 2.0, 1.0], [True, True, False, True], 0.75)
    >>> round(float(found), 3)
    0.667
    """
    decisions = Decisions.from_scores(id_scores, correct)
    levels = Levels.from_decisions(decisions)
    need = count_to_accept(len(decisions.scores), coverage)
    accepted_at = np.cumsum(levels.counts)
    level = int(np.searchsorted(accepted_at, need))
    accepted = accepted_at[level]
    value = 1.0 - levels.failures[: level + 1].sum() / accepted
    low, high = clopper_pearson(value, accepted, confidence)
    if 0 < value < 1:
        factor = _widening(decisions, value, accepted)
        low = value - factor * (value - low)
        high = value + factor * (high - value)
    return Estimate(value, max(0.0, low), min(1.0, high))


def _widening(decisions: Decisions, accuracy: Any, accepted: Any) -> float:
    """The factor by which an interval for the accuracy of the accepted samples grows because the
    threshold is estimated from the same samples."""
    share = accepted / len(decisions.scores)
    at_threshold = _accuracy_near(decisions, int(accepted))
    binomial_variance = accuracy * (1 - accuracy) / accepted
    variance_of_threshold = (at_threshold - accuracy) ** 2 * (1 - share) / accepted
    return math.sqrt(1 + variance_of_threshold / binomial_variance)


def evaluate_joint(
    id_scores: ArrayLike,
    correct: ArrayLike,
    ood_scores: ArrayLike,
    *,
    tpr: float = 0.95,
    positive: Literal["id", "ood"] = "id",
    confidence: float = 0.95,
) -> Evaluation:
    """All measures for the task of accepting exactly the right predictions: right ID samples
    against wrong ID samples and OOD samples together (SCOD; Xia and Bouganis, 2022).

    Under `evaluate`, a rejected ID sample is a false alarm even if its prediction was wrong. Here
    such a rejection is what was asked for. The options are those of `evaluate`.

    >>> found = evaluate_joint([4.0, 3.0, 0.5], [True, True, False], [1.0, 2.0])
    >>> float(found.auroc), found.num_id, found.num_ood
    (1.0, 2, 3)
    """
    trusted, distrusted = split_by_correctness(id_scores, correct, ood_scores)
    return evaluate(trusted, distrusted, tpr=tpr, positive=positive, confidence=confidence)


def split_by_correctness(
    id_scores: ArrayLike, correct: ArrayLike, ood_scores: ArrayLike
) -> tuple[Floats, Floats]:
    """Scores of right ID samples; and those of wrong ID samples, then of OOD samples."""
    decisions = Decisions.from_scores(id_scores, correct, ood_scores)
    is_failure = decisions.failed == 1
    if is_failure.all():
        raise ValueError("no prediction is right, so there is nothing to accept")
    return decisions.scores[~is_failure], decisions.scores[is_failure]


def evaluate_full_spectrum(
    id_scores: ArrayLike,
    shifted_scores: ArrayLike,
    ood_scores: ArrayLike,
    *,
    tpr: float = 0.95,
    positive: Literal["id", "ood"] = "id",
    confidence: float = 0.95,
) -> Evaluation:
    """All measures with covariate-shifted ID samples (corrupted, other styles) counted as ID, which
    they are by their classes (full-spectrum OOD detection; Yang et al., 2022).

    `shifted_scores` are those of all shifted sets, joined; the options are those of `evaluate`.

    >>> round(float(evaluate_full_spectrum([4.0, 3.0], [1.0], [2.0, 0.5]).auroc), 4)
    0.8333
    """
    clean = as_scores(id_scores, "id_scores")
    shifted = as_scores(shifted_scores, "shifted_scores")
    inside = np.concatenate([clean, shifted])
    return evaluate(inside, ood_scores, tpr=tpr, positive=positive, confidence=confidence)


def aurc_influences(decisions: Decisions) -> Influences:
    """What each sample adds to AURC.

    With R and C the risk and the coverage at a score, AURC = E[R(S)], and sample i with failure eᵢ
    has the influence R(sᵢ) + E[1(S ≤ sᵢ)(eᵢ − R(S)) / C(S)]: its own threshold, and its part in the
    risk at all thresholds that accept it.
    """
    levels = Levels.from_decisions(decisions)
    accepted = np.cumsum(levels.counts)
    risk = np.cumsum(levels.failures) / accepted
    # E[1(S ≤ s) / C(S)] and E[1(S ≤ s) R(S) / C(S)] for each score s: sums over the levels from the
    # last, which has the lowest score, up to that of s.
    at_or_below = np.cumsum((levels.counts / accepted)[::-1])[::-1]
    risk_at_or_below = np.cumsum((levels.counts * risk / accepted)[::-1])[::-1]
    level = levels.level_of
    influence = risk[level] + decisions.failed * at_or_below[level] - risk_at_or_below[level]
    return _by_side(influence, decisions.num_id)


def augrc_influences(decisions: Decisions) -> Influences:
    """What each sample adds to AUGRC = P(i fails and scores above j), ties one half: its part as i,
    and its part as j."""
    levels = Levels.from_decisions(decisions)
    total = len(decisions.scores)
    below = 1 - (np.cumsum(levels.counts) - levels.counts / 2) / total
    failures_above = (np.cumsum(levels.failures) - levels.failures / 2) / total
    level = levels.level_of
    as_upper = decisions.failed * below[level]
    as_lower = failures_above[level]
    value = as_upper.mean()
    return _by_side(as_upper + as_lower - value, decisions.num_id)


def _by_side(influence: Floats, num_id: int) -> Influences:
    """Influences of both sides, scaled so that the sum of both means is the measure: ID and OOD
    samples were drawn separately, and their numbers are fixed."""
    total = len(influence)
    of_id = influence[:num_id] * (num_id / total)
    of_ood = influence[num_id:] * ((total - num_id) / total)
    return Influences(of_id, of_ood)


def total_of(influences: Influences) -> float:
    """The measure itself, from the influences that `aurc_influences` and `augrc_influences`
    give."""
    value = influences.of_id.mean()
    if len(influences.of_ood):
        value = value + influences.of_ood.mean()
    return float(value)


def _with_interval(
    decisions: Decisions, influences: Influences, confidence: float, worst: Any
) -> Estimate:
    """The measure, with an interval on the logit scale.

    If no sample is a failure, there may still be failures that the sample has missed. The largest
    share of them that a sample of this size misses with probability 1 − confidence gives the upper
    limit: `worst` of that share, as if all of them scored above the other samples.
    """
    expect("confidence", confidence, 0 < confidence < 1, "a fraction between 0 and 1")
    value = total_of(influences)
    total = len(decisions.scores)
    if not decisions.failed.any():
        unseen = 1 - (1 - confidence) ** (1 / total)
        return Estimate(0.0, 0.0, worst(unseen))
    if decisions.failed.all() or min(decisions.num_id, total) < 2:
        return Estimate(value, 0.0, 1.0)
    error = standard_error([influences])
    low, high = logit_limits(value, error**2, _degrees_of_freedom(influences), confidence)
    return Estimate(value, min(low, value), max(high, value))


def _degrees_of_freedom(influences: Influences) -> float:
    """Satterthwaite's degrees of freedom of the variance: few if it rests on few samples."""
    variance = 0.0
    uncertainty = 0.0
    for side in influences:
        if len(side) < 2:
            continue
        squares = (side - side.mean()) ** 2
        variance += squares.mean() / len(side)
        uncertainty += squares.var() / len(side) ** 3
    if uncertainty == 0:
        return math.inf
    return max(1.0, 2 * variance**2 / uncertainty)


def _worst_aurc(unseen: float) -> float:
    """AURC if a share `unseen` of failures stood above all other samples: ∫ min(1, unseen/c) dc."""
    return unseen * (1 + math.log(1 / unseen))


def _accuracy_near(decisions: Decisions, rank: int) -> float:
    """Accuracy of the samples around the rank-th highest score."""
    reach = max(FEWEST_NEIGHBOURS, int(math.sqrt(len(decisions.scores))))
    order = np.argsort(-decisions.scores, kind="stable")
    near = order[max(0, rank - reach) : rank + reach]
    return float(1 - decisions.failed[near].mean())
