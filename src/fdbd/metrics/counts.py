"""Two samples of scores as counts by distinct score: all that AUROC, FPR@TPR and AUPR depend on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fdbd.core.batch import ArrayLike

Floats = NDArray[np.float64]


class Counts(NamedTuple):
    """How many positives and negatives have each distinct score, from the highest score down.

    Samples with equal scores share a level, so that no measure can depend on their order.
    """

    positive: Floats
    """(L,) counts; float64, exact up to 2⁵³."""
    negative: Floats
    """(L,) counts."""
    scores: Floats
    """(L,) the distinct scores, descending."""

    @classmethod
    def of(cls, id_scores: ArrayLike, ood_scores: ArrayLike) -> Counts:
        """ID as positive, higher scores first."""
        inside, outside = as_scores(id_scores, "id_scores"), as_scores(ood_scores, "ood_scores")
        scores, level = np.unique(np.concatenate([inside, outside]), return_inverse=True)
        positive = np.bincount(level[: len(inside)], minlength=len(scores))
        negative = np.bincount(level[len(inside) :], minlength=len(scores))
        return cls(positive[::-1].astype(np.float64), negative[::-1].astype(np.float64), scores[::-1])

    def swapped(self) -> Counts:
        """OOD as positive, by the negated score."""
        return Counts(self.negative[::-1], self.positive[::-1], -self.scores[::-1])

    @property
    def num_positive(self) -> int:
        """Number of positive samples."""
        return int(self.positive.sum())

    @property
    def num_negative(self) -> int:
        """Number of negative samples."""
        return int(self.negative.sum())


def as_scores(values: ArrayLike, name: str) -> Floats:
    """One-dimensional float64 scores from a tensor, an array or a list; empty or NaN is an error."""
    if isinstance(values, torch.Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()
    try:
        scores = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a sequence of numbers, got {type(values).__name__}") from error
    if scores.ndim != 1:
        raise ValueError(f"{name} has shape {scores.shape}, expected one score per sample, (N,)")
    if not len(scores):
        raise ValueError(f"{name} is empty; it takes at least one score on each side")
    missing = np.isnan(scores)
    if missing.any():
        raise ValueError(f"{name} holds {missing.sum()} NaN of {len(scores)}, the first at index {missing.argmax()}")
    return scores
