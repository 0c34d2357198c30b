"""Confidence intervals for AUROC, AUPR and FPR@TPR that keep their coverage at few samples, ties
and AUROC near 1.

The textbook intervals do not: DeLong's shrinks to nothing at perfect separation, and a binomial
interval for FPR@TPR forgets that the threshold was estimated too. Coverage is shown by simulation
in the tests.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from fdbd.core.ranks import as_decimal
from fdbd.metrics.points import Counts, Floats, area, average_precision, false_positive_rate

Interval = tuple[float, float]
Beta = Callable[[Floats, Floats], Floats]
"""Draws a number from each Beta law, given both parameters of each."""


def auroc_interval(counts: Counts, confidence: float) -> Interval:
    """DeLong's interval (DeLong et al., Biometrics 44, 1988; by ranks after Sun & Xu, 2014), on the
    logit scale.

    Three additions make it hold near 0 and 1, where the variance rests on the few samples that
    overlap:

    - Student's t replaces the normal, with Satterthwaite's degrees of freedom from the spread of
    the placements: few overlapping samples, few degrees of freedom. With many, nothing changes.
    - It never leaves the pair limits: min(n, m) disjoint ID-OOD pairs are independent trials that
    succeed with probability AUROC, so the Clopper-Pearson limits for that many trials are valid, if
    wide. They are also the interval if the variance is zero: at AUROC 1, for n = m = 1000, it is
    [0.9963, 1].
    - It reaches at least as far towards 1/2 as an unseen share p of look-alikes would take it, (1 −
    p)·AUROC + p/2, with p the largest share of one side that a sample of that size misses with
    probability 1 − confidence.
    """
    value = area(counts)
    pairs = min(counts.num_positive, counts.num_negative)
    variance, freedom = _spread(counts, area_influences(counts))
    low, high = clopper_pearson(value, pairs, confidence)
    if variance > 0:
        inner_low, inner_high = logit_limits(value, variance, freedom, confidence)
        low = max(inner_low, low)
        high = min(inner_high, high)
    unseen = 1 - (1 - confidence) ** (1 / pairs)
    shifted = (1 - unseen) * value + unseen / 2
    return _around(value, min(low, shifted), max(high, shifted))


def aupr_interval(counts: Counts, confidence: float) -> Interval:
    """Logit interval from the influence of each sample on the average precision, with Student's t
    as for AUROC. Two things make the lower limit hold near 1:

    - It starts from the AUPR with half a negative more, above all samples (a continuity
    correction): if no negative happens to lie among the top ranks, their precision is 1 in the
    sample, and shows no variance.
    - It is never below the AUPR of the worst case that AUROC's lower pair limit allows, in which a
    share of the negatives lies above all positives. That is also the limit at AUPR 1, where the
    variance is zero.
    """
    value = average_precision(counts)
    roc = area(counts)
    pairs = min(counts.num_positive, counts.num_negative)
    roc_low, roc_high = clopper_pearson(roc, pairs, confidence)
    lowest = _aupr_at(roc_low, counts)
    variance, freedom = _spread(counts, precision_influences(counts))
    if variance <= 0 or value >= 1:
        # The upper limit takes the share of what is missing to 1 that AUROC's takes.
        gain = 0.0
        if roc < 1:
            gain = (roc_high - roc) / (1 - roc)
        return _around(value, lowest, value + (1 - value) * gain)
    corrected = average_precision(counts, extra_negatives=0.5)
    low, _ = logit_limits(corrected, variance, freedom, confidence)
    _, high = logit_limits(value, variance, freedom, confidence)
    return _around(value, min(max(low, lowest), corrected), high)


def _aupr_at(roc: float, counts: Counts) -> float:
    """The AUPR at which AUROC would be `roc` if that were because a share 1 − `roc` of the
    negatives lay above all positives, and the others below."""
    negatives_per_positive = (1 - roc) * counts.num_negative / counts.num_positive
    if negatives_per_positive <= 0:
        return 1.0
    return 1 - negatives_per_positive * math.log1p(1 / negatives_per_positive)


def fpr_interval(
    sets: Sequence[Counts],
    tpr: float,
    confidence: float,
    draws: int = 10_000,
    seed: int = 0,
    shared: Literal["positive", "negative"] = "positive",
) -> Interval:
    """Interval for FPR@TPR, or for its mean over several sets, from `draws` random draws.

    Two things are estimated from the samples, and each draw has both:

    - the threshold: for any distribution, the number of the n positives below the population's
      threshold is Binomial(n, 1 − tpr). A drawn number, the rank, places the threshold between two
      neighbouring order statistics;
    - the rate of the negatives above this threshold, drawn from Clopper and Pearson's Beta law.

    This stands for a bootstrap of both sides, at the cost of one binomial and one Beta number per
    draw instead of a resample. Unlike the bootstrap it does not shrink to nothing if no negative is
    accepted. The lower limit takes the upper neighbour and the lower Beta law, the upper limit the
    lower neighbour and the upper law, so that it holds with ties.

    Sets that share their positives share the drawn ranks. Sets that share their negatives share the
    uniform numbers behind the drawn rates, as if their errors moved together: the interval of the
    mean is then as wide as it can be.
    """
    from scipy.special import betaincinv

    tpr = float(as_decimal(tpr))
    rng = np.random.default_rng(seed)
    value = float(np.mean([false_positive_rate(counts, tpr) for counts in sets]))
    shares_negatives = shared == "negative"
    uniform = None
    if shares_negatives and len(sets) > 1:
        uniform = rng.random(draws)

    def beta(a: Floats, b: Floats) -> Floats:
        """Beta numbers, drawn freely or at the quantiles `uniform`."""
        if uniform is None:
            return rng.beta(a, b)
        quantiles: Floats = betaincinv(a, b, uniform)
        return quantiles

    rank = None
    uppers = []
    lowers = []
    for counts in sets:
        if rank is None or shares_negatives:
            rank = rng.binomial(counts.num_positive, 1 - tpr, size=draws)
        uppers.append(_upper_rates(counts, rank, beta))
        lowers.append(_lower_rates(counts, rank, beta))
    tail = (1 - confidence) / 2
    low = np.quantile(np.mean(lowers, axis=0), tail)
    high = np.quantile(np.mean(uppers, axis=0), 1 - tail)
    return _around(value, float(low), float(high))


def _upper_rates(counts: Counts, rank: np.ndarray, beta: Beta) -> Floats:
    """Rates drawn from the upper law, at the lower neighbour of each threshold."""
    accepted = _accepted(counts, rank)
    rejected = counts.num_negative - accepted
    # The law is not defined at the end, where the limit is known.
    rates = beta(accepted + 1, np.maximum(rejected, 1))
    return np.where(rejected == 0, 1.0, rates)


def _lower_rates(counts: Counts, rank: np.ndarray, beta: Beta) -> Floats:
    """Rates drawn from the lower law, at the upper neighbour of each threshold."""
    accepted = _accepted(counts, rank + 1)
    rejected = counts.num_negative - accepted
    rates = beta(np.maximum(accepted, 1), rejected + 1)
    return np.where(accepted == 0, 0.0, rates)


def _accepted(counts: Counts, rank: np.ndarray) -> Floats:
    """The number of negatives that a threshold at the rank-th smallest positive accepts; rank 0
    accepts all, n + 1 none."""
    at_or_below = np.cumsum(counts.positive[::-1])
    accepted = np.append(np.cumsum(counts.negative)[::-1], 0.0)
    return np.where(rank == 0, counts.num_negative, accepted[np.searchsorted(at_or_below, rank)])


def area_influences(counts: Counts) -> tuple[Floats, Floats]:
    """What a positive, and what a negative, at each level adds to AUROC, up to a constant: the
    share of the other side that it is told apart from, a tie counting one half."""
    below = 1 - (np.cumsum(counts.negative) - counts.negative / 2) / counts.num_negative
    above = (np.cumsum(counts.positive) - counts.positive / 2) / counts.num_positive
    return below, above


def precision_influences(counts: Counts) -> tuple[Floats, Floats]:
    """The same for average precision: a positive brings its own precision and raises that of every
    positive at or below it; a negative lowers them."""
    true = np.cumsum(counts.positive)
    false = np.cumsum(counts.negative)
    # By calculus, one more positive raises the precision true/(true + false) by false/(true +
    # false)², and one more negative lowers it by true/(true + false)².
    share = counts.positive / counts.num_positive / (true + false) ** 2
    raised = np.cumsum((share * false)[::-1])[::-1] * counts.num_positive
    lowered = np.cumsum((share * true)[::-1])[::-1] * counts.num_negative
    return true / (true + false) + raised, -lowered


def _spread(counts: Counts, influences: tuple[Floats, Floats]) -> tuple[float, float]:
    """Variance of a statistic whose influences by level are given, and the degrees of freedom of
    that variance, by Satterthwaite: twice its square over its own variance."""
    variance = 0.0
    variance_of_variance = 0.0
    for influence, weight in zip(influences, (counts.positive, counts.negative)):
        number = weight.sum()
        if number < 2:
            return 0.0, 1.0
        squares = (influence - np.average(influence, weights=weight)) ** 2
        mean_square = np.average(squares, weights=weight)
        variance += mean_square / (number - 1)
        spread_of_squares = np.average((squares - mean_square) ** 2, weights=weight)
        variance_of_variance += spread_of_squares / number**3
    freedom = math.inf
    if variance_of_variance > 0:
        freedom = 2 * variance**2 / variance_of_variance
    return float(variance), max(float(freedom), 1.0)


def logit_limits(value: float, variance: float, freedom: float, confidence: float) -> Interval:
    """Limits from a variance with its degrees of freedom, by Student's t on the logit scale."""
    from scipy.special import expit, stdtrit

    if not 0 < value < 1:
        return value, value
    reach = (
        stdtrit(min(freedom, 1e9), (1 + confidence) / 2)
        * math.sqrt(variance)
        / (value * (1 - value))
    )
    centre = math.log(value) - math.log1p(-value)
    return float(expit(centre - reach)), float(expit(centre + reach))


def clopper_pearson(value: float, trials: float, confidence: float) -> Interval:
    """Clopper and Pearson's limits for a share `value` of `trials`."""
    from scipy.special import betaincinv

    hits = trials * value
    misses = trials * (1 - value)
    tail = (1 - confidence) / 2
    low = betaincinv(hits, misses + 1, tail) if hits > 0 else 0.0
    high = betaincinv(hits + 1, misses, 1 - tail) if misses > 0 else 1.0
    return float(low), float(high)


def _around(value: float, low: float, high: float) -> Interval:
    return max(0.0, min(low, value)), min(1.0, max(high, value))
