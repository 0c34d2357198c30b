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

from fdbd.bench.measures import Scores, Spread, measure
from fdbd.metrics import Estimate, Evaluation, average, evaluate
from fdbd.metrics.comparison import Influences, influences
from fdbd.metrics.evaluation import Metric, mean_estimate
from fdbd.util.version import __version__

Positive = Literal["id", "ood"]

ALL = "average"
"""The group of all OOD sets."""

# Metrics that an Evaluation holds, by their names in tables.
_EVALUATED: dict[str, Metric] = {
    "auroc": "auroc",
    "fpr95": "fpr",
    "aupr_in": "aupr_in",
    "aupr_out": "aupr_out",
}


@dataclass(frozen=True)
class Latency:
    """Seconds per sample at one batch size: the median of many calls, its 95 % interval, and the
    95th percentile.

    >>> Latency.from_calls(32, [0.1, 0.3, 0.2])
    Latency(batch_size=32, median=0.2, p95=0.3, low=0.1, high=0.3)
    """

    batch_size: int
    median: float
    p95: float
    low: float = math.nan
    high: float = math.nan

    @classmethod
    def from_calls(cls, batch_size: int, seconds: Sequence[float]) -> Self:
        """The latency from the seconds per sample of single calls. The interval of the median is
        that of its order statistics, which holds for any distribution; with fewer than six calls it
        is their range."""
        ordered = sorted(seconds)
        count = len(ordered)
        reach = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))
        return cls(
            batch_size=batch_size,
            median=float(np.median(ordered)),
            p95=ordered[min(count - 1, int(0.95 * count))],
            low=ordered[reach],
            high=ordered[count - 1 - reach],
        )


@dataclass(frozen=True)
class Published:
    """What others have published for the same benchmark, to stand beside our numbers.

    Attributes:
        source: where the numbers come from.
        date: the day on which they were read there.
        auroc: by detector and group, a fraction.
        note: how those numbers were made, if that matters for the comparison.

    >>> from fdbd.bench.openood import protocol
    >>> protocol("openood:cifar10").published.auroc["msp"]
    [88.03, 90.73]
    """

    source: str
    date: str
    auroc: Mapping[str, Mapping[str, float]]
    note: str = ""


@dataclass(frozen=True)
class Setting:
    """What the rows have in common; what is not explained here is as in `fdbd.Benchmark`.

    Attributes:
        num_train, num_bank: training samples behind means and covariances, and those of them that
            are available individually; None: all.
        test, ood: name and size of the ID set; size of each OOD set.
        shifted: size of each covariate-shifted ID set.
        accuracy: the classifier's accuracy on the ID set, a fraction.
        forward: time of the network's forward pass, measured with the rest.
        samples: a key of each set's samples; sets with the same key hold the same samples in the
            same order.
        correct: whether the classifier is right on each ID sample; None without labels.
        collapse: variance of the training features within classes, divided by that between classes.
        runs: how many results were merged; 1: none.
        published: what others have published for exactly this benchmark.

    >>> from fdbd.bench import load_bundle
    >>> setting = load_bundle("cifar10-ce").run(["msp"], latency=False).setting
    >>> setting.num_classes, setting.test
    (10, ('cifar10', 8000))
    """

    title: str
    notes: tuple[str, ...]
    positive: Positive
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
    shifted: Mapping[str, int] = field(default_factory=dict)
    correct: tuple[bool, ...] | None = None
    collapse: float | None = None
    runs: int = 1
    published: Published | None = None

    @property
    def forward_seconds(self) -> float | None:
        """Seconds per sample of the forward pass at the largest batch size that was measured."""
        if not self.forward:
            return None
        return self.forward[-1].median

    def share_of_forward(self, timing: Latency) -> float | None:
        """A score's time as a fraction of the forward pass, both at the nearest batch size that was
        measured."""
        if not self.forward:
            return None

        def distance(other: Latency) -> float:
            return abs(math.log(other.batch_size / timing.batch_size))

        nearest = min(self.forward, key=distance)
        return timing.median / nearest.median

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = asdict(self)
        values["test"] = {"name": self.test[0], "count": self.test[1]}
        values["forward_seconds"] = self.forward_seconds
        values["convention"] = convention(self.positive)
        if self.correct is not None:
            values["correct"] = _pack_flags(self.correct)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` wrote, by this version or by an earlier one."""
        given: dict[str, Any] = {}
        for each in fields(cls):
            if each.name in values:
                value = values[each.name]
                given[each.name] = tuple(value) if isinstance(value, list) else value
        given["test"] = (values["test"]["name"], values["test"]["count"])
        given["groups"] = {name: tuple(members) for name, members in values["groups"].items()}
        given["forward"] = _read_forward(values)
        if values.get("correct") is not None:
            given["correct"] = _unpack_flags(values["correct"])
        if values.get("published") is not None:
            given["published"] = Published(**values["published"])
        return cls(**given)


def _read_forward(values: Mapping[str, Any]) -> tuple[Latency, ...]:
    """The times of the forward pass. Version 0.1.0 kept one number, at a batch of 32."""
    if "forward" in values:
        return tuple(Latency(**timing) for timing in values["forward"])
    if values.get("forward_seconds"):
        return (Latency(32, values["forward_seconds"], math.nan),)
    return ()


@dataclass(frozen=True)
class Row:
    """One detector's results; `error` says why there are none.

    Attributes:
        name: the detector, with the options that are not at their default.
        fit_seconds: time of a fit after a trial fit, so that it does not include compilation.
        evaluations, ood_scores: by OOD set.
        latencies: of the score stage, one per batch size.
        id_scores, ood_scores: empty in results read from a file that does not hold them.
        shifted_scores: by covariate-shifted ID set.
        measured: measures by column and metric that are not to be computed from scores: those of
            files without scores, and of several results merged.
        from_bank: whether the fit rests, in whole or in part, on the samples of the bank alone.
        warnings: what was said during the fit, such as that there are too few samples for it.
        tuned: the options that were chosen on OOD validation data; "" if none were.
        chosen: the detectors that "auto" kept, with what they cost; "" of any other row.

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
    measured: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)
    from_bank: bool = False
    error: str | None = None
    shifted_scores: Mapping[str, Tensor] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    tuned: str = ""
    chosen: str = ""

    @classmethod
    def from_scores(
        cls,
        name: str,
        id_scores: Tensor,
        ood_scores: Mapping[str, Tensor],
        positive: Positive,
        **more: Any,
    ) -> Self:
        """The row of scores, with their evaluations; `more` are further attributes."""
        evaluations = {}
        for title, scores in ood_scores.items():
            evaluations[title] = evaluate(id_scores, scores, positive=positive)
        return cls(
            name,
            evaluations=evaluations,
            id_scores=id_scores,
            ood_scores=dict(ood_scores),
            **more,
        )

    @property
    def has_scores(self) -> bool:
        """Whether the scores of single samples are known."""
        return len(self.id_scores) > 0

    def latency(self, batch_size: int) -> Latency | None:
        """The time at this batch size, if it was measured."""
        for timing in self.latencies:
            if timing.batch_size == batch_size:
                return timing
        return None

    def measure_on(self, sets: Sequence[str], metric: str, setting: Setting) -> Estimate:
        """A measure on an OOD set, or its mean over several; with a joint interval if the scores
        are known and the measure allows it, and else with the mean of the intervals."""
        if metric in _EVALUATED:
            evaluations = [self.evaluations[name] for name in sets]
            if not self.has_scores:
                return average(evaluations, _EVALUATED[metric])
            outside = [self.ood_scores[name] for name in sets]
            return average(evaluations, _EVALUATED[metric], self.id_scores, outside)
        shifted = list(self.shifted_scores.values())
        parts = []
        for name in sets:
            scores = Scores(self.id_scores, setting.correct, shifted, self.ood_scores[name])
            parts.append(measure(metric, scores, setting.positive))
        return mean_estimate(parts)

    def measure_on_id(self, metric: str, setting: Setting) -> Estimate:
        """A measure of ID samples alone."""
        return measure(metric, Scores(self.id_scores, setting.correct), setting.positive)

    @cached_property
    def placements(self) -> dict[str, Influences]:
        """The detector's part in DeLong's tests, by OOD set."""
        if not self.has_scores:
            raise ValueError(
                f"the scores of {self.name} are not in these results, and a paired test needs them"
            )
        found = {}
        for name, scores in self.ood_scores.items():
            found[name] = influences(self.id_scores, scores)
        return found

    def to_dict(self, setting: Setting) -> dict[str, Any]:
        """Plain values for JSON, without scores and averages."""
        if self.error is not None:
            return {"name": self.name, "error": self.error}
        latency = []
        for timing in self.latencies:
            latency.append({**asdict(timing), "of_forward": setting.share_of_forward(timing)})
        datasets = {name: evaluation.to_dict() for name, evaluation in self.evaluations.items()}
        return {
            "name": self.name,
            "paper": self.paper,
            "fit_seconds": self.fit_seconds,
            "from_bank": self.from_bank,
            "warnings": list(self.warnings),
            "tuned": self.tuned,
            "chosen": self.chosen,
            "latency": latency,
            "datasets": datasets,
        }

    def scores_to_dict(self) -> dict[str, Any]:
        """The scores as text: the bytes of little-endian numbers in base64."""
        return {
            "id": _pack_numbers(self.id_scores),
            "ood": {name: _pack_numbers(part) for name, part in self.ood_scores.items()},
            "shifted": {name: _pack_numbers(part) for name, part in self.shifted_scores.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` wrote, with ``groups``, and perhaps ``measured`` and ``scores``, beside
        it."""
        if "error" in values:
            return cls(values["name"], error=values["error"])
        evaluations = {}
        for name, part in values["datasets"].items():
            evaluations[name] = Evaluation.from_dict(part)
        timings = []
        for timing in values["latency"]:
            known = {key: value for key, value in timing.items() if key != "of_forward"}
            timings.append(Latency(**known))
        row = cls(
            name=values["name"],
            paper=values.get("paper"),
            fit_seconds=values.get("fit_seconds", math.nan),
            from_bank=values.get("from_bank", False),
            warnings=tuple(values.get("warnings", ())),
            tuned=values.get("tuned", ""),
            chosen=values.get("chosen", ""),
            evaluations=evaluations,
            latencies=tuple(timings),
            measured=_read_measured(values),
        )
        scores = values.get("scores")
        if scores is None:
            return row
        shifted = scores.get("shifted", {})
        # Measures are computed from the scores, not read from the file.
        return replace(
            row,
            measured={},
            id_scores=_unpack_numbers(scores["id"]),
            ood_scores={name: _unpack_numbers(part) for name, part in scores["ood"].items()},
            shifted_scores={name: _unpack_numbers(part) for name, part in shifted.items()},
        )


def _read_measured(values: Mapping[str, Any]) -> dict[str, dict[str, Estimate]]:
    """Measures by column and metric. Earlier versions kept those of groups alone."""
    found: dict[str, dict[str, Estimate]] = {}
    for columns in (values["groups"], values.get("measured", {})):
        for column, metrics in columns.items():
            read = {metric: Spread.from_dict(value) for metric, value in metrics.items()}
            found.setdefault(column, {}).update(read)
    return found


def _pack_numbers(scores: Tensor) -> dict[str, str]:
    numbers = scores.detach().cpu().numpy()
    kind = "<f8" if numbers.dtype == np.float64 else "<f4"
    return {"dtype": kind, "base64": base64.b64encode(numbers.astype(kind).tobytes()).decode()}


def _unpack_numbers(packed: Mapping[str, str]) -> Tensor:
    numbers = np.frombuffer(base64.b64decode(packed["base64"]), packed["dtype"])
    return torch.from_numpy(numbers.copy())


def _pack_flags(flags: Sequence[bool]) -> dict[str, Any]:
    bits = np.packbits(np.asarray(flags, dtype=bool))
    return {"count": len(flags), "bits": base64.b64encode(bits.tobytes()).decode()}


def _unpack_flags(packed: Mapping[str, Any]) -> tuple[bool, ...]:
    bits = np.frombuffer(base64.b64decode(packed["bits"]), np.uint8)
    flags: list[bool] = np.unpackbits(bits, count=packed["count"]).astype(bool).tolist()
    return tuple(flags)


def convention(positive: str) -> str:
    """The FPR convention in words."""
    if positive == "id":
        return "FPR95: share of OOD samples accepted when 95 % of ID samples are (ID positive)"
    return (
        "FPR95: share of ID samples flagged when 95 % of OOD samples are (OOD positive, as in "
        "OpenOOD)"
    )


def machine() -> dict[str, Any]:
    """What the timings were taken on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fdbd": __version__,
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
    }
