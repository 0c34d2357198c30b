"""Whether two detectors differ in AUROC on the same samples: DeLong's paired test, on one OOD set
or several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from fdbd.core.batch import ArrayLike
from fdbd.metrics.intervals import area_influences, precision_influences
from fdbd.metrics.points import Counts, Floats, as_scores

Verdict = Literal["higher", "lower", "undecided"]


class Comparison(NamedTuple):
    """The difference between two detectors, and how sure it is."""

    difference: float  #: AUROC of the first detector minus that of the second
    standard_error: float  #: of the difference
    p_value: float  #: two-sided: the probability of a difference at least as large when the detectors are equal

    @classmethod
    def of(cls, difference: float, standard_error: float) -> Comparison:
        """The normal test of a difference; a standard error of 0 leaves no doubt about any
        difference but 0."""
        if standard_error == 0:
            return cls(difference, 0.0, 1.0 if difference == 0 else 0.0)
        return cls(
            difference, standard_error, math.erfc(abs(difference) / standard_error / math.sqrt(2))
        )

    def verdict(self, level: float = 0.05) -> Verdict:
        """Whether the first detector's AUROC is higher, lower, or not told apart at this level of
        significance.

        >>> Comparison.of(0.259, 0.090).verdict(), Comparison.of(0.0001, 0.01).verdict()
        ('higher', 'undecided')
        """
        if self.p_value > level:
            return "undecided"
        return "higher" if self.difference > 0 else "lower"


def delong_test(
    id_scores_a: ArrayLike, ood_scores_a: ArrayLike, id_scores_b: ArrayLike, ood_scores_b: ArrayLike
) -> Comparison:
    """Compares the AUROC of two detectors that scored the same samples in the same order (DeLong et
    al., 1988).

    The samples being the same, the two AUROCs vary together, and their difference less than their
    separate intervals suggest. O(N log N), by ranks (Sun & Xu, 2014). Equal placements of all
    samples give p = 1.

    >>> result = delong_test([3.0, 4.0, 5.0, 2.0], [1.0, 2.5, 0.0], [3.0, 1.0, 2.0, 0.5], [1.5, 2.5, 0.0])
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
    """What each sample adds to a measure, up to a constant: the measure's variance is that of two
    means."""

    of_id: Floats  #: (N,) one number per ID sample; for AUROC, their mean is the AUROC itself
    of_ood: Floats  #: (M,) one number per OOD sample


def influences(id_scores: ArrayLike, ood_scores: ArrayLike, metric: str = "auroc") -> Influences:
    """Influence of each sample on "auroc", "aupr_in" or "aupr_out"."""
    counts = Counts.of(id_scores, ood_scores)
    if metric == "aupr_out":
        of_ood, of_id = (part[::-1] for part in precision_influences(counts.swapped()))
    else:
        of_id, of_ood = (
            area_influences(counts) if metric == "auroc" else precision_influences(counts)
        )
    ascending = counts.scores[::-1]
    inside, outside = (
        -1 - np.searchsorted(ascending, as_scores(part, "")) for part in (id_scores, ood_scores)
    )
    return Influences(of_id[inside], of_ood[outside])


def compare(first: Sequence[Influences], second: Sequence[Influences]) -> Comparison:
    """Compares the mean AUROC of two detectors over OOD sets that share their ID samples, from the
    `influences` on each set."""
    for a, b in zip(first, second):
        of_a, of_b = (f"{len(part.of_id)} ID and {len(part.of_ood)} OOD" for part in (a, b))
        if of_a != of_b:
            raise ValueError(f"the detectors scored different samples: {of_a} against {of_b}")
        if min(len(a.of_id), len(a.of_ood)) < 2:
            raise ValueError(f"a comparison takes two samples per side, got {of_a}")
    parts = [Influences(a.of_id - b.of_id, a.of_ood - b.of_ood) for a, b in zip(first, second)]
    difference = float(np.mean([part.of_id.mean() for part in parts]))
    return Comparison.of(difference, standard_error(parts))


def standard_error(sets: Sequence[Influences]) -> float:
    """Standard error of a measure's mean over OOD sets that share their ID samples but not their
    OOD samples:

        var = var_i(mean_j A_ji) / N + Σ_j var_k(B_jk) / M_j / J²

    with A_ji the influence of ID sample i in set j of J, and B_jk that of OOD sample k of set j.
    """
    by_id = np.mean([part.of_id for part in sets], axis=0)
    of_ood = sum(part.of_ood.var(ddof=1) / len(part.of_ood) for part in sets) / len(sets) ** 2
    return math.sqrt(by_id.var(ddof=1) / len(by_id) + of_ood)
