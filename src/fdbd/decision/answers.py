"""A guard's answers: the decision on each sample, and its distances to the decision boundaries."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fdbd import geometry
from fdbd.core.batch import Batch
from fdbd.decision.show import html_table
from fdbd.decision.threshold import Threshold
from fdbd.detectors import Detector, Ensemble, Shaped
from fdbd.util.torch_compat import full_precision, tracing


class NotCalibratedError(RuntimeError):
    """A guard was asked for a decision before it had a threshold.

    >>> import fdbd
    >>> guard = fdbd.Guard(fdbd.Head(torch.eye(3))).fit([fdbd.Batch(torch.rand(9, 3))])
    >>> guard.decide(fdbd.Batch(torch.rand(2, 3)))
    Traceback (most recent call last):
        ...
    fdbd.decision.answers.NotCalibratedError: ...
    """


class Decision(NamedTuple):
    """A guard's decision on N samples. Logits and labels are always the untouched model's.

    >>> import fdbd
    >>> guard = fdbd.Guard(fdbd.Head(torch.eye(3))).fit([fdbd.Batch(torch.rand(50, 3))])
    >>> guard = guard.calibrate([fdbd.Batch(torch.rand(50, 3))], tpr=0.9)
    >>> decision = guard.decide(fdbd.Batch(torch.rand(4, 3)))
    >>> decision
    Decision(4 samples, 3 classes, ...
    >>> {name: tuple(value.shape) for name, value in decision._asdict().items()}
    {'logits': (4, 3), 'labels': (4,), 'scores': (4,), 'p_values': (4,), 'is_ood': (4,)}
    """

    logits: Tensor
    """(N, C) output of the model's linear head, bit for bit, without what follows it (such as a
    log-softmax); a binary head's single logit d becomes −d/2 and d/2."""
    labels: Tensor
    """(N,) predicted classes."""
    scores: Tensor
    """(N,) higher is more in-distribution; −inf if a number was not finite, which is always OOD."""
    p_values: Tensor
    """(N,) share of calibration scores at or below, (1 + #)/(n + 1)."""
    is_ood: Tensor
    """(N,) bool."""

    def label_sets(self, probability: float = 0.5) -> Tensor:
        """(N, C) bool: the labels that a head of many labels (sigmoid) gives each sample, which are
        those with at least this probability.

        >>> logits = torch.tensor([[2.0, -1.0, 0.5]])
        >>> row = torch.zeros(1)
        >>> Decision(logits, row, row, row, row.bool()).label_sets()
        tensor([[ True, False,  True]])
        """
        if not 0 < probability < 1:
            raise ValueError(f"probability is {probability}, expected one between 0 and 1")
        return self.logits.sigmoid() >= probability

    def discoveries(self, q: float) -> Tensor:
        """(N,) bool: samples flagged as out-of-distribution, of which a share of at most `q` is
        in-distribution on average (the false discovery rate), by Benjamini and Hochberg's procedure
        on the p-values.

        The threshold bounds false alarms among in-distribution samples; this bounds them among the
        alarms, and so depends on the whole batch: ask about all samples at once. It holds if the
        in-distribution samples of the batch are independent, and exchangeable with the calibration
        samples (Bates, Candès, Lei, Romano & Sesia, "Testing for outliers with conformal p-values",
        Annals of Statistics 2023, theorem 2). The smallest p-value is 1/(n + 1), so that flagging
        few of many samples takes many calibration samples n.

        >>> p_values = torch.tensor([0.001, 0.012, 0.3, 0.9])
        >>> zeros = torch.zeros(4)
        >>> decision = Decision(torch.zeros(4, 2), zeros, zeros, p_values, p_values < 0.5)
        >>> decision.discoveries(0.1)
        tensor([ True,  True, False, False])
        """
        p_values = self.p_values.detach().double()
        distinct, counts = np.unique(p_values.cpu().numpy(), return_counts=True)
        return p_values <= discovery_cutoff(distinct, counts, q)

    def __repr__(self) -> str:
        return f"Decision({', '.join(self._facts().values())})"

    def _repr_html_(self) -> str:
        return html_table("Decision", self._facts())

    def _facts(self) -> dict[str, str]:
        """What a person wants to know at a glance, by name. A graph under construction has shapes
        and no numbers."""
        facts = {"samples": f"{len(self.scores):,} samples"}
        facts["classes"] = f"{self.logits.shape[-1]:,} classes"
        if tracing() or self.scores.is_meta or not len(self.scores):
            return facts
        facts["OOD"] = f"{int(self.is_ood.sum()):,} OOD"
        low = float(self.scores.min())
        high = float(self.scores.max())
        facts["scores"] = f"scores {low:.4g} to {high:.4g}"
        facts["p-values"] = f"p-values from {float(self.p_values.min()):.4g}"
        return facts


def discovery_cutoff(p_values: NDArray[np.float64], counts: NDArray[np.int64], q: float) -> float:
    """The largest p-value that Benjamini and Hochberg's procedure flags at the false discovery rate
    `q`; −1: none. p-values are distinct and ascending, `counts` the number of samples with each."""
    check_rate(q)
    num_samples = counts.sum()
    # How many samples have this p-value or a smaller one.
    ranks = counts.cumsum()
    # p-values are ratios of integers: one that is equal to its limit must not exceed it by a
    # rounding error.
    is_flagged = p_values * num_samples / ranks <= q * (1 + 1e-6)
    if not is_flagged.any():
        return -1.0
    return float(p_values[is_flagged].max())


def check_rate(q: float) -> None:
    """ValueError unless `q` is a false discovery rate."""
    if not 0 < q < 1:
        raise ValueError(f"the false discovery rate is {q}, expected a fraction between 0 and 1")


SHOWN = 3
"""Samples of an explanation that its short form shows."""


class Explanation(NamedTuple):
    """The distances of N samples to the decision boundaries.

    >>> import fdbd
    >>> guard = fdbd.Guard(fdbd.Head(torch.eye(3))).fit([fdbd.Batch(torch.rand(50, 3))])
    >>> guard = guard.calibrate([fdbd.Batch(torch.rand(400, 3))])
    >>> why = guard.explain(fdbd.Batch(torch.tensor([[3.0, 1.0, 0.0]])))
    >>> why.nearest, why.nearest_distance
    (tensor([1]), tensor([1.4142]))
    """

    decision: Decision
    distances: Tensor
    """(N, C) closed-form distance to each class's boundary; NaN at the predicted class, +inf if
    there is none. For a detector of several labels per sample, the distance to each label's own
    boundary."""
    nearest: Tensor
    """(N,) class behind the nearest boundary."""
    nearest_distance: Tensor
    """(N,)."""
    shares: Tensor
    """(N, C) each class's share of the average distance, fDBD's numerator; rows sum to 1; 0 without
    a boundary."""
    standing: Tensor
    """(N,) fraction of the calibration scores below the sample's score."""
    members: tuple[str, ...] = ()
    """Names of the M members of an ensemble; none of another detector."""
    member_p_values: Tensor | None = None
    """(N, M) p-value of each member's score: a small one objects."""
    objections: Tensor | None = None
    """(N, M) each member's share of what speaks against the sample; rows sum to 1."""

    def __repr__(self) -> str:
        rows, classes = self.distances.shape
        words = []
        for label, distance in zip(self.nearest[:SHOWN].tolist(), self.nearest_distance.tolist()):
            words.append(f"class {label} at {distance:.4g}")
        if rows > SHOWN:
            words.append("…")
        return (
            f"Explanation({rows:,} samples, {classes:,} classes, nearest boundaries: "
            f"{', '.join(words)})"
        )


def explain(
    decision: Decision, batch: Batch, detector: Detector, threshold: Threshold
) -> Explanation:
    """Explain a decision from the batch that the detector scored. Distances are those of the shaped
    features, if there is a shaping; the predicted class is that of the score."""
    members: tuple[str, ...] = ()
    member_p_values = None
    objections = None
    with full_precision():
        if isinstance(detector, Ensemble):
            members = tuple(member.label for member in detector.members)
            member_p_values = detector.p_values(batch).T
            objections = detector.objections(batch).T
        head = detector.head
        batch = detector._prepare(batch)
        while isinstance(detector, Shaped):
            batch = detector.shape(batch)
            detector = detector.detector
        logits = None if batch.logits is None else batch.logits.to(batch.features.dtype)
        measure = geometry.label_distances if detector.needs.many_labels else geometry.distances
        distances = measure(batch.features, head, logits=logits)
    nearest_distance, nearest = geometry.nearest_boundary(distances)
    standing = threshold.standing(decision.scores, decision.labels)
    return Explanation(
        decision=decision,
        distances=distances,
        nearest=nearest,
        nearest_distance=nearest_distance,
        shares=_shares(distances),
        standing=standing,
        members=members,
        member_p_values=member_p_values,
        objections=objections,
    )


def _shares(distances: Tensor) -> Tensor:
    """(N, C) share of each boundary in the sum of the distances (N, C) of its sample; 0 for classes
    without a boundary."""
    has_boundary = torch.isfinite(distances)
    parts = torch.where(has_boundary, distances, 0)
    # A sample at which all boundaries meet has distances of zero, and equal shares.
    is_apart = parts.sum(dim=1, keepdim=True) > 0
    parts = torch.where(is_apart, parts, has_boundary.to(parts))
    return parts / parts.sum(dim=1, keepdim=True)
