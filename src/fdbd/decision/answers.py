"""What a guard says of samples: a decision on each, and where each stands among the decision boundaries."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fdbd.core import geometry
from fdbd.core.batch import Batch
from fdbd.core.precision import full_precision
from fdbd.decision.threshold import Threshold
from fdbd.detectors import Detector, Shaped


class NotCalibratedError(RuntimeError):
    """A guard was asked for a decision before it had a threshold."""


class Decision(NamedTuple):
    """What a guard says of N samples. Logits and labels are always the untouched model's."""

    logits: Tensor
    """(N, C) output of the model's linear head, bit for bit; a binary head's single logit d stands as −d/2 and d/2, and
    what a model does after its head (a log-softmax) is left out."""
    labels: Tensor
    """(N,) predicted classes."""
    scores: Tensor
    """(N,) higher is more in-distribution; −inf where a number was not finite, which is always OOD."""
    p_values: Tensor
    """(N,) share of calibration scores at or below, (1 + #)/(n + 1)."""
    is_ood: Tensor
    """(N,) bool."""


class Explanation(NamedTuple):
    """Where N samples stand among the decision boundaries."""

    decision: Decision
    distances: Tensor
    """(N, C) closed-form distance to each class's boundary; NaN at the predicted class, +inf where there is none."""
    nearest: Tensor
    """(N,) class behind the nearest boundary."""
    nearest_distance: Tensor
    """(N,)."""
    shares: Tensor
    """(N, C) each class's share of the average distance, which is fDBD's numerator; rows sum to 1, 0 where no boundary
    is."""
    standing: Tensor
    """(N,) fraction of the calibration scores below the sample's score."""


def explain(decision: Decision, batch: Batch, detector: Detector, threshold: Threshold) -> Explanation:
    """Where the samples of a decision stand, by the batch that the detector scored. Distances are those of the features
    after shaping where there is one."""
    with full_precision():
        distances = _distances(batch, detector)
    nearest_distance, nearest = geometry.nearest_boundary(distances)
    is_there = torch.isfinite(distances)
    reachable = torch.where(is_there, distances, 0)
    # On a point where all boundaries meet, all have an equal share in a distance of zero.
    reachable = torch.where(reachable.sum(dim=1, keepdim=True) > 0, reachable, is_there.to(reachable))
    shares = reachable / reachable.sum(dim=1, keepdim=True)
    standing = threshold.standing(decision.scores, decision.labels)
    return Explanation(decision, distances, nearest, nearest_distance, shares, standing)


def _distances(batch: Batch, detector: Detector) -> Tensor:
    """(N, C) from the features as they are scored; the predicted class is that of the score."""
    head = detector.head
    batch = detector.prepare(batch)
    while isinstance(detector, Shaped):
        batch, detector = detector.shape(batch), detector.detector
    logits = batch.logits
    return geometry.distances(batch.features, head, logits=None if logits is None else logits.to(batch.features.dtype))
