"""Whether two detectors differ in AUROC on the same samples: DeLong's paired test."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fdbd.metrics.counts import Floats, as_scores


class Comparison(NamedTuple):
    """The outcome of `delong_test`."""

    difference: float
    """AUROC of the first detector minus that of the second."""
    standard_error: float
    """Of the difference."""
    p_value: float
    """Two-sided: the chance of a difference as large when the detectors are equal."""


def delong_test(id_scores_a: Any, ood_scores_a: Any, id_scores_b: Any, ood_scores_b: Any) -> Comparison:
    """Compares the AUROC of two detectors that scored the same samples in the same order (DeLong et al., 1988).

    The samples being the same, the two AUROCs vary together, and their difference less than their separate intervals
    suggest. O(N log N), by ranks (Sun & Xu, 2014). Equal placements of all samples give p = 1.

    >>> result = delong_test([3.0, 4.0, 5.0, 2.0], [1.0, 2.5, 0.0], [3.0, 1.0, 2.0, 0.5], [1.5, 2.5, 0.0])
    >>> round(result.difference, 4), 0 < result.p_value < 1
    (0.3333, True)
    """
    first = placements(as_scores(id_scores_a, "id_scores_a"), as_scores(ood_scores_a, "ood_scores_a"))
    second = placements(as_scores(id_scores_b, "id_scores_b"), as_scores(ood_scores_b, "ood_scores_b"))
    return compare(first, second)


class Placements(NamedTuple):
    """A detector's part in `delong_test`, kept where one detector is compared with many."""

    of_id: Floats
    """(N,) share of OOD scores below each ID score; the mean is the AUROC."""
    of_ood: Floats
    """(M,) share of ID scores below each OOD score."""


def placements(id_scores: Any, ood_scores: Any) -> Placements:
    """Where each sample stands among those of the other side, ties one half."""
    inside, outside = as_scores(id_scores, "id_scores"), as_scores(ood_scores, "ood_scores")
    return Placements(_share_below(inside, outside), _share_below(outside, inside))


def compare(first: Placements, second: Placements) -> Comparison:
    """`delong_test` from the placements of the two detectors."""
    (first_id, first_ood), (second_id, second_ood) = first, second
    if len(first_id) != len(second_id) or len(first_ood) != len(second_ood):
        raise ValueError(
            f"the detectors scored different samples: {len(first_id)} ID and {len(first_ood)} OOD against "
            f"{len(second_id)} ID and {len(second_ood)} OOD"
        )
    if min(len(first_id), len(first_ood)) < 2:
        raise ValueError(f"a comparison takes two samples a side, got {len(first_id)} ID and {len(first_ood)} OOD")
    by_id, by_ood = first_id - second_id, first_ood - second_ood
    difference = float(by_id.mean())
    error = math.sqrt(by_id.var(ddof=1) / len(by_id) + by_ood.var(ddof=1) / len(by_ood))
    if error == 0:
        return Comparison(difference, error, 1.0 if difference == 0 else 0.0)
    return Comparison(difference, error, math.erfc(abs(difference) / error / math.sqrt(2)))


def _share_below(scores: Floats, reference: Floats) -> Floats:
    """For each score, the share of `reference` below it, ties one half."""
    order, ordered = np.argsort(scores), np.sort(reference)
    ascending = scores[order]  # twice as fast to look up as in any order
    shares = np.empty(len(scores))
    shares[order] = np.searchsorted(ordered, ascending, "left") + np.searchsorted(ordered, ascending, "right")
    return shares / (2 * len(reference))
