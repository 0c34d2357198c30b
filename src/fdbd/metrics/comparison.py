"""Whether two detectors differ in AUROC on the same samples: DeLong's paired test, on one OOD set
or several."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from fdbd.core.batch import ArrayLike
from fdbd.metrics.intervals import area_influences, precision_influences
from fdbd.metrics.points import Counts, Floats, as_scores

Verdict = Literal["higher", "lower", "undecided"]


class Comparison(NamedTuple):
    """The difference between two detectors, and how sure it is."""

    #: AUROC of the first detector minus that of the second
    difference: float
    #: of the difference
    standard_error: float
    #: two-sided: the probability of a difference at least as large if the detectors are equal
    p_value: float

    @classmethod
    def from_difference(cls, difference: float, standard_error: float) -> Comparison:
        """The normal test of a difference; a standard error of 0 leaves no doubt about any
        difference but 0."""
        if standard_error > 0:
            p_value = math.erfc(abs(difference) / standard_error / math.sqrt(2))
        elif difference == 0:
            p_value = 1.0
        else:
            p_value = 0.0
        return cls(difference, standard_error, p_value)

    @classmethod
    def of(cls, difference: float, standard_error: float) -> Comparison:
        """The former name of `from_difference`."""
        warnings.warn(
            "Comparison.of is now Comparison.from_difference; the old name will be removed in 0.4",
            DeprecationWarning,
            stacklevel=2,
        )
        return cls.from_difference(difference, standard_error)

    def verdict(self, level: float = 0.05) -> Verdict:
        """Whether the first detector's AUROC is higher, lower, or not told apart at this level of
        significance.

        >>> Comparison.from_difference(0.259, 0.090).verdict()
        'higher'
        """
        if self.p_value > level:
            return "undecided"
        return "higher" if self.difference > 0 else "lower"


def delong_test(
    id_scores_a: ArrayLike, ood_scores_a: ArrayLike, id_scores_b: ArrayLike, ood_scores_b: ArrayLike
) -> Comparison:
    """Compares the AUROC of two detectors that scored the same samples in the same order (DeLong et
    al., 1988).

    Since the samples are the same, the two AUROCs vary together, and their difference varies less
    than their separate intervals suggest. If both detectors rank all samples alike, p is 1.
    O(N log N), by ranks (Sun & Xu, 2014).

    >>> first = ([3.0, 4.0, 5.0, 2.0], [1.0, 2.5, 0.0])
    >>> result = delong_test(*first, [3.0, 1.0, 2.0, 0.5], [1.5, 2.5, 0.0])
    >>> round(result.difference, 4), 0 < result.p_value < 1
    (0.3333, True)
    """
    first = influences(
        as_scores(id_scores_a, "id_scores_a"), as_scores(ood_scores_a, "ood_scores_a")
    )
    second = influences(
        as_scores(id_scores_b, "id_scores_b"), as_scores(ood_scores_b, "ood_scores_b")
    )
    return compare([first], [second])


class Influences(NamedTuple):
    """What each sample adds to a measure, up to a constant. The variance of the measure is then the
    sum of the variances of two means."""

    #: (N,) one number per ID sample; for AUROC, their mean is the AUROC itself
    of_id: Floats
    #: (M,) one number per OOD sample
    of_ood: Floats


def influences(id_scores: ArrayLike, ood_scores: ArrayLike, metric: str = "auroc") -> Influences:
    """Influence of each sample on "auroc", "aupr_in" or "aupr_out"."""
    counts = Counts.from_scores(id_scores, ood_scores)
    if metric == "auroc":
        of_id, of_ood = area_influences(counts)
    elif metric == "aupr_in":
        of_id, of_ood = precision_influences(counts)
    else:
        # OOD is positive there, and the levels run from the lowest score up.
        of_positive, of_negative = precision_influences(counts.swapped())
        of_ood = of_positive[::-1]
        of_id = of_negative[::-1]
    ascending = counts.scores[::-1]
    level_of_id = -1 - np.searchsorted(ascending, as_scores(id_scores, "id_scores"))
    level_of_ood = -1 - np.searchsorted(ascending, as_scores(ood_scores, "ood_scores"))
    return Influences(of_id[level_of_id], of_ood[level_of_ood])


def compare(first: Sequence[Influences], second: Sequence[Influences]) -> Comparison:
    """Compares the mean AUROC of two detectors over OOD sets that share their ID samples, from the
    `influences` on each set."""
    parts = differences(first, second)
    # The mean influence of the ID samples on AUROC is AUROC itself.
    difference = float(np.mean([part.of_id.mean() for part in parts]))
    return Comparison.from_difference(difference, standard_error(parts))


def differences(first: Sequence[Influences], second: Sequence[Influences]) -> list[Influences]:
    """The influences on the difference of two detectors, for each OOD set."""
    found = []
    for a, b in zip(first, second):
        sizes_of_a = f"{len(a.of_id)} ID and {len(a.of_ood)} OOD"
        sizes_of_b = f"{len(b.of_id)} ID and {len(b.of_ood)} OOD"
        if sizes_of_a != sizes_of_b:
            raise ValueError(
                f"the detectors scored different samples: {sizes_of_a} against {sizes_of_b}"
            )
        if min(len(a.of_id), len(a.of_ood)) < 2:
            raise ValueError(f"a comparison takes two samples per side, got {sizes_of_a}")
        found.append(Influences(a.of_id - b.of_id, a.of_ood - b.of_ood))
    return found


def standard_error(sets: Sequence[Influences]) -> float:
    """Standard error of a measure's mean over OOD sets that share their ID samples but not their
    OOD samples:

        var = var_i(mean_j A_ji) / N + Σ_j var_k(B_jk) / M_j / J²

    with A_ji the influence of ID sample i in set j of J, and B_jk that of OOD sample k of set j.
    """
    by_id = np.mean([part.of_id for part in sets], axis=0)
    variance = by_id.var(ddof=1) / len(by_id)
    for part in sets:
        # Measures of ID samples alone have no influences of OOD samples.
        if len(part.of_ood) > 1:
            variance += part.of_ood.var(ddof=1) / len(part.of_ood) / len(sets) ** 2
    return math.sqrt(variance)
