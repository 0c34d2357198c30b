"""Small numeric helpers of the report: short numbers, histograms that outliers cannot ruin, thresholds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fdbd.decision.threshold import count_to_accept

Floats = NDArray[np.float64]

OUTER = 0.005
"""Share of a set's scores, at either end, that may lie beyond a histogram's range and is counted in its end bins."""


def short(value: float, digits: int = 5) -> float:
    """A number with a few significant digits: what a screen can show, and JSON can be small with.

    >>> short(0.123456789)
    0.12346
    """
    return float(f"{float(value):.{digits}g}")


def score_range(sets: Sequence[Floats]) -> tuple[float, float]:
    """The range that holds all but the outermost half percent, at either end, of each set's finite scores."""
    finite = [scores[np.isfinite(scores)] for scores in sets]
    ends = [np.quantile(scores, [OUTER, 1 - OUTER]) for scores in finite if len(scores)]
    if not ends:
        return 0.0, 1.0
    low, high = float(min(end[0] for end in ends)), float(max(end[1] for end in ends))
    # Scores that are all the same get a range around them, wide enough for float32 to tell its ends apart.
    half = 0.5 * max(abs(low), abs(high), 1.0) * 1e-6
    return (low, high) if high - low > half else (low - max(half, 0.5), high + max(half, 0.5))


def bin_counts(scores: Floats, low: float, high: float, bins: int) -> list[int]:
    """How many scores fall in each of `bins` equal bins of [low, high]; those beyond, ±inf too, in the end bins.

    >>> bin_counts(np.array([-np.inf, 0.1, 0.9, 7.0]), 0.0, 1.0, 2)
    [2, 2]
    """
    place = np.floor((np.clip(scores, low, high) - low) / (high - low) * bins).astype(np.int64)
    counts: list[int] = np.bincount(np.clip(place, 0, bins - 1), minlength=bins).tolist()
    return counts


def accepting_score(scores: Floats, share: float) -> float:
    """The largest threshold that at least `share` of the scores reach.

    >>> accepting_score(np.arange(1.0, 101.0), 0.95)
    6.0
    """
    return float(np.sort(scores)[::-1][count_to_accept(len(scores), share) - 1])
