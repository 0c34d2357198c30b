"""From scores to decisions: a threshold with the calibration scores that it came from.

Higher score = more in-distribution. Knows scores and predicted classes, never features, detectors or models.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fdbd.core.batch import ArrayLike, as_tensor

GRID_POINTS = 1024
"""Exported graphs compare a score with at most this many calibration scores (ONNX has no binary search)."""

_GRID_LIMIT = 1 << 27
"""Points of all classes together: 1.6 GB in float32."""

_WIDE = 2.5
"""A threshold that may well reject more than so many times the share that was asked for draws a caution."""

Kind = Literal["quantile", "conformal"]
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", torch.onnx.is_in_onnx_export)


class Threshold(nn.Module):
    """Decides which scores are out-of-distribution, by the scores of a calibration sample.

    Made by `Threshold.quantile` or `Threshold.conformal`; both also by predicted class. Every state is a buffer, so it
    moves between devices, is saved, compiled and exported. Its dtype is that of the calibration scores and stays so
    when the module around it is cast to another: a rounded threshold is another threshold.

    The calibration samples are in-distribution, and seen by neither the network's training nor the fit. Their scores
    are finite, hence the threshold is; a score that is not finite (−inf, +inf, NaN) is always out-of-distribution.

    Attributes:
        kind: "quantile" or "conformal".
        target: the `tpr` or the `alpha` that was asked for, a fraction.
        count: number of calibration scores.
        per_class: whether each predicted class has a threshold of its own.
        value: (1,), or (C,) by class: scores at or above it are in-distribution. To read, not to set: it follows from
            the calibration scores.

    >>> threshold = Threshold.quantile(torch.arange(100.0), tpr=0.95)
    >>> threshold
    Threshold(quantile, tpr=0.95, 100 calibration scores)
    >>> threshold.value
    tensor([5.])
    >>> threshold.is_ood(torch.tensor([4.9, 5.0, float("-inf"), float("nan")]))
    tensor([ True, False,  True,  True])
    """

    calibration: Tensor  # (n,) class after class, ascending within each
    offsets: Tensor  # (C + 1,) where the scores of each class start and end; (2,) when there is one threshold for all
    value: Tensor
    sizes: Tensor  # (C,) number of calibration scores behind each class's threshold
    negated: Tensor  # (n,) all scores, negated, ascending
    keys: Tensor  # (n,) class of each calibration score and its rank among the negated as one ascending integer
    steps: Tensor  # (n + 1,) the p-value for each number of calibration scores above
    edges: Tensor  # (C, G + 2) for export: −inf, the grid of calibration scores, +inf
    ranks: Tensor  # (2, C, G + 1) for export: the counts between which the count in each grid cell lies

    def __init__(self, kind: Kind, target: float, calibration: Tensor, offsets: Tensor, per_class: bool) -> None:
        super().__init__()
        self.kind, self.target, self.per_class = kind, target, per_class
        self.register_buffer("calibration", calibration)
        self.register_buffer("offsets", offsets)
        self._derive()
        self.register_load_state_dict_post_hook(_derive_again)  # type: ignore[no-untyped-call]

    @classmethod
    def quantile(
        cls,
        scores: ArrayLike,
        tpr: float = 0.95,
        labels: ArrayLike | None = None,
        per_class: bool = False,
        num_classes: int | None = None,
    ) -> Threshold:
        """The largest threshold that accepts at least a share `tpr` of the calibration scores.

        Of new samples it accepts somewhat less on average, since the threshold is one of the scores: with n of them,
        k/(n + 1) where k of n are accepted (see `acceptance`). `conformal` gives a bound on new samples instead.

        Args:
            scores: (n,) finite scores of in-distribution samples; tensor, array or list.
            tpr: the share to accept, a fraction in (0, 1].
            labels: (n,) predicted classes of these samples, read only by class.
            per_class: one threshold for each predicted class, from the samples predicted so. A class that has none
                takes the threshold of all samples together, with a warning.
            num_classes: C; None is the largest label plus one.

        >>> Threshold.quantile([1.0, 2.0, 3.0, 4.0], tpr=0.75).value
        tensor([2.], dtype=torch.float64)
        """
        tpr = as_decimal(tpr)
        count_to_accept(1, tpr)
        threshold = cls("quantile", tpr, *_runs(scores, labels, per_class, num_classes), per_class=per_class)
        if threshold.has_empty_class:
            empty = (threshold.offsets.diff() == 0).nonzero().flatten().tolist()
            warnings.warn(
                f"{len(empty)} of {threshold.num_classes} classes have no calibration samples and take the threshold "
                f"of all samples; the first is class {empty[0]}",
                stacklevel=2,
            )
        return threshold

    @classmethod
    def conformal(
        cls,
        scores: ArrayLike,
        alpha: float = 0.05,
        labels: ArrayLike | None = None,
        per_class: bool = False,
        num_classes: int | None = None,
    ) -> Threshold:
        """Out-of-distribution where the conformal p-value (1 + #{calibration ≤ score}) / (n + 1) is at most `alpha`.

        If the calibration samples and a new in-distribution sample are exchangeable, and neither the network nor the
        detector has seen them before, the new sample is flagged with probability at most `alpha`, whatever the scores'
        distribution; the probability is over the draw of the calibration samples too. By class, the same holds among
        the samples predicted as each class. It takes 1/alpha − 1 calibration samples (of each class) at least. Vovk,
        Gammerman & Shafer, "Algorithmic Learning in a Random World", 2005.

        Args:
            scores: (n,) finite scores of in-distribution samples; tensor, array or list.
            alpha: the share of false alarms allowed, a fraction in (0, 1).
            labels, per_class, num_classes: as for `quantile`, but every class needs its own samples.

        >>> threshold = Threshold.conformal(torch.arange(1.0, 20.0), alpha=0.05)
        >>> scores = torch.tensor([0.5, 1.0])
        >>> threshold.p_values(scores), threshold.is_ood(scores)
        (tensor([0.0500, 0.1000]), tensor([ True, False]))
        """
        alpha = as_decimal(alpha)
        count_to_flag(1, alpha)
        return cls("conformal", alpha, *_runs(scores, labels, per_class, num_classes), per_class=per_class)

    def forward(self, scores: Tensor, predicted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`decide`."""
        return self.decide(scores, predicted)

    def decide(self, scores: Tensor, predicted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(N,) `p_values` and (N,) `is_ood`."""
        return self.p_values(scores, predicted), self.is_ood(scores, predicted)

    def is_ood(self, scores: Tensor, predicted: Tensor | None = None) -> Tensor:
        """(N,) bool: ``not (score >= threshold)`` or not finite; exact in exported graphs too.

        `predicted` (N,) are the predicted classes, needed by class. For a conformal threshold this is p ≤ alpha.
        """
        classes = self._classes(scores, predicted)
        value = self.value if classes is None else self.value.index_select(0, classes)
        return ~((scores >= value) & (scores < torch.inf))

    def p_values(self, scores: Tensor, predicted: Tensor | None = None) -> Tensor:
        """(N,) conformal p-values (1 + #{calibration ≤ score}) / (n + 1), of either kind of threshold.

        Small means out-of-distribution; scores that are not finite have the smallest, 1 / (n + 1). The dtype is that of
        the calibration scores. In an exported graph they come from `p_values_on_grid`.
        """
        if _is_exporting():
            return self.p_values_on_grid(scores, predicted)
        above, size = self._above(scores, predicted, or_equal=False)
        if not self.per_class:
            return self.steps.index_select(0, above)
        return (size + 1 - above).to(self.calibration.dtype) / (size + 1)

    def p_values_on_grid(self, scores: Tensor, predicted: Tensor | None = None) -> Tensor:
        """`p_values` without binary search, as exported graphs compute them.

        Exact for up to 1,024 calibration scores (of a class). Beyond, scores are compared with 1,024 of them, spread
        evenly by rank, and the count is interpolated in between: off by less than 1/1,000. The threshold is one of
        them, so that ``p <= alpha`` still agrees with `is_ood`.
        """
        classes, scores = self._classes(scores, predicted), self._comparable(scores)
        if classes is None:
            edges, (low, high), size = self.edges, self.ranks.unbind(), self.sizes
        else:
            edges, size = self.edges.index_select(0, classes), self.sizes.index_select(0, classes)
            low, high = self.ranks.index_select(1, classes).unbind()
        cell = (scores.unsqueeze(1) >= edges[:, 1:-1]).sum(dim=1, keepdim=True)
        count = _take(low, cell)
        if self.grid_is_coarse:
            width = _take(edges, cell + 1) / 2 - _take(edges, cell) / 2  # halved, or it might overflow
            place = (scores / 2 - _take(edges, cell) / 2) / width
            span = _take(high, cell) - count
            inside = (span > 0) & (width > 0)
            count = count + span * torch.where(inside, place, torch.zeros_like(place))
        return (count + 1).to(self.calibration.dtype) / (size + 1)

    def standing(self, scores: Tensor, predicted: Tensor | None = None) -> Tensor:
        """(N,) share of the calibration scores (of the predicted class) that are below each score.

        >>> Threshold.quantile(torch.arange(4.0)).standing(torch.tensor([-1.0, 2.0, 9.0]))
        tensor([0.0000, 0.5000, 1.0000])
        """
        above, size = self._above(scores, predicted, or_equal=True)
        return (size - above).to(self.calibration.dtype) / size

    @property
    def num_classes(self) -> int | None:
        """C, or None when there is one threshold for all."""
        return len(self.sizes) if self.per_class else None

    @property
    def guarantee(self) -> str:
        """What the threshold promises, in one sentence."""
        within = " of each predicted class" if self.per_class else ""
        if self.kind == "quantile":
            return f"Accepts at least {self.target:.4g} of the {self.count} calibration samples{within}."
        return (
            f"Flags at most {self.target:.4g} of in-distribution samples{within} that are exchangeable with the "
            f"{self.count} calibration samples, on average over the draw of the latter."
        )

    def acceptance(self, confidence: float = 0.95) -> tuple[float, float, float]:
        """What share of new in-distribution samples is accepted: the mean over draws of the calibration samples, and
        the interval that holds the share of this very threshold with probability `confidence`.

        For continuous scores the share below the j-th smallest of n scores follows Beta(j, n + 1 − j). By class, it is
        that of the class with the fewest samples.

        >>> [round(share, 3) for share in Threshold.quantile(torch.arange(12.0), tpr=0.95).acceptance()]
        [0.923, 0.735, 0.998]
        """
        from scipy.special import betaincinv

        own = self.offsets.diff()
        index = int(torch.where(own == 0, self.count + 1, own).argmin())
        size = int(own[index])
        rejected = self._mark(size, index) + 1
        tail = (1 - confidence) / 2
        low, high = (1 - float(betaincinv(rejected, size + 1 - rejected, q)) for q in (1 - tail, tail))
        return 1 - rejected / (size + 1), low, high

    @property
    def caution(self) -> str | None:
        """One sentence where the calibration samples are few for what is asked of them; None where they are not."""
        asked = self.target if self.kind == "conformal" else 1 - self.target
        _, low, high = self.acceptance()
        if 1 - low <= max(_WIDE * asked, 0.01):
            return None
        where = " for the rarest predicted class" if self.per_class else ""
        return (
            f"only {int(self.sizes.min())} calibration samples{where}: {100 * asked:.3g} % of new in-distribution "
            f"samples are to be rejected, and it may be {100 * (1 - high):.2g} to {100 * (1 - low):.2g} % (95 % "
            "interval over the draw of the calibration data)"
        )

    def to_config(self) -> dict[str, object]:
        """What `from_state` needs beside ``state_dict()``, as plain JSON values."""
        return {name: getattr(self, name) for name in ("kind", "target", "count", "per_class", "num_classes")}

    @classmethod
    def from_state(cls, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Threshold:
        """The threshold that ``to_config()`` and ``state_dict()`` came from; anything inconsistent is a ValueError.

        >>> threshold = Threshold.conformal(torch.arange(50.0))
        >>> Threshold.from_state(threshold.to_config(), threshold.state_dict())
        Threshold(conformal, alpha=0.05, 50 calibration scores)
        """
        missing = {"kind", "target", "count", "per_class", "num_classes"} - set(config)
        missing |= {"calibration", "offsets"} - set(tensors)
        if missing:
            raise ValueError(f"the threshold's state lacks {', '.join(sorted(missing))}")
        kind, target, per_class = config["kind"], config["target"], config["per_class"]
        if kind not in ("quantile", "conformal") or not isinstance(target, float) or not isinstance(per_class, bool):
            raise ValueError(f"the threshold's state is not valid: kind={kind!r}, target={target!r}")
        calibration, offsets = tensors["calibration"], tensors["offsets"]
        if calibration.dtype not in (torch.float32, torch.float64) or offsets.dtype != torch.int64:
            raise ValueError(f"the threshold's state has dtypes {calibration.dtype} and {offsets.dtype}")
        _check_runs(calibration, offsets, per_class)
        held = len(calibration), len(offsets) - 1 if per_class else None
        if held != (config["count"], config["num_classes"]):
            raise ValueError(
                f"the threshold's state holds {held[0]} scores of {held[1]} classes, "
                f"expected {config['count']!r} of {config['num_classes']!r}"
            )
        return cls(kind, target, calibration.clone(), offsets.clone(), per_class)

    def extra_repr(self) -> str:
        name = "tpr" if self.kind == "quantile" else "alpha"
        classes = f" of {self.num_classes} classes" if self.per_class else ""
        return f"{self.kind}, {name}={self.target:g}, {self.count} calibration scores{classes}"

    def _derive(self) -> None:
        """Checks calibration scores and offsets, and registers what follows from them."""
        calibration, offsets = self.calibration, self.offsets
        _check_runs(calibration, offsets, self.per_class)
        self.count = len(calibration)
        pooled = calibration.sort().values
        negated = -pooled.flip(0)
        cuts = offsets.tolist()
        runs = [calibration[start:stop] if start < stop else pooled for start, stop in itertools.pairwise(cuts)]
        marks = [self._mark(stop - start, c) for c, (start, stop) in enumerate(itertools.pairwise(cuts))]
        own = offsets.diff()
        self.has_empty_class = bool((own == 0).any())
        self.grid_is_coarse = max(map(len, runs)) > GRID_POINTS
        class_of = torch.repeat_interleave(torch.arange(len(own), device=own.device), own)
        edges, ranks = _grid(runs, marks)
        derived = {
            "value": torch.stack([run[mark] for run, mark in zip(runs, marks)]),
            "sizes": torch.where(own == 0, self.count, own),
            "negated": negated,
            "keys": (class_of * (self.count + 1) + torch.searchsorted(negated, -calibration, right=True)).sort().values,
            "steps": torch.arange(self.count + 1, 0, -1, device=own.device).to(pooled) / (self.count + 1),
            "edges": edges,
            "ranks": ranks,
        }
        for name, tensor in derived.items():
            self.register_buffer(name, tensor, persistent=False)

    def _mark(self, size: int, index: int) -> int:
        """Which of a class's ascending calibration scores is its threshold."""
        if self.kind == "quantile":
            size = size or self.count
            return size - count_to_accept(size, self.target)
        flagged = count_to_flag(size, self.target)
        if flagged == 0:
            who = f"class {index} has" if self.per_class else "there are"
            raise ValueError(
                f"{who} {size} calibration samples, alpha={self.target:g} takes at least "
                f"{samples_for(self.target)} (1/alpha − 1)"
            )
        return flagged - 1

    def _classes(self, scores: Tensor, predicted: Tensor | None) -> Tensor | None:
        if not self.per_class:
            return None
        if predicted is None:
            raise ValueError("a threshold by predicted class needs the predicted classes: pass predicted")
        if not torch.compiler.is_compiling() and predicted.shape != scores.shape:
            raise ValueError(f"scores have shape {tuple(scores.shape)}, predicted {tuple(predicted.shape)}")
        return predicted

    def _above(self, scores: Tensor, predicted: Tensor | None, or_equal: bool) -> tuple[Tensor, Tensor | int]:
        """How many calibration scores are above each score (or equal), and of how many.

        By class it takes two searches: a calibration score c is above s if and only if #{negated ≤ −c} is at most
        #{negated < −s} (or equal: #{negated ≤ −s}), and a class and such a rank together are one integer key.
        """
        classes, scores = self._classes(scores, predicted), self._comparable(scores)
        negated = self.negated
        if negated.dtype != scores.dtype:
            negated = negated.to(scores.dtype)
        rank = torch.searchsorted(negated, -scores, right=or_equal)
        if classes is None:
            return rank, self.count
        above = torch.searchsorted(self.keys, classes * (self.count + 1) + rank, right=True)
        above = above - self.offsets.index_select(0, classes)
        if self.has_empty_class:
            empty = (self.offsets.diff() == 0).index_select(0, classes)
            above = torch.where(empty, rank, above)
        return above, self.sizes.index_select(0, classes)

    def _comparable(self, scores: Tensor) -> Tensor:
        """`scores` in a dtype that holds them and the calibration scores without rounding, −inf where not finite."""
        scores = scores.to(torch.promote_types(scores.dtype, self.calibration.dtype))
        return torch.where(scores < torch.inf, scores, -torch.inf)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Threshold:
        """Moves, but does not cast."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        return self


def count_to_accept(count: int, tpr: float) -> int:
    """The smallest k with k / count ≥ tpr.

    >>> count_to_accept(100, 0.95), count_to_accept(10, 0.95)
    (95, 10)
    """
    tpr = as_decimal(tpr)
    if not 0 < tpr <= 1:
        raise ValueError(f"tpr is {tpr}, expected a fraction above 0 and at most 1")
    k = math.ceil(tpr * count)
    while (k - 1) / count >= tpr:
        k -= 1
    return k


def count_to_flag(count: int, alpha: float) -> int:
    """The largest k with k / (count + 1) ≤ alpha: a score with fewer than k calibration scores at or below it is OOD.

    >>> count_to_flag(19, 0.05), count_to_flag(18, 0.05)
    (1, 0)
    """
    alpha = as_decimal(alpha)
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha}, expected a fraction between 0 and 1")
    k = math.floor(alpha * (count + 1))
    while (k + 1) / (count + 1) <= alpha:
        k += 1
    while k / (count + 1) > alpha:
        k -= 1
    return k


def samples_for(alpha: float) -> int:
    """The number of calibration samples that a conformal threshold at `alpha` takes.

    >>> samples_for(0.05), samples_for(0.01)
    (19, 99)
    """
    n = max(math.ceil(1 / alpha) - 2, 0)
    while count_to_flag(n, alpha) == 0:
        n += 1
    return n


def as_decimal(fraction: float) -> float:
    """`fraction`, rounded to twelve digits where that undoes a rounding error: ``1 - 0.9`` is meant to be 0.1.

    >>> 1 - 0.9, as_decimal(1 - 0.9), as_decimal(1 / 3) == 1 / 3
    (0.09999999999999998, 0.1, True)
    """
    fraction = float(fraction)
    rounded = float(f"{fraction:.12g}")
    return rounded if abs(rounded - fraction) <= 2.3e-16 else fraction


def _runs(
    scores: ArrayLike, labels: ArrayLike | None, per_class: bool, num_classes: int | None
) -> tuple[Tensor, Tensor]:
    """Checked calibration scores, sorted (within each class), and where each class starts and ends."""
    scores = _as_scores(scores)
    if not per_class:
        return scores.sort().values, torch.tensor([0, len(scores)], device="cpu").to(scores.device)
    labels = _as_labels(labels, scores, num_classes)
    order = scores.argsort()
    order = order[labels[order].argsort(stable=True)]
    counts = torch.bincount(labels, minlength=num_classes or 0)
    return scores[order], torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _as_scores(scores: ArrayLike) -> Tensor:
    tensor = (scores if isinstance(scores, Tensor) else torch.from_numpy(np.asarray(scores, dtype=float))).detach()
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.to(torch.float32)
    if tensor.ndim != 1:
        raise ValueError(f"calibration scores have shape {tuple(tensor.shape)}, expected one per sample, (n,)")
    if not len(tensor):
        raise ValueError("there are no calibration scores; it takes at least one")
    bad = ~torch.isfinite(tensor)
    if bad.any():
        first = int(bad.int().argmax())
        raise ValueError(
            f"{int(bad.sum())} of {len(tensor)} calibration scores are not finite, "
            f"the first is {tensor[first].item()} at index {first}"
        )
    return tensor


def _as_labels(labels: ArrayLike | None, scores: Tensor, num_classes: int | None) -> Tensor:
    if labels is None:
        raise ValueError("a threshold by predicted class needs the predicted classes: pass labels")
    indices = as_tensor(labels).detach().to(scores.device)
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise TypeError(f"labels are {indices.dtype}, expected integer class indices")
    if indices.shape != scores.shape:
        raise ValueError(f"labels have shape {tuple(indices.shape)}, scores {tuple(scores.shape)}")
    least, most = int(indices.min()), int(indices.max())
    if least < 0 or (num_classes is not None and most >= num_classes):
        expected = "at least 0" if num_classes is None else f"from 0 to {num_classes - 1}"
        raise ValueError(f"labels go from {least} to {most}, expected {expected}")
    return indices.long()


def _check_runs(calibration: Tensor, offsets: Tensor, per_class: bool) -> None:
    """Raises unless the state can have come from `_runs`: artifacts may be corrupt."""
    if calibration.ndim != 1 or offsets.ndim != 1 or not len(calibration):
        raise ValueError(f"the threshold's state has shapes {tuple(calibration.shape)} and {tuple(offsets.shape)}")
    if len(offsets) < 2 or (not per_class and len(offsets) != 2):
        raise ValueError(f"the threshold's state has {len(offsets)} offsets")
    if offsets[0] != 0 or offsets[-1] != len(calibration) or (offsets.diff() < 0).any():
        raise ValueError(f"the threshold's offsets do not run from 0 to its {len(calibration)} calibration scores")
    if not torch.isfinite(calibration).all():
        raise ValueError("the threshold's calibration scores are not finite")
    falls = calibration.diff() < 0
    falls[(offsets[(offsets > 0) & (offsets < len(calibration))] - 1)] = False
    if falls.any():
        raise ValueError("the threshold's calibration scores are not sorted")


def _grid(runs: list[Tensor], marks: list[int]) -> tuple[Tensor, Tensor]:
    """For `p_values_on_grid`: edges (C, G + 2) and, for each cell between them, the least and the largest count.

    A cell starts at a grid score and ends before the next: the count is #{≤ start} there, and #{< end} at most.
    """
    size = min(max(map(len, runs)), GRID_POINTS)
    if len(runs) * size > _GRID_LIMIT:
        raise ValueError(
            f"a threshold for each of {len(runs):,} classes, by up to {size:,} scores each, takes too much memory: use "
            "one threshold for all classes"
        )
    edges = runs[0].new_full((len(runs), size + 2), math.inf)
    ranks = runs[0].new_empty((2, len(runs), size + 1))
    edges[:, 0] = -math.inf
    for c, (run, mark) in enumerate(zip(runs, marks)):
        at = np.arange(len(run))
        if len(run) > size:
            at = np.unique(np.append(np.linspace(0, len(run) - 1, size - 1).round().astype(int), mark))
        points = run[torch.from_numpy(at).to(run.device)]
        edges[c, 1 : len(at) + 1] = points
        ranks[:, c] = len(run)
        ranks[0, c, 0] = 0
        ranks[0, c, 1 : len(at) + 1] = torch.searchsorted(run, points, right=True).to(ranks)
        ranks[1, c, : len(at)] = torch.searchsorted(run, points, right=False).to(ranks)
    return edges, ranks


def _take(table: Tensor, cell: Tensor) -> Tensor:
    """(N,) entry `cell` (N, 1) of each row of `table` (N, G) or of its only row (1, G)."""
    rows: Tensor = table.expand(cell.shape[0], -1).gather(1, cell).squeeze(1)
    return rows


def _derive_again(threshold: nn.Module, _: object) -> None:
    assert isinstance(threshold, Threshold)
    threshold._derive()
