"""Two guards on the same rows: who flags what, and whether the difference is more than chance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdbd.core.pixels import ImageError, thumbnail
from fdbd.jobs.scored import ScoredRows
from fdbd.metrics.proportion import Proportion
from fdbd.util.files import write_text
from fdbd.util.pages import render

CONFIDENCE_Z = 1.959964
"""Standard errors of a 95 % interval."""


@dataclass(frozen=True)
class Disagreement:
    """A row that one guard flags and the other does not."""

    name: str
    flagged_by: str
    """"first" or "second"."""
    classes: tuple[str, str]
    scores: tuple[float, float]
    p_values: tuple[float, float]


@dataclass(frozen=True)
class Compared:
    """Two files of scores on the rows that both have."""

    first: str
    second: str
    guards: tuple[str | None, str | None]
    rows: int
    """Rows in both files."""
    only_first: int
    """Rows that the second file lacks."""
    only_second: int
    both: int
    """Rows that both flag."""
    by_first: int
    """Rows that only the first flags."""
    by_second: int
    neither: int
    same_label: Proportion
    """Share with the same predicted class, among the rows that both could read."""
    difference: float
    """Alarm rate of the second minus that of the first, a fraction."""
    difference_low: float
    difference_high: float
    p_alarms: float
    """How often chance alone gives as unequal a number of rows that only one flags (McNemar's exact
    test)."""
    rank_correlation: float | None
    """Spearman's, of the scores; None if it is not defined."""
    disagreements: list[Disagreement]

    @property
    def agreement(self) -> Proportion:
        """Share of the rows on which both decide alike."""
        return Proportion.from_counts(self.both + self.neither, self.rows)

    def difference_in_words(self) -> str:
        """Whether one guard flags more, with the interval and the test."""
        interval = f"{100 * self.difference_low:+.2f} to {100 * self.difference_high:+.2f}"
        chance = f"p = {self.p_alarms:.2g} by McNemar's exact test"
        if self.by_first == self.by_second:
            return f"Both flag equally many (95 % interval of the difference: {interval} points)."
        direction = "more" if self.difference > 0 else "fewer"
        return (
            f"The second flags {100 * abs(self.difference):.2f} percentage points {direction} "
            f"(95 % interval of the difference: {interval}); {chance}."
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON values; at most 1,000 disagreements."""
        return {
            "first": self.first,
            "second": self.second,
            "guards": list(self.guards),
            "rows": self.rows,
            "only_in_first": self.only_first,
            "only_in_second": self.only_second,
            "flagged": {
                "both": self.both,
                "first": self.by_first,
                "second": self.by_second,
                "neither": self.neither,
            },
            "agreement": self.agreement.to_dict(),
            "same_label": self.same_label.to_dict(),
            "alarm_rate_difference": {
                "value": self.difference,
                "low": self.difference_low,
                "high": self.difference_high,
                "p_value": self.p_alarms,
            },
            "rank_correlation": self.rank_correlation,
            "disagreements": [each.name for each in self.disagreements[:1000]],
        }


def compare_scored(first: ScoredRows, second: ScoredRows) -> Compared:
    """Compare two files of scores, row by row by their names."""
    in_first, in_second = _common_rows(first, second)
    first_flags = first.is_ood[in_first]
    second_flags = second.is_ood[in_second]
    by_first = int((first_flags & ~second_flags).sum())
    by_second = int((~first_flags & second_flags).sum())
    first_labels = first.labels[in_first]
    second_labels = second.labels[in_second]
    were_read = (first_labels >= 0) & (second_labels >= 0)
    same_label = int((first_labels == second_labels)[were_read].sum())
    difference, margin = _rate_difference(by_first, by_second, len(in_first))
    return Compared(
        first.source,
        second.source,
        (first.guard, second.guard),
        rows=len(in_first),
        only_first=len(first) - len(in_first),
        only_second=len(second) - len(in_second),
        both=int((first_flags & second_flags).sum()),
        by_first=by_first,
        by_second=by_second,
        neither=int((~first_flags & ~second_flags).sum()),
        same_label=Proportion.from_counts(same_label, int(were_read.sum())),
        difference=difference,
        difference_low=difference - margin,
        difference_high=difference + margin,
        p_alarms=_mcnemar(by_first, by_second),
        rank_correlation=_rank_correlation(first.scores[in_first], second.scores[in_second]),
        disagreements=_disagreements(first, in_first, second, in_second),
    )


def _common_rows(
    first: ScoredRows, second: ScoredRows
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The places, in the first file and in the second, of the rows that both have."""
    places_in_second = second.places()
    in_first: list[int] = []
    in_second: list[int] = []
    for place, name in enumerate(first.names):
        if name in places_in_second:
            in_first.append(place)
            in_second.append(places_in_second[name])
    if not in_first:
        raise ValueError(
            f"{first.source!r} and {second.source!r} have no row in common, such as "
            f"{first.names[:1]} and {second.names[:1]}: compare scores of the same data"
        )
    return np.array(in_first), np.array(in_second)


def _rate_difference(by_first: int, by_second: int, count: int) -> tuple[float, float]:
    """The second alarm rate minus the first, and the half width of its 95 % interval; the rows are
    pairs (Agresti and Min's adjustment, which holds for few disagreements)."""
    difference = (by_second - by_first) / count
    total = count + 2
    first = (by_first + 0.5) / total
    second = (by_second + 0.5) / total
    variance = (first + second - (second - first) ** 2) / total
    return difference, CONFIDENCE_Z * float(np.sqrt(variance))


def _mcnemar(by_first: int, by_second: int) -> float:
    """The two-sided exact p-value of as uneven a split, if a disagreement is an alarm of either
    guard with the same probability."""
    from scipy.stats import binomtest

    total = by_first + by_second
    if not total:
        return 1.0
    return float(binomtest(by_first, total, 0.5).pvalue)


def _rank_correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float | None:
    """Spearman's correlation of the finite scores."""
    from scipy.stats import rankdata

    known = np.isfinite(first) & np.isfinite(second)
    ranks_one = rankdata(first[known])
    ranks_two = rankdata(second[known])
    if len(ranks_one) < 2 or not ranks_one.std() or not ranks_two.std():
        return None
    return float(np.corrcoef(ranks_one, ranks_two)[0, 1])


def _disagreements(
    first: ScoredRows,
    in_first: NDArray[np.int64],
    second: ScoredRows,
    in_second: NDArray[np.int64],
) -> list[Disagreement]:
    """The rows that only one of the guards flags, those with the smallest p-value first. The rows
    are at the places `in_first` of the first file, and `in_second` of the second."""
    found = []
    for a, b in zip(in_first.tolist(), in_second.tolist()):
        if first.is_ood[a] == second.is_ood[b]:
            continue
        flagged_by = "first" if first.is_ood[a] else "second"
        found.append(
            Disagreement(
                name=first.names[a],
                flagged_by=flagged_by,
                classes=(_class_of(first, a), _class_of(second, b)),
                scores=(float(first.scores[a]), float(second.scores[b])),
                p_values=(float(first.p_values[a]), float(second.p_values[b])),
            )
        )
    found.sort(key=lambda each: np.nan_to_num(min(each.p_values), nan=0.0))
    return found


def _class_of(rows: ScoredRows, place: int) -> str:
    label = int(rows.labels[place])
    if label < 0:
        return "unread"
    return rows.classes[place] or f"class {label}"


def write_page(found: Compared, out: Path, images: Path | None = None, shown: int = 500) -> None:
    """One self-contained page: the figures, and the rows that only one of the guards flags.

    Args:
        found: the comparison.
        out: the .html file.
        images: the folder that was scored, for thumbnails.
        shown: rows on the page, at most.
    """
    cards = []
    for each in found.disagreements[:shown]:
        picture = None
        if images is not None:
            picture = _picture(images / each.name)
        cards.append(
            {
                "name": each.name,
                "flagged_by": each.flagged_by,
                "classes": each.classes,
                "scores": [f"{score:.4g}" for score in each.scores],
                "p_values": [f"{p_value:.3g}" for p_value in each.p_values],
                "picture": picture,
            }
        )
    page = render(
        "disagreements.html",
        "",
        {},
        images="; img-src data:",
        title="Two guards on the same rows",
        found=found,
        cards=cards,
        left=len(found.disagreements) - len(cards),
    )
    write_text(out, page)


def _picture(path: Path) -> str | None:
    """A thumbnail as a data URL; None if the image cannot be read."""
    try:
        return thumbnail(path)
    except ImageError:
        return None
