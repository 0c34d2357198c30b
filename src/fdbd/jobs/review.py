"""What people said of scored samples: verdicts, the quality of the alarms, and what alarms cost.

A review is JSON: ``{"version": 1, "reviews": {NAME: VERDICT, …}}``, as the gallery saves it, or
NAME: VERDICT alone, or a list of objects with ``name`` (or ``path``, or ``row``) and ``verdict``. A
name is the path or the row number in the scores. A verdict is ``"id"``; ``"wrong-class"``,
in-distribution with the wrong label; or ``"ood"``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fdbd.jobs.scored import ScoredRows
from fdbd.metrics.proportion import Proportion

VERDICTS = ("id", "wrong-class", "ood")
CHANCE = 0.01
"""How rarely a random draw may look like the reviewed samples for the caution on selection."""
_MAX_BYTES = 1 << 28
_DRAWS = 20_000


@dataclass(frozen=True)
class Review:
    """Verdicts on some rows of a file of scores."""

    rows: ScoredRows
    places: NDArray[np.int64]
    """(n,) which rows were reviewed."""
    verdicts: list[str]
    """(n,) one of `VERDICTS` each."""

    def having(self, *verdicts: str) -> NDArray[np.int64]:
        """The rows with one of these verdicts."""
        chosen = np.array([verdict in verdicts for verdict in self.verdicts], bool)
        found: NDArray[np.int64] = self.places[chosen]
        return found

    @property
    def in_distribution(self) -> NDArray[np.int64]:
        """The rows that are in-distribution, whether their label is right or not."""
        return self.having("id", "wrong-class")

    @property
    def ood(self) -> NDArray[np.int64]:
        """The rows that are out-of-distribution."""
        return self.having("ood")

    def counts(self) -> dict[str, int]:
        """How many rows have each verdict."""
        return {verdict: self.verdicts.count(verdict) for verdict in VERDICTS}


class Alarms(NamedTuple):
    """How good the alarms of a guard are, by the reviewed rows."""

    precision: Proportion
    """Share of the alarms that are out-of-distribution."""
    recall: float | None
    """Share of the OOD rows that are alarms, among all rows of the file: alarms and other rows are
    weighed by how many of each were reviewed. None if either was not reviewed at all."""
    recall_low: float | None
    recall_high: float | None
    ood_share: float | None
    """Estimated share of all rows that are out-of-distribution."""

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**self._asdict(), "precision": self.precision.to_dict()}


class Cost(NamedTuple):
    """What one false-alarm rate costs, per 1,000 new samples."""

    alpha: float
    false_alarms: float
    found: float
    """OOD samples that raise an alarm."""
    missed: float
    cost: float


def read_review(path: Path, rows: ScoredRows) -> Review:
    """The verdicts in a file, on these rows."""
    if not path.is_file():
        raise FileNotFoundError(f"no review at {str(path)!r}: no such file")
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{str(path)!r} is larger than a review of scores can be")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ValueError(
            f"{str(path)!r} is not JSON: give the review that the gallery saved"
        ) from None
    where = rows.places()
    chosen: dict[int, str] = {}
    for name, verdict in _entries(found, path):
        if verdict not in VERDICTS:
            raise ValueError(
                f"{str(path)!r} says {verdict!r} of {name!r}, expected {', '.join(VERDICTS)}"
            )
        if name not in where:
            raise ValueError(f"{str(path)!r} names {name!r}, which {rows.source!r} does not have")
        chosen[where[name]] = verdict
    if not chosen:
        raise ValueError(f"{str(path)!r} holds no verdict")
    places = np.array(sorted(chosen), np.int64)
    return Review(rows, places, [chosen[place] for place in places.tolist()])


def _entries(found: Any, path: Path) -> Iterator[tuple[str, str]]:
    """Name and verdict of each entry."""
    if isinstance(found, Mapping) and isinstance(found.get("reviews"), (Mapping, list)):
        found = found["reviews"]
    if isinstance(found, Mapping):
        for name, verdict in found.items():
            yield str(name), str(verdict)
        return
    if not isinstance(found, list):
        raise ValueError(
            f'{str(path)!r} is not a review, expected {{"reviews": {{NAME: VERDICT}}}}'
        )
    for entry in found:
        if not isinstance(entry, Mapping) or "verdict" not in entry:
            raise ValueError(f"{str(path)!r} has the entry {str(entry)[:80]!r} without a verdict")
        for key in ("name", "path", "row"):
            if entry.get(key) is not None:
                yield str(entry[key]), str(entry["verdict"])
                break
        else:
            raise ValueError(f"{str(path)!r} has the entry {str(entry)[:80]!r} without a name")


def selection_caution(review: Review) -> str:
    """What the choice of the reviewed rows does to the promise of a threshold set on them."""
    rows = review.rows
    reviewed = np.zeros(len(rows), bool)
    reviewed[review.places] = True
    scored = rows.is_scored
    inside = rows.scores[reviewed & scored]
    outside = rows.scores[~reviewed & scored]
    if len(inside) and len(outside) and _chance_of_ranks(inside, outside) < CHANCE:
        direction = "higher"
        effect = "too many"
        if np.median(inside) < np.median(outside):
            direction = "lower"
            effect = "too few"
        return (
            f"the reviewed samples are not a random draw: they have {direction} scores than the "
            f"others. A threshold set on them flags {effect} samples and promises nothing: review "
            "a random set (fdbd sample)"
        )
    if len(outside) == 0:
        return "all samples were reviewed: the threshold holds for samples like all of these"
    return (
        "the promise holds if the reviewed samples were drawn at random (fdbd sample), whatever "
        "their scores; these do not look otherwise"
    )


def _chance_of_ranks(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """How often two random draws differ as much in their ranks: Mann and Whitney's test."""
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(first, second).pvalue)


def rate_alarms(review: Review) -> Alarms:
    """Precision and recall of the alarms. The reviewed alarms are taken for a random draw of all
    alarms, and the other reviewed rows for one of all other rows."""
    rows = review.rows
    is_ood = np.zeros(len(rows), bool)
    is_ood[review.ood] = True
    is_alarm = rows.is_ood[review.places]
    alarms = review.places[is_alarm]
    others = review.places[~is_alarm]
    precision = Proportion.from_counts(int(is_ood[alarms].sum()), len(alarms))
    if not len(alarms) or not len(others):
        return Alarms(precision, None, None, None, None)

    num_alarms = int(rows.is_ood.sum())
    num_others = len(rows) - num_alarms
    missed = Proportion.from_counts(int(is_ood[others].sum()), len(others))
    found_ood = num_alarms * precision.value
    all_ood = found_ood + num_others * missed.value
    share = all_ood / len(rows)
    if not all_ood:
        return Alarms(precision, None, None, None, share)
    recall = found_ood / all_ood
    low, high = _recall_interval(num_alarms, precision, num_others, missed)
    # If nothing was missed, the estimate is an end of its interval.
    return Alarms(precision, recall, min(low, recall), max(high, recall), share)


def _recall_interval(
    num_alarms: int, precision: Proportion, num_others: int, missed: Proportion
) -> tuple[float, float]:
    """The 95 % interval of the recall. It depends on two shares, and comes from draws of both from
    their Jeffreys posteriors."""
    generator = np.random.default_rng(0)
    drawn_found = num_alarms * _draw(precision, generator)
    drawn_missed = num_others * _draw(missed, generator)
    recalls = drawn_found / (drawn_found + drawn_missed)
    low, high = np.quantile(recalls, [0.025, 0.975]).tolist()
    return low, high


def _draw(share: Proportion, generator: np.random.Generator) -> NDArray[np.float64]:
    return generator.beta(share.count + 0.5, share.total - share.count + 0.5, _DRAWS)


def costs(
    id_scores: NDArray[np.float64],
    ood_scores: NDArray[np.float64],
    review_cost: float,
    miss_cost: float,
    ood_share: float,
    alphas: tuple[float, ...] = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2),
) -> list[Cost]:
    """What each false-alarm rate costs per 1,000 new samples, if every alarm is looked at.

    Args:
        id_scores: (n,) of in-distribution samples, which set the threshold.
        ood_scores: (m,) of out-of-distribution samples, which say what is missed.
        review_cost: of looking at one alarm.
        miss_cost: of an OOD sample that raises none.
        ood_share: the share of new samples that are out-of-distribution, a fraction.
    """
    if review_cost < 0 or miss_cost < 0:
        raise ValueError(f"costs are {review_cost} and {miss_cost}, expected at least 0")
    if not 0 <= ood_share <= 1:
        raise ValueError(
            f"the share of OOD samples is {ood_share}, expected a fraction from 0 to 1"
        )
    found = []
    ordered = np.sort(id_scores)
    for alpha in alphas:
        # The conformal threshold: a share flagged / (n + 1) of new ID samples is at or below it.
        flagged = int(alpha * (len(ordered) + 1))
        if not flagged:
            # Too few samples for this rate.
            continue
        threshold = ordered[flagged - 1]
        false_alarm_rate = flagged / (len(ordered) + 1)
        detected = float((ood_scores <= threshold).mean())
        false_alarms = 1000 * (1 - ood_share) * false_alarm_rate
        hits = 1000 * ood_share * detected
        missed = 1000 * ood_share * (1 - detected)
        cost = review_cost * (false_alarms + hits) + miss_cost * missed
        found.append(Cost(alpha, false_alarms, hits, missed, cost))
    if not found:
        raise ValueError(
            f"{len(id_scores)} in-distribution samples are too few to compare false-alarm rates: "
            "give at least 4"
        )
    return found
