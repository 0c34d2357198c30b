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
from fdbd.fitting.sample_size import FewSamplesWarning
from fdbd.util.torch_compat import is_plain

Kind = Literal["quantile", "conformal"]
_FEW = 256
"""Scores up to which numpy decides."""
_CONFIG = ("kind", "target", "count", "per_class", "num_classes")


class FewCalibrationSamplesWarning(FewSamplesWarning):
    """The calibration samples are too few for the target; see `Threshold.caution`.

    >>> issubclass(FewCalibrationSamplesWarning, FewSamplesWarning)
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

    calibration: Tensor
    """(n,) class after class, ascending within each."""
    offsets: Tensor
    """(C + 1,) the places at which the scores of each class start and end; (2,) if all classes have
    one threshold."""
    value: Tensor
    runs: Tensor
    """The calibration scores, then all of them sorted together if a class has none."""
    starts: Tensor
    """(C,) where each class's scores start in `runs`."""
    sizes: Tensor
    """(C,) how many these are."""

    def __init__(
        self, kind: Kind, target: float, calibration: Tensor, offsets: Tensor, per_class: bool
    ) -> None:
        super().__init__()
        self.kind = kind
        self.target = target
        self.per_class = per_class
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
        """The largest threshold that accepts at least a share `tpr` of the n calibration scores. If
        it accepts k of the n, it accepts k/(n + 1) of new samples on average (see `acceptance`);
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
        share = float(as_fraction("tpr", tpr))
        calibration, offsets = _sorted_by_class(scores, labels, per_class, num_classes)
        threshold = cls("quantile", share, calibration, offsets, per_class)
        empty = (threshold.offsets.diff() == 0).nonzero().flatten().tolist()
        if empty:
            warnings.warn(
                f"{len(empty)} of {threshold.num_classes} classes have no calibration samples and "
                f"take the threshold of all samples; the first is class {empty[0]}",
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
        """Out-of-distribution if the conformal p-value (1 + #{calibration ≤ score}) / (n + 1) is
        at most `alpha`, a fraction in (0, 1). Other arguments are those of `quantile`.

        If the calibration samples and a new in-distribution sample are exchangeable, the new sample
        is flagged with probability at most `alpha`, over the draw of both and whatever the scores'
        distribution; with `per_class`, among the samples predicted as each class. This takes at
        least 1/alpha − 1 calibration samples (of each class). Vovk, Gammerman & Shafer,
        "Algorithmic Learning in a Random World", 2005.

        >>> scores = torch.tensor([0.5, 1.0])
        >>> threshold = Threshold.conformal(torch.arange(1.0, 20.0), alpha=0.05)
        >>> threshold.p_values(scores), threshold.is_ood(scores)
        (tensor([0.0500, 0.1000]), tensor([ True, False]))
        """
        share = float(as_fraction("alpha", alpha))
        calibration, offsets = _sorted_by_class(scores, labels, per_class, num_classes)
        return cls("conformal", share, calibration, offsets, per_class)

    @classmethod
    def from_scores(
        cls,
        scores: ArrayLike,
        labels: ArrayLike | None = None,
        num_classes: int | None = None,
        **target: Unpack[Target],
    ) -> Threshold:
        """`conformal` if `alpha` is given, else `quantile`, by default at 0.95.

        >>> Threshold.from_scores(torch.arange(100.0), alpha=0.1)
        Threshold(conformal, alpha=0.1, 100 calibration scores)
        """
        tpr = target.get("tpr")
        alpha = target.get("alpha")
        per_class = target.get("per_class", False)
        check_target(tpr, alpha)
        if alpha is not None:
            return cls.conformal(scores, alpha, labels, per_class, num_classes)
        if tpr is None:
            tpr = 0.95
        return cls.quantile(scores, tpr, labels, per_class, num_classes)

    @classmethod
    def of(
        cls,
        scores: ArrayLike,
        labels: ArrayLike | None = None,
        num_classes: int | None = None,
        **target: Unpack[Target],
    ) -> Threshold:
        """The earlier name of `from_scores`."""
        warnings.warn(
            "Threshold.of is now Threshold.from_scores; the old name will be removed in 0.4",
            DeprecationWarning,
            stacklevel=2,
        )
        return cls.from_scores(scores, labels, num_classes, **target)

    def forward(self, scores: Tensor, predicted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(N,) `p_values` and (N,) `is_ood`."""
        runs = self._buffers["runs"]
        assert runs is not None
        # First of all, since the number of rows must not decide in a graph.
        if not self.per_class and is_plain(scores, runs):
            is_few = scores.ndim == 1 and scores.numel() <= _FEW
            # The sum shows NaN and infinity, which take the long way.
            if is_few and math.isfinite(sum(scores.tolist())):
                return self._decide_in_numpy(scores, runs)
        return self.p_values(scores, predicted), self.is_ood(scores, predicted)

    def _decide_in_numpy(self, scores: Tensor, runs: Tensor) -> tuple[Tensor, Tensor]:
        """The same for finite scores in numpy, whose calls take a third of the time of torch's:
        a decision on few samples is nothing but calls."""
        values = scores.detach().numpy()
        calibration = runs.numpy()
        count = calibration.searchsorted(values, side="right") + 1
        kind = calibration.dtype
        p_values = count.astype(kind) / kind.type(self.count + 1)
        is_ood = values < self.value.numpy()
        return torch.from_numpy(p_values), torch.from_numpy(is_ood)

    decide = forward

    def is_ood(self, scores: Tensor, predicted: Tensor | None = None) -> Tensor:
        """(N,) bool: ``not (score >= threshold)`` or not finite; for a conformal threshold this is
        p ≤ alpha. Exact in exported graphs too. `predicted` (N,) are the predicted classes, for a
        threshold per class."""
        threshold = self._for_predicted(self.value, scores, predicted)
        return ~((scores >= threshold) & (scores < torch.inf))

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
            return (
                f"Accepts at least {self.target:.4g} of the {self.count} calibration samples"
                f"{within}."
            )
        return (
            f"Flags at most {self.target:.4g} of in-distribution samples{within} that are "
            f"exchangeable with the {self.count} calibration samples, on average over the draw of "
            "the latter."
        )

    @property
    def expected_rate(self) -> float:
        """The share of in-distribution samples to reject, as it was asked for."""
        if self.kind == "conformal":
            return self.target
        return 1 - self.target

    def acceptance(self, confidence: float = 0.95) -> tuple[float, float, float]:
        """What share of new in-distribution samples is accepted: the mean over draws of the
        calibration samples, and the ends of the interval that holds this threshold's share with
        probability `confidence`.

        For continuous scores the share below the j-th smallest of n scores follows Beta(j, n + 1 −
        j). Per class, the result is that of the class with the fewest samples.

        >>> mean, low, high = Threshold.quantile(torch.arange(12.0), tpr=0.95).acceptance()
        >>> round(mean, 3), round(low, 3), round(high, 3)
        (0.923, 0.735, 0.998)
        """
        from scipy.special import betaincinv

        sizes = self.offsets.diff().tolist()
        # The class with the fewest samples; one without any has the threshold of all.
        with_samples = [index for index, size in enumerate(sizes) if size > 0]
        index = min(with_samples, key=lambda index: sizes[index])
        size = sizes[index]
        rejected = self._place_of_threshold(size, index) + 1
        upper_tail = (1 + confidence) / 2
        lower_tail = (1 - confidence) / 2
        low = 1 - float(betaincinv(rejected, size + 1 - rejected, upper_tail))
        high = 1 - float(betaincinv(rejected, size + 1 - rejected, lower_tail))
        return 1 - rejected / (size + 1), low, high

    @property
    def caution(self) -> str | None:
        """One sentence if the calibration samples are too few for the target, else None."""
        asked = self.expected_rate
        _, least_accepted, most_accepted = self.acceptance()
        lowest_rate = 1 - most_accepted
        highest_rate = 1 - least_accepted
        if highest_rate <= max(2.5 * asked, 0.01):
            return None
        of_class = " for the rarest predicted class" if self.per_class else ""
        return (
            f"only {int(self.sizes.min())} calibration samples{of_class}: the target is "
            f"{100 * asked:.3g} % false alarms; with so few samples the true rate "
            f"may be {100 * lowest_rate:.2g} to {100 * highest_rate:.2g} % (95 % interval "
            "over the draw of these samples)"
        )

    def summary(self) -> str:
        """The threshold in a few words, such as "conformal alpha=0.05 from 2,000 scores"."""
        name = "tpr" if self.kind == "quantile" else "alpha"
        classes = " per class" if self.per_class else ""
        return f"{self.kind} {name}={self.target:g} from {self.count:,} scores{classes}"

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
        missing = set(_CONFIG) - set(config)
        missing |= {"calibration", "offsets"} - set(tensors)
        if missing:
            raise ValueError(f"the threshold's state lacks {', '.join(sorted(missing))}")
        kind = config["kind"]
        target = config["target"]
        per_class = config["per_class"]
        if kind not in ("quantile", "conformal"):
            raise ValueError(f"the threshold's state is not valid: kind={kind!r}")
        if not isinstance(target, float):
            raise ValueError(f"the threshold's state is not valid: target={target!r}")
        if not isinstance(per_class, bool):
            raise ValueError(f"the threshold's state is not valid: per_class={per_class!r}")
        calibration = tensors["calibration"]
        offsets = tensors["offsets"]
        # Compared before anything is allocated for a forged number.
        num_classes = offsets.numel() - 1 if per_class else None
        if (calibration.numel(), num_classes) != (config["count"], config["num_classes"]):
            raise ValueError(
                f"the threshold's state holds {calibration.numel()} scores of {num_classes} "
                f"classes, expected {config['count']!r} of {config['num_classes']!r}"
            )
        # Literal types are not narrowed by `not in`.
        checked: Any = kind
        return cls(checked, target, calibration.clone(), offsets.clone(), per_class)

    def extra_repr(self) -> str:
        name = "tpr" if self.kind == "quantile" else "alpha"
        classes = f" of {self.num_classes} classes" if self.per_class else ""
        return f"{self.kind}, {name}={self.target:g}, {self.count} calibration scores{classes}"

    def _derive(self) -> None:
        """Check calibration scores and offsets, which may come from a corrupt file, and register
        what follows from them."""
        self._check_state()
        calibration = self.calibration
        self.count = len(calibration)
        sizes = self.offsets.diff()
        is_empty = sizes == 0
        # A class without samples takes all of them.
        pooled = calibration.sort().values
        runs = []
        for run in calibration.split(sizes.tolist()):
            if not len(run):
                run = pooled
            runs.append(run)
        values = []
        for index, (run, size) in enumerate(zip(runs, sizes.tolist())):
            values.append(run[self._place_of_threshold(size, index)])
        # The square root of the longest run: see `_count_in_runs`.
        self.stride = math.isqrt(max(len(run) for run in runs) - 1) + 1
        all_runs = torch.cat([calibration, pooled]) if is_empty.any() else calibration.clone()
        starts = torch.where(is_empty, self.count, self.offsets[:-1])
        sizes = torch.where(is_empty, self.count, sizes)
        self.register_buffer("value", torch.stack(values), persistent=False)
        self.register_buffer("runs", all_runs, persistent=False)
        self.register_buffer("starts", starts, persistent=False)
        self.register_buffer("sizes", sizes, persistent=False)

    def _check_state(self) -> None:
        calibration = self.calibration
        offsets = self.offsets
        if calibration.dtype not in (torch.float32, torch.float64) or offsets.dtype != torch.int64:
            raise ValueError(
                f"the threshold's state has dtypes {calibration.dtype} and {offsets.dtype}, "
                "expected float32 or float64, and int64"
            )
        is_flat = calibration.ndim == 1 and offsets.ndim == 1
        if not is_flat or len(calibration) < 1 or len(offsets) < 2:
            raise ValueError(
                f"the threshold's state has shapes {tuple(calibration.shape)} and "
                f"{tuple(offsets.shape)}, expected at least one score and two offsets"
            )
        is_right_number = self.per_class or len(offsets) == 2
        runs_from_start_to_end = offsets[0] == 0 and offsets[-1] == len(calibration)
        if not is_right_number or not runs_from_start_to_end or (offsets.diff() < 0).any():
            raise ValueError(
                f"the threshold's offsets do not run from 0 to its {len(calibration)} calibration "
                "scores"
            )
        # Scores may descend only from one class to the next.
        descents = (calibration.diff() < 0).nonzero() + 1
        if not torch.isfinite(calibration).all() or not torch.isin(descents, offsets).all():
            raise ValueError("the threshold's calibration scores are not finite and sorted")

    def _place_of_threshold(self, size: int, index: int) -> int:
        """Which of the ascending calibration scores of class `index`, `size` in number, is its
        threshold."""
        if self.kind == "quantile":
            count = size or self.count
            return count - count_to_accept(count, self.target)
        flagged = count_to_flag(size, self.target)
        if flagged == 0:
            who = f"class {index} has" if self.per_class else "there are"
            raise ValueError(
                f"{who} {size} calibration samples, alpha={self.target:g} takes at least "
                f"{samples_for(self.target)} (1/alpha − 1)"
            )
        return flagged - 1

    def _for_predicted(
        self, of_classes: Tensor, scores: Tensor, predicted: Tensor | None
    ) -> Tensor:
        """(N,) the number of each score's predicted class, from one number per class (C,). If all
        classes have one threshold, the single number (1,) as it was given."""
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
        how many there are."""
        scores = torch.where(scores < torch.inf, scores, -torch.inf)
        if not self.per_class and not torch.compiler.is_compiling():
            common = torch.promote_types(scores.dtype, self.runs.dtype)
            count = torch.searchsorted(self.runs.to(common), scores.to(common), right=or_equal)
            return count, self.sizes
        start = self._for_predicted(self.starts, scores, predicted)
        size = self._for_predicted(self.sizes, scores, predicted)
        return self._count_in_runs(scores, start, size, or_equal), size

    def _count_in_runs(self, scores: Tensor, start: Tensor, size: Tensor, or_equal: bool) -> Tensor:
        """(N,) how many calibration scores are below each score (or equal), of those from `start`
        (N,) on, `size` (N,) in number.

        A binary search would be shorter, but ONNX has none. So the search takes two steps of
        `stride` comparisons each: among every `stride`-th calibration score, then among the
        `stride` ones that follow the last one found below.
        """
        column = scores.unsqueeze(1)
        first = start.unsqueeze(1)
        end = first + size.unsqueeze(1)

        def count_below(places: Tensor) -> Tensor:
            """(N, 1) how many of these places (N, stride) hold a score below (or equal)."""
            found = self.runs[torch.minimum(places, end - 1)]
            is_below = column >= found if or_equal else column > found
            return (is_below & (places < end)).sum(dim=1, keepdim=True)

        steps = torch.arange(self.stride, device=start.device)
        # The last of these that is below begins the block in which the count ends.
        blocks = count_below(first + self.stride * steps)
        before = (blocks - 1).clamp(min=0) * self.stride
        count = before + count_below(first + before + steps)
        return count.squeeze(1)

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
            "give tpr (share of in-distribution samples to accept) or alpha (false alarms), not"
            " both"
        )


def _sorted_by_class(
    scores: ArrayLike, labels: ArrayLike | None, per_class: bool, num_classes: int | None
) -> tuple[Tensor, Tensor]:
    """Checked calibration scores, sorted (within each class), and where each class starts and
    ends."""
    values = _checked_scores(scores)
    if not per_class:
        offsets = torch.tensor([0, len(values)], device="cpu").to(values.device)
        return values.sort().values, offsets
    if labels is None:
        raise ValueError("a threshold per predicted class needs the predicted classes: pass labels")
    predicted = _checked_classes(labels, values, num_classes)
    # By score, then by class: a stable sort keeps the scores of each class ascending.
    order = values.argsort()
    order = order[predicted[order].argsort(stable=True)]
    counts = torch.bincount(predicted.long(), minlength=num_classes or 0)
    return values[order], torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _checked_scores(scores: ArrayLike) -> Tensor:
    if not isinstance(scores, Tensor):
        scores = torch.from_numpy(np.asarray(scores, dtype=float))
    values = scores.detach()
    if values.dtype not in (torch.float32, torch.float64):
        values = values.to(torch.float32)
    if values.ndim != 1 or not len(values):
        raise ValueError(
            f"there are no calibration scores: they have shape {tuple(values.shape)}, expected one "
            "per sample, (n,)"
        )
    bad = (~torch.isfinite(values)).nonzero().flatten()
    if len(bad):
        first = int(bad[0])
        raise ValueError(
            f"{len(bad)} of {len(values)} calibration scores are not finite, the first is "
            f"{values[first].item()} at index {first}"
        )
    return values


def _checked_classes(labels: ArrayLike, scores: Tensor, num_classes: int | None) -> Tensor:
    predicted = as_tensor(labels).detach().to(scores.device)
    if predicted.is_floating_point() or predicted.is_complex() or predicted.dtype == torch.bool:
        raise TypeError(f"labels are {predicted.dtype}, expected integer class indices")
    if predicted.shape != scores.shape:
        raise ValueError(
            f"labels have shape {tuple(predicted.shape)}, scores {tuple(scores.shape)}"
        )
    least = int(predicted.min())
    most = int(predicted.max())
    if least < 0 or (num_classes is not None and most >= num_classes):
        expected = "at least 0" if num_classes is None else f"from 0 to {num_classes - 1}"
        raise ValueError(f"labels go from {least} to {most}, expected {expected}")
    return predicted
