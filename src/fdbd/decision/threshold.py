"""From scores to decisions: a threshold with the calibration scores that it came from.

Higher score = more in-distribution. Knows scores and predicted classes, never features, detectors
or models.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from fdbd.core.batch import ArrayLike, as_tensor
from fdbd.core.ranks import as_fraction, count_to_accept, count_to_flag, samples_for

Kind = Literal["quantile", "conformal"]
_CONFIG = ("kind", "target", "count", "per_class", "num_classes")


class FewSamplesWarning(UserWarning):
    """The calibration samples are too few for the target; see `Threshold.caution`.

    >>> issubclass(FewSamplesWarning, UserWarning)
    True
    """


class Target(TypedDict, total=False):
    """What is asked of a threshold: a `tpr` or an `alpha`, and whether each predicted class has its
    own."""

    tpr: float | None
    alpha: float | None
    per_class: bool


class Threshold(nn.Module):
    """Decides which scores are out-of-distribution, from the scores of calibration samples.

    Made by `Threshold.quantile` or `Threshold.conformal`, for all samples or per predicted class.
    The calibration samples are in-distribution, and seen by neither the network's training nor the
    fit. A score that is not finite is always out-of-distribution. The dtype is that of the
    calibration scores, even when the module around it is cast to another: a rounded threshold is
    another threshold.

    Attributes:
        kind: "quantile" or "conformal".
        target: the `tpr` or the `alpha` that was asked for, a fraction.
        count: number of calibration scores.
        per_class: whether each predicted class has its own threshold.
        value: (1,), or (C,) per class: scores at or above it are in-distribution. Read-only.

    >>> threshold = Threshold.quantile(torch.arange(100.0), tpr=0.95)
    >>> threshold, threshold.value
    (Threshold(quantile, tpr=0.95, 100 calibration scores), tensor([5.]))
    >>> threshold.is_ood(torch.tensor([4.9, 5.0, float("-inf"), float("nan")]))
    tensor([ True, False,  True,  True])
    """

    calibration: Tensor  #: (n,) class after class, ascending within each
    offsets: Tensor  #: (C + 1,) where the scores of each class start and end; (2,) when there is one threshold for all
    value: Tensor
    runs: Tensor  #: the calibration scores, then all of them sorted together if a class has none
    starts: Tensor  #: (C,) where each class's scores start in `runs`
    sizes: Tensor  #: (C,) how many these are

    def __init__(
        self, kind: Kind, target: float, calibration: Tensor, offsets: Tensor, per_class: bool
    ) -> None:
        super().__init__()
        self.kind, self.target, self.per_class = kind, target, per_class
        self.register_buffer("calibration", calibration)
        self.register_buffer("offsets", offsets)
        self._derive()

    @classmethod
    def quantile(
        cls,
        scores: ArrayLike,
        tpr: float = 0.95,
        labels: ArrayLike | None = None,
        per_class: bool = False,
        num_classes: int | None = None,
    ) -> Threshold:
        """The largest threshold that accepts at least a share `tpr` of the n calibration scores. Of
        new samples it accepts k/(n + 1) on average, where k of n are accepted (see `acceptance`);
        `conformal` gives a bound instead.

        Args:
            scores: (n,) finite scores of in-distribution samples; tensor, array or list.
            tpr: the share to accept, a fraction in (0, 1].
            labels: (n,) predicted classes of these samples, for `per_class`.
            per_class: one threshold per predicted class. A class without samples takes the
                threshold of all samples, with a warning.
            num_classes: C; None is the largest label plus one.

        >>> Threshold.quantile([1.0, 2.0, 3.0, 4.0], tpr=0.75).value
        tensor([2.], dtype=torch.float64)
        """
        runs = _runs(scores, labels, per_class, num_classes)
        threshold = cls("quantile", float(as_fraction("tpr", tpr)), *runs, per_class)
        if empty := (threshold.offsets.diff() == 0).nonzero().flatten().tolist():
            many = f"{len(empty)} of {threshold.num_classes} classes have no calibration samples"
            text = f"{many} and take the threshold of all samples; the first is class {empty[0]}"
            warnings.warn(text, stacklevel=2)
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
        """Out-of-distribution where the conformal p-value (1 + #{calibration ≤ score}) / (n + 1) is
        at most `alpha`, a fraction in (0, 1). Other arguments are those of `quantile`.

        If the calibration samples and a new in-distribution sample are exchangeable, the new sample
        is flagged with probability at most `alpha`, over the draw of both and whatever the scores'
        distribution; with `per_class`, among the samples predicted as each class. This takes at
        least 1/alpha − 1 calibration samples (of each class). Vovk, Gammerman & Shafer,
        "Algorithmic Learning in a Random World", 2005.

        >>> scores, threshold = torch.tensor([0.5, 1.0]), Threshold.conformal(torch.arange(1.0, 20.0), alpha=0.05)
        >>> threshold.p_values(scores), threshold.is_ood(scores)
        (tensor([0.0500, 0.1000]), tensor([ True, False]))
        """
        runs = _runs(scores, labels, per_class, num_classes)
        return cls("conformal", float(as_fraction("alpha", alpha)), *runs, per_class)

    @classmethod
    def of(
        cls,
        scores: ArrayLike,
        labels: ArrayLike | None = None,
        num_classes: int | None = None,
        **asked: Unpack[Target],
    ) -> Threshold:
        """`conformal` if `alpha` is given, else `quantile`, by default at 0.95."""
        tpr, alpha, per_class = asked.get("tpr"), asked.get("alpha"), asked.get("per_class", False)
        check_target(tpr, alpha)
        if alpha is not None:
            return cls.conformal(scores, alpha, labels, per_class, num_classes)
        return cls.quantile(scores, 0.95 if tpr is None else tpr, labels, per_class, num_classes)

    def forward(self, scores: Tensor, predicted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(N,) `p_values` and (N,) `is_ood`."""
        return self.p_values(scores, predicted), self.is_ood(scores, predicted)

    decide = forward

    def is_ood(self, scores: Tensor, predicted: Tensor | None = None) -> Tensor:
        """(N,) bool: ``not (score >= threshold)`` or not finite; for a conformal threshold this is
        p ≤ alpha. Exact in exported graphs too. `predicted` (N,) are the predicted classes, for a
        threshold per class."""
        return ~((scores >= self._own(self.value, scores, predicted)) & (scores < torch.inf))

    def p_values(self, scores: Tensor, predicted: Tensor | None = None) -> Tensor:
        """(N,) conformal p-values (1 + #{calibration ≤ score}) / (n + 1), for either kind of
        threshold: small means out-of-distribution. Scores that are not finite get the smallest, 1 /
        (n + 1)."""
        count, size = self._count(scores, predicted, or_equal=True)
        return (count + 1).to(self.calibration.dtype) / (size + 1)

    def standing(self, scores: Tensor, predicted: Tensor | None = None) -> Tensor:
        """(N,) share of the calibration scores (of the predicted class) that are below each score.

        >>> Threshold.quantile(torch.arange(4.0)).standing(torch.tensor([-1.0, 2.0, 9.0]))
        tensor([0.0000, 0.5000, 1.0000])
        """
        count, size = self._count(scores, predicted, or_equal=False)
        return count.to(self.calibration.dtype) / size

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
        flagged = f"Flags at most {self.target:.4g} of in-distribution samples{within} that are exchangeable with"
        return f"{flagged} the {self.count} calibration samples, on average over the draw of the latter."

    @property
    def expected_rate(self) -> float:
        """The share of in-distribution samples to reject, as it was asked for."""
        return self.target if self.kind == "conformal" else 1 - self.target

    def acceptance(self, confidence: float = 0.95) -> tuple[float, float, float]:
        """What share of new in-distribution samples is accepted: the mean over draws of the
        calibration samples, and the ends of the interval that holds this threshold's share with
        probability `confidence`.

        For continuous scores the share below the j-th smallest of n scores follows Beta(j, n + 1 −
        j). Per class, the result is that of the class with the fewest samples.

        >>> [round(share, 3) for share in Threshold.quantile(torch.arange(12.0), tpr=0.95).acceptance()]
        [0.923, 0.735, 0.998]
        """
        from scipy.special import betaincinv

        size, index = min(
            (size, index) for index, size in enumerate(self.offsets.diff().tolist()) if size
        )
        rejected = self._mark(size, index) + 1
        tails = (1 + confidence) / 2, (1 - confidence) / 2
        low, high = (1 - float(betaincinv(rejected, size + 1 - rejected, tail)) for tail in tails)
        return 1 - rejected / (size + 1), low, high

    @property
    def caution(self) -> str | None:
        """One sentence if the calibration samples are too few for the target, else None."""
        asked = self.expected_rate
        _, low, high = self.acceptance()
        if 1 - low <= max(2.5 * asked, 0.01):
            return None
        few = f"only {int(self.sizes.min())} calibration samples"
        few += " for the rarest predicted class" if self.per_class else ""
        interval = f"{100 * (1 - high):.2g} to {100 * (1 - low):.2g} % (95 % interval over the draw of these samples)"
        return f"{few}: the target is {100 * asked:.3g} % false alarms; with so few samples the true rate may be {interval}"

    def to_config(self) -> dict[str, object]:
        """What `from_state` needs besides ``state_dict()``, as JSON values."""
        return {name: getattr(self, name) for name in _CONFIG}

    @classmethod
    def from_state(cls, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Threshold:
        """The threshold that ``to_config()`` and ``state_dict()`` came from; anything inconsistent
        is a ValueError.

        >>> threshold = Threshold.conformal(torch.arange(50.0))
        >>> Threshold.from_state(threshold.to_config(), threshold.state_dict())
        Threshold(conformal, alpha=0.05, 50 calibration scores)
        """
        if missing := ({*_CONFIG} - set(config)) | ({"calibration", "offsets"} - set(tensors)):
            raise ValueError(f"the threshold's state lacks {', '.join(sorted(missing))}")
        kind, target, per_class = config["kind"], config["target"], config["per_class"]
        if (
            kind not in ("quantile", "conformal")
            or not isinstance(target, float)
            or not isinstance(per_class, bool)
        ):
            raise ValueError(
                f"the threshold's state is not valid: kind={kind!r}, target={target!r}"
            )
        calibration, offsets = tensors["calibration"], tensors["offsets"]
        held = calibration.numel(), offsets.numel() - 1 if per_class else None
        if held != (
            config["count"],
            config["num_classes"],
        ):  # before anything is made of a forged number
            expected = f"{config['count']!r} of {config['num_classes']!r}"
            raise ValueError(
                f"the threshold's state holds {held[0]} scores of {held[1]} classes, expected {expected}"
            )
        return cls(kind, target, calibration.clone(), offsets.clone(), per_class)

    def extra_repr(self) -> str:
        name = "tpr" if self.kind == "quantile" else "alpha"
        classes = f" of {self.num_classes} classes" if self.per_class else ""
        return f"{self.kind}, {name}={self.target:g}, {self.count} calibration scores{classes}"

    def _derive(self) -> None:
        """Check calibration scores and offsets, which may come from a corrupt file, and register
        what follows."""
        calibration, offsets = self.calibration, self.offsets
        if calibration.dtype not in (torch.float32, torch.float64) or offsets.dtype != torch.int64:
            raise ValueError(
                f"the threshold's state has dtypes {calibration.dtype} and {offsets.dtype}"
            )
        if calibration.ndim != 1 or offsets.ndim != 1 or not len(calibration) or len(offsets) < 2:
            raise ValueError(
                f"the threshold's state has shapes {tuple(calibration.shape)} and {tuple(offsets.shape)}"
            )
        self.count, own = len(calibration), offsets.diff()
        is_right_number = self.per_class or len(offsets) == 2
        if not is_right_number or offsets[0] != 0 or offsets[-1] != self.count or (own < 0).any():
            raise ValueError(
                f"the threshold's offsets do not run from 0 to its {self.count} calibration scores"
            )
        descents = (calibration.diff() < 0).nonzero() + 1
        if not torch.isfinite(calibration).all() or not torch.isin(descents, offsets).all():
            raise ValueError("the threshold's calibration scores are not finite and sorted")
        is_empty, pooled = own == 0, calibration.sort().values
        runs = [run if len(run) else pooled for run in calibration.split(own.tolist())]
        self.stride = math.isqrt(max(map(len, runs)) - 1) + 1
        derived = {
            "value": torch.stack(
                [run[self._mark(size, i)] for i, (run, size) in enumerate(zip(runs, own.tolist()))]
            ),
            "runs": torch.cat([calibration, pooled]) if is_empty.any() else calibration.clone(),
            "starts": torch.where(is_empty, self.count, offsets[:-1]),
            "sizes": torch.where(is_empty, self.count, own),
        }
        for name, tensor in derived.items():
            self.register_buffer(name, tensor, persistent=False)

    def _mark(self, size: int, index: int) -> int:
        """Which of a class's ascending calibration scores is its threshold."""
        if self.kind == "quantile":
            return (size or self.count) - count_to_accept(size or self.count, self.target)
        flagged = count_to_flag(size, self.target)
        if flagged == 0:
            who = f"class {index} has" if self.per_class else "there are"
            needed = (
                f"alpha={self.target:g} takes at least {samples_for(self.target)} (1/alpha − 1)"
            )
            raise ValueError(f"{who} {size} calibration samples, {needed}")
        return flagged - 1

    def _own(self, of_classes: Tensor, scores: Tensor, predicted: Tensor | None) -> Tensor:
        """(N,) the number of each score's predicted class, of numbers (C,); or (1,), where one
        threshold is for all."""
        if not self.per_class:
            return of_classes
        if predicted is None:
            raise ValueError(
                "a threshold per predicted class needs the predicted classes: pass predicted"
            )
        if not torch.compiler.is_compiling() and predicted.shape != scores.shape:
            raise ValueError(
                f"scores have shape {tuple(scores.shape)}, predicted {tuple(predicted.shape)}"
            )
        return of_classes.index_select(0, predicted)

    def _count(
        self, scores: Tensor, predicted: Tensor | None, or_equal: bool
    ) -> tuple[Tensor, Tensor]:
        """How many calibration scores (of the predicted class) are below each score (or equal), and
        of how many.

        A search in two steps that exports, for ONNX has no binary search: among each `stride`-th
        score, then among the `stride` scores that follow the last one below.
        """
        scores = torch.where(scores < torch.inf, scores, -torch.inf)
        if not self.per_class and not torch.compiler.is_compiling():
            common = torch.promote_types(scores.dtype, self.runs.dtype)
            return torch.searchsorted(
                self.runs.to(common), scores.to(common), right=or_equal
            ), self.sizes
        start, size = (self._own(part, scores, predicted) for part in (self.starts, self.sizes))
        start, end = start.unsqueeze(1), (start + size).unsqueeze(1)

        def below(places: Tensor) -> Tensor:
            """(N, 1) how many of these places (N, stride) hold a score below (or equal)."""
            found = self.runs[torch.minimum(places, end - 1)]
            is_below = scores.unsqueeze(1) >= found if or_equal else scores.unsqueeze(1) > found
            return (is_below & (places < end)).sum(dim=1, keepdim=True)

        lanes = torch.arange(self.stride, device=start.device)
        block = (below(start + self.stride * lanes) - 1).clamp(min=0) * self.stride
        return (block + below(start + block + lanes)).squeeze(1), size

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Threshold:
        """Moves, but does not cast."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._derive()


def check_target(tpr: float | None, alpha: float | None) -> None:
    """ValueError if both are given."""
    if tpr is not None and alpha is not None:
        raise ValueError(
            "give tpr (share of in-distribution samples to accept) or alpha (false alarms), not both"
        )


def _runs(
    scores: ArrayLike, labels: ArrayLike | None, per_class: bool, classes: int | None
) -> tuple[Tensor, Tensor]:
    """Checked calibration scores, sorted (within each class), and where each class starts and
    ends."""
    values = (
        scores if isinstance(scores, Tensor) else torch.from_numpy(np.asarray(scores, dtype=float))
    ).detach()
    if values.dtype not in (torch.float32, torch.float64):
        values = values.to(torch.float32)
    if values.ndim != 1 or not len(values):
        shape = tuple(values.shape)
        raise ValueError(
            f"there are no calibration scores: they have shape {shape}, expected one per sample, (n,)"
        )
    bad = (~torch.isfinite(values)).nonzero().flatten()
    if len(bad):
        first = f"the first is {values[bad[0]].item()} at index {int(bad[0])}"
        raise ValueError(f"{len(bad)} of {len(values)} calibration scores are not finite, {first}")
    if not per_class:
        return values.sort().values, torch.tensor([0, len(values)], device="cpu").to(values.device)
    if labels is None:
        raise ValueError("a threshold per predicted class needs the predicted classes: pass labels")
    predicted = as_tensor(labels).detach().to(values.device)
    if predicted.is_floating_point() or predicted.is_complex() or predicted.dtype == torch.bool:
        raise TypeError(f"labels are {predicted.dtype}, expected integer class indices")
    if predicted.shape != values.shape:
        raise ValueError(
            f"labels have shape {tuple(predicted.shape)}, scores {tuple(values.shape)}"
        )
    least, most = int(predicted.min()), int(predicted.max())
    if least < 0 or (classes is not None and most >= classes):
        expected = "at least 0" if classes is None else f"from 0 to {classes - 1}"
        raise ValueError(f"labels go from {least} to {most}, expected {expected}")
    order = values.argsort()
    order = order[predicted[order].argsort(stable=True)]
    counts = torch.bincount(predicted.long(), minlength=classes or 0)
    return values[order], torch.cat([counts.new_zeros(1), counts.cumsum(0)])
