"""Whether two detectors differ in AUROC on the same samples: DeLong's paired test."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .counts import Floats, as_scores


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
    first_id, first_ood = as_scores(id_scores_a, "id_scores_a"), as_scores(ood_scores_a, "ood_scores_a")
    second_id, second_ood = as_scores(id_scores_b, "id_scores_b"), as_scores(ood_scores_b, "ood_scores_b")
    if len(first_id) != len(second_id) or len(first_ood) != len(second_ood):
        raise ValueError(
            f"the detectors scored different samples: {len(first_id)} ID and {len(first_ood)} OOD against "
            f"{len(second_id)} ID and {len(second_ood)} OOD"
        )
    if min(len(first_id), len(first_ood)) < 2:
        raise ValueError(f"a comparison takes two samples a side, got {len(first_id)} ID and {len(first_ood)} OOD")
    by_id = _share_below(first_id, first_ood) - _share_below(second_id, second_ood)
    by_ood = _share_below(first_ood, first_id) - _share_below(second_ood, second_id)
    difference = float(by_id.mean())
    error = math.sqrt(by_id.var(ddof=1) / len(by_id) + by_ood.var(ddof=1) / len(by_ood))
    if error == 0:
        return Comparison(difference, error, 1.0 if difference == 0 else 0.0)
    return Comparison(difference, error, math.erfc(abs(difference) / error / math.sqrt(2)))


def _share_below(scores: Floats, reference: Floats) -> Floats:
    """For each score, the share of `reference` below it, ties one half."""
    ordered = np.sort(reference)
    below, up_to = np.searchsorted(ordered, scores, "left"), np.searchsorted(ordered, scores, "right")
    return (below + up_to) / (2 * len(reference))
