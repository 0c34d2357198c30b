"""The rows of a benchmark and what they have in common, as plain data that is written to JSON and
read back."""

import base64
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from fdbd.metrics import Estimate, Evaluation, average, evaluate
from fdbd.metrics.comparison import Influences, influences
from fdbd.metrics.evaluation import Metric
from fdbd.util.version import __version__

_MEASURES: dict[str, Metric] = {
    "auroc": "auroc",
    "fpr95": "fpr",
    "aupr_in": "aupr_in",
    "aupr_out": "aupr_out",
}
METRICS = tuple(_MEASURES)
SMALLER_IS_BETTER = {"fpr95"}
ALL = "average"  # the group of all OOD sets
_PLAIN = (
    "name",
    "paper",
    "fit_seconds",
    "from_bank",
)  # attributes of a row that JSON holds as they are


@dataclass(frozen=True)
class Latency:
    """Seconds per sample at one batch size: the median of many calls, its 95 % interval, and the
    95th percentile.

    >>> Latency.of(32, [0.1, 0.3, 0.2])
    Latency(batch_size=32, median=0.2, p95=0.3, low=0.1, high=0.3)
    """

    batch_size: int
    median: float
    p95: float
    low: float = math.nan
    high: float = math.nan

    @classmethod
    def of(cls, batch_size: int, seconds: Sequence[float]) -> Self:
        """From the seconds per sample of single calls. The interval of the median is that of its
        order statistics, which holds for any distribution; with fewer than six calls it is their
        range."""
        ordered = sorted(seconds)
        count = len(ordered)
        reach = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))
        p95 = ordered[min(count - 1, int(0.95 * count))]
        return cls(
            batch_size, float(np.median(ordered)), p95, ordered[reach], ordered[count - 1 - reach]
        )


@dataclass(frozen=True)
class Setting:
    """What the rows have in common; what is not explained here is as in `fdbd.Benchmark`.

    Attributes:
        num_train, num_bank: training samples behind means and covariances, and those of them that
            are available individually; None: all.
        test, ood: name and size of the ID set; size of each OOD set.
        accuracy: of the classifier on the ID set, a fraction.
        forward: time of the network's forward pass, measured with the rest.
        samples: a key of each set's samples; sets with the same key hold the same samples in the
            same order.

    >>> from fdbd.bench import load_bundle
    >>> setting = load_bundle("cifar10-ce").run(["msp"], latency=False).setting
    >>> setting.num_classes, setting.test
    (10, ('cifar10', 8000))
    """

    title: str
    notes: tuple[str, ...]
    positive: Literal["id", "ood"]
    num_classes: int
    num_features: int
    num_train: int
    test: tuple[str, int]
    ood: Mapping[str, int]
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    accuracy: float | None = None
    forward: tuple[Latency, ...] = ()
    num_bank: int | None = None
    warnings: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    samples: Mapping[str, str] = field(default_factory=dict)

    @property
    def forward_seconds(self) -> float | None:
        """Seconds per sample of the forward pass at the largest batch size that was measured."""
        return self.forward[-1].median if self.forward else None

    def share_of_forward(self, timing: Latency) -> float | None:
        """A score's time as a fraction of the forward pass, both at the nearest batch size that was
        measured."""
        if not self.forward:
            return None
        nearest = min(
            self.forward, key=lambda other: abs(math.log(other.batch_size / timing.batch_size))
        )
        return timing.median / nearest.median

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        test = {"name": self.test[0], "count": self.test[1]}
        words = {"forward_seconds": self.forward_seconds, "convention": convention(self.positive)}
        return {**asdict(self), "test": test, **words}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` wrote, by this version or by 0.1.0."""
        forward = values.get("forward", ())
        if "forward" not in values and values.get(
            "forward_seconds"
        ):  # 0.1.0: one number, at a batch of 32
            forward = [{"batch_size": 32, "median": values["forward_seconds"], "p95": math.nan}]
        given = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        given |= {name: tuple(part) for name, part in given.items() if isinstance(part, list)}
        given["test"] = values["test"]["name"], values["test"]["count"]
        given["groups"] = {name: tuple(members) for name, members in values["groups"].items()}
        return cls(**{**given, "forward": tuple(Latency(**timing) for timing in forward)})


@dataclass(frozen=True)
class Row:
    """One detector's results; `error` says why there are none.

    Attributes:
        name: the detector, with the options that are not at their default.
        fit_seconds: of a fit after a trial fit, so that no compiler is in it.
        evaluations, ood_scores: by OOD set.
        latencies: of the score stage, one per batch size.
        id_scores, ood_scores: empty in results read from a file that does not hold them.
        averages: measures by group and metric, where the scores are not known.
        from_bank: whether the fit rests, in whole or in part, on the samples of the bank alone.

    >>> from fdbd.bench import load_bundle
    >>> row = load_bundle("cifar10-ce").run(["msp"], latency=False).row("msp")
    >>> sorted(row.evaluations) == sorted(row.ood_scores)
    True
    """

    name: str
    paper: str | None = None
    fit_seconds: float = math.nan
    evaluations: Mapping[str, Evaluation] = field(default_factory=dict)
    latencies: Sequence[Latency] = ()
    id_scores: Tensor = field(default_factory=lambda: torch.zeros(0))
    ood_scores: Mapping[str, Tensor] = field(default_factory=dict)
    averages: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)
    from_bank: bool = False
    error: str | None = None

    @classmethod
    def of(
        cls, name: str, scores: Mapping[str, Tensor], positive: Literal["id", "ood"], **more: Any
    ) -> Self:
        """The row of scores by set, the ID set first, with their evaluations; `more` are further
        attributes."""
        (_, inside), *outside = scores.items()
        evaluations = {title: evaluate(inside, part, positive=positive) for title, part in outside}
        return cls(
            name, evaluations=evaluations, id_scores=inside, ood_scores=dict(outside), **more
        )

    @property
    def has_scores(self) -> bool:
        return len(self.id_scores) > 0

    def latency(self, batch_size: int) -> Latency | None:
        """The time at this batch size, where it was measured."""
        return next((timing for timing in self.latencies if timing.batch_size == batch_size), None)

    def average(self, sets: Sequence[str], metric: str) -> Estimate:
        """A measure's mean over these OOD sets, with a joint interval where the scores are
        known."""
        scores = (
            (self.id_scores, [self.ood_scores[name] for name in sets]) if self.has_scores else ()
        )
        return average([self.evaluations[name] for name in sets], _MEASURES[metric], *scores)

    @cached_property
    def placements(self) -> dict[str, Influences]:
        """The detector's part in DeLong's tests, by OOD set."""
        if not self.has_scores:
            raise ValueError(
                f"the scores of {self.name} are not in these results, and a paired test needs them"
            )
        return {
            name: influences(self.id_scores, scores) for name, scores in self.ood_scores.items()
        }

    def to_dict(self, setting: Setting) -> dict[str, Any]:
        """Plain values for JSON, without scores and averages."""
        if self.error is not None:
            return {"name": self.name, "error": self.error}
        latency = [
            {**asdict(timing), "of_forward": setting.share_of_forward(timing)}
            for timing in self.latencies
        ]
        datasets = {name: evaluation.to_dict() for name, evaluation in self.evaluations.items()}
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "latency": latency,
            "datasets": datasets,
        }

    def scores_to_dict(self) -> dict[str, Any]:
        """The scores as text: the bytes of little-endian numbers in base64."""
        return {
            "id": _packed(self.id_scores),
            "ood": {name: _packed(part) for name, part in self.ood_scores.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` wrote, with ``groups`` and perhaps ``scores`` beside it."""
        if "error" in values:
            return cls(values["name"], error=values["error"])
        timings = (
            {k: v for k, v in timing.items() if k != "of_forward"} for timing in values["latency"]
        )
        row = cls(
            **{name: values[name] for name in _PLAIN if name in values},
            evaluations={
                name: Evaluation.from_dict(part) for name, part in values["datasets"].items()
            },
            latencies=tuple(Latency(**timing) for timing in timings),
            averages={
                name: {k: Estimate(**v) for k, v in part.items()}
                for name, part in values["groups"].items()
            },
        )
        if (scores := values.get("scores")) is None:
            return row
        outside = {name: _unpacked(part) for name, part in scores["ood"].items()}
        return replace(row, id_scores=_unpacked(scores["id"]), ood_scores=outside)


def _packed(scores: Tensor) -> dict[str, str]:
    numbers = scores.detach().cpu().numpy()
    kind = "<f8" if numbers.dtype == np.float64 else "<f4"
    return {"dtype": kind, "base64": base64.b64encode(numbers.astype(kind).tobytes()).decode()}


def _unpacked(packed: Mapping[str, str]) -> Tensor:
    return torch.from_numpy(
        np.frombuffer(base64.b64decode(packed["base64"]), packed["dtype"]).copy()
    )


def convention(positive: str) -> str:
    """The FPR convention in words."""
    if positive == "id":
        return "FPR95: share of OOD samples accepted when 95 % of ID samples are (ID positive)"
    return "FPR95: share of ID samples flagged when 95 % of OOD samples are (OOD positive, as in OpenOOD)"


def machine() -> dict[str, Any]:
    """What the timings were taken on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fdbd": __version__,
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
    }
