"""The measures themselves, as plain numbers: AUROC, FPR@TPR, AUPR and the ROC curve. All depend on
counts by score."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fdbd.core.batch import ArrayLike
from fdbd.core.configuration import expect, one_of
from fdbd.core.ranks import count_to_accept

Floats = NDArray[np.float64]


class Counts(NamedTuple):
    """How many positives and negatives have each distinct score, from the highest score down.
    Samples with equal scores share a level, so that no measure can depend on their order."""

    #: (L,) counts; float64, exact up to 2⁵³
    positive: Floats
    #: (L,) counts
    negative: Floats
    #: (L,) the distinct scores, descending
    scores: Floats

    @classmethod
    def from_scores(cls, id_scores: ArrayLike, ood_scores: ArrayLike) -> Counts:
        """ID as positive, higher scores first."""
        inside = as_scores(id_scores, "id_scores")
        outside = as_scores(ood_scores, "ood_scores")
        ascending, level = np.unique(np.concatenate([inside, outside]), return_inverse=True)
        positive = np.bincount(level[: len(inside)], minlength=len(ascending)).astype(np.float64)
        negative = np.bincount(level[len(inside) :], minlength=len(ascending)).astype(np.float64)
        return cls(positive[::-1], negative[::-1], ascending[::-1])

    def swapped(self) -> Counts:
        """OOD as positive, by the negated score."""
        return Counts(self.negative[::-1], self.positive[::-1], -self.scores[::-1])

    @property
    def num_positive(self) -> int:
        return int(self.positive.sum())

    @property
    def num_negative(self) -> int:
        return int(self.negative.sum())


def as_scores(values: ArrayLike, name: str) -> Floats:
    """One-dimensional float64 scores from a tensor, an array or a list; empty or NaN is an
    error."""
    if isinstance(values, torch.Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()
    try:
        scores = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be a sequence of numbers, got {type(values).__name__}"
        ) from error
    if scores.ndim != 1:
        raise ValueError(f"{name} has shape {scores.shape}, expected one score per sample, (N,)")
    if not len(scores):
        raise ValueError(f"{name} is empty; it takes at least one score on each side")
    missing = np.isnan(scores)
    if missing.any():
        raise ValueError(
            f"{name} holds {missing.sum()} NaN of {len(scores)}, the first at index "
            f"{missing.argmax()}"
        )
    return scores


def auroc(id_scores: ArrayLike, ood_scores: ArrayLike) -> float:
    """Area under the ROC curve: the chance that an ID sample outscores an OOD sample, a tie
    counting one half.

    >>> auroc([3.0, 2.0, 2.0], [1.0, 2.0])
    0.833...
    """
    return area(Counts.from_scores(id_scores, ood_scores))


def fpr_at_tpr(
    id_scores: ArrayLike,
    ood_scores: ArrayLike,
    tpr: float = 0.95,
    *,
    positive: Literal["id", "ood"] = "id",
) -> float:
    """The false-positive rate at the strictest threshold that keeps a true-positive rate of `tpr`
    or more.

    With ``positive="id"`` (the usual FPR95): the share of OOD samples with score ≥ t, where t is
    the largest threshold that at least `tpr` of the ID samples reach. With ``positive="ood"``
    (OpenOOD, pytorch-ood): the share of ID samples flagged when at least `tpr` of the OOD samples
    are. Samples that tie with t are all accepted, and there is no interpolation between the points
    of the ROC curve.

    >>> fpr_at_tpr([1.0, 2.0, 3.0, 4.0], [0.0, 1.5, 2.5], tpr=0.75)
    0.333...
    """
    return false_positive_rate(oriented(Counts.from_scores(id_scores, ood_scores), positive), tpr)


def aupr(
    id_scores: ArrayLike, ood_scores: ArrayLike, *, positive: Literal["id", "ood"] = "id"
) -> float:
    """Area under the precision-recall curve, as average precision: Σ (recall step) × (precision
    reached there).

    ``positive="id"`` is AUPR-in, ``positive="ood"`` AUPR-out (by the negated score). It depends on
    how many samples either side has: a score without information has the share of positives.

    >>> aupr([3.0, 2.0], [1.0, 2.5])
    0.833...
    """
    return average_precision(oriented(Counts.from_scores(id_scores, ood_scores), positive))


def roc_curve(
    id_scores: ArrayLike, ood_scores: ArrayLike, *, points: int = 1000
) -> tuple[Floats, Floats, Floats]:
    """The ROC curve with ID as positive: false-positive rates, true-positive rates, thresholds;
    each (M,), M ≤ points.

    It starts at (0, 0), threshold +inf, which accepts nothing, and ends at (1, 1). Longer curves
    are thinned evenly along their length; every point that stays is exact.

    >>> fpr, tpr, thresholds = roc_curve([2.0, 1.0], [0.0, 1.0])
    >>> fpr.tolist(), tpr.tolist(), thresholds.tolist()
    ([0.0, 0.0, 0.5, 1.0], [0.0, 0.5, 1.0, 1.0], [inf, 2.0, 1.0, 0.0])
    """
    expect("points", points, points >= 2, "at least 2: the two ends of the curve")
    counts = Counts.from_scores(id_scores, ood_scores)
    fpr = np.append(0.0, np.cumsum(counts.negative) / counts.num_negative)
    tpr = np.append(0.0, np.cumsum(counts.positive) / counts.num_positive)
    thresholds = np.append(np.inf, counts.scores)
    if len(fpr) > points:
        along = np.searchsorted(fpr + tpr, np.linspace(0, 2, points))
        kept = np.unique(np.minimum(along, len(fpr) - 1))
        return fpr[kept], tpr[kept], thresholds[kept]
    return fpr, tpr, thresholds


def oriented(counts: Counts, positive: str) -> Counts:
    """`counts`, which have ID as positive, with the side named `positive` as positive."""
    one_of("positive", positive, "id", "ood")
    return counts if positive == "id" else counts.swapped()


def area(counts: Counts) -> float:
    """AUROC of `counts`, by the Mann-Whitney statistic with mid-ranks."""
    beaten = counts.num_negative - np.cumsum(counts.negative) + counts.negative / 2
    return float((counts.positive * beaten).sum() / counts.num_positive / counts.num_negative)


def false_positive_rate(counts: Counts, tpr: float) -> float:
    """FPR of `counts` at the first level at which the accepted positives are at least a share
    `tpr`."""
    need = count_to_accept(counts.num_positive, tpr)
    level = int(np.searchsorted(np.cumsum(counts.positive), need))
    return float(counts.negative[: level + 1].sum() / counts.num_negative)


def average_precision(counts: Counts, extra_negatives: float = 0.0) -> float:
    """AUPR of `counts`; `extra_negatives` are put above every sample."""
    true = np.cumsum(counts.positive)
    false = np.cumsum(counts.negative) + extra_negatives
    precision = true / (true + false)
    return float((counts.positive * precision).sum() / counts.num_positive)
