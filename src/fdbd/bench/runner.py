"""Benchmark: all detectors on the same features, in one process; the failure of one leaves the others' results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from fdbd.bench.features import FeatureSet
from fdbd.bench.latency import measure
from fdbd.bench.results import Results, Row, Setting
from fdbd.core.batch import Head
from fdbd.detectors import (
    Configured,
    Detector,
    Ensemble,
    Paper,
    Shaped,
    create,
    fit_together,
    list_detectors,
    list_shapings,
)
from fdbd.detectors.mds import PartMoments
from fdbd.fitting.statistics import ClassMoments, Mean, Moments
from fdbd.metrics import evaluate
from fdbd.util.progress import track

BATCH_SIZES = (1, 256)
SHAPED = ("energy", "fdbd")
"""Detectors that a full run also combines with every shaping."""


def default_detectors() -> list[str]:
    """Names of every detector that features and logits suffice for, then each shaping before Energy and fDBD."""
    plain = [name for name in list_detectors(shapings=False) if _works_on_arrays(name)]
    combined = [(shaping, name) for name in SHAPED for shaping in list_shapings() if _works_on_arrays(shaping)]
    # Scaled logits have the same argmax, so LTS leaves fDBD as it is.
    return plain + [f"{shaping}+{name}" for shaping, name in combined if (shaping, name) != ("lts", "fdbd")]


def _works_on_arrays(name: str) -> bool:
    return not Configured.registry[name].needs.network


class Benchmark:
    """One model, one in-distribution set, several out-of-distribution sets.

    Args:
        head: the classifier's linear head.
        train: training features that detectors learn from.
        test: in-distribution features that are scored.
        ood: out-of-distribution feature sets.
        groups: name of a group (near, far) to names of its sets; averages are given for each, and for all.
        title: what is compared; stands above every table.
        notes: which data and weights, one line each; stand below every table.
        statistics: moments of the full training set, where `train` is only a part of it. Detectors that ask for means
            and covariances get these; percentiles and neighbours come from `train`.
        forward_seconds: time of the backbone's forward pass a sample, for the latency ratio.
        positive: the convention of FPR: "id" as in the paper, "ood" as in OpenOOD.

    >>> generator = torch.Generator().manual_seed(0)
    >>> head = Head(torch.eye(3), torch.zeros(3))
    >>> inside = FeatureSet("inside", 3 * torch.eye(3).repeat(40, 1) + torch.rand(120, 3, generator=generator))
    >>> outside = FeatureSet("outside", torch.rand(60, 3, generator=generator))
    >>> results = Benchmark(head, inside, inside, [outside]).run(["fdbd", "msp"], latency=False)
    >>> results.row("fdbd").evaluations["outside"].auroc > 0.9
    True
    """

    def __init__(
        self,
        head: Head,
        train: FeatureSet,
        test: FeatureSet,
        ood: Sequence[FeatureSet],
        *,
        groups: Mapping[str, Sequence[str]] | None = None,
        title: str = "",
        notes: Sequence[str] = (),
        statistics: ClassMoments | None = None,
        forward_seconds: float | None = None,
        positive: Literal["id", "ood"] = "id",
    ) -> None:
        if not ood:
            raise ValueError("a benchmark needs at least one out-of-distribution set")
        names = [samples.name for samples in ood]
        if len(set(names)) < len(names) or test.name in names:
            raise ValueError(f"datasets need names of their own, got {[test.name, *names]}")
        unknown = {name for members in (groups or {}).values() for name in members} - set(names)
        if unknown:
            raise ValueError(f"groups name {', '.join(sorted(unknown))}, which are not among the OOD sets")
        for samples in (train, test, *ood):
            if samples.features.ndim != 2 or samples.features.shape[1] != head.num_features:
                raise ValueError(
                    f"features of {samples.name} have shape {tuple(samples.features.shape)}, "
                    f"expected (N, {head.num_features}): the head's input"
                )
        self.head, self.train, self.test, self.ood = head, train, test, list(ood)
        self.groups = {name: tuple(members) for name, members in (groups or {}).items()}
        self.title, self.notes, self.positive = title, tuple(notes), positive
        self.statistics, self.forward_seconds = statistics, forward_seconds

    def run(
        self, detectors: Iterable[str | Detector] | None = None, *, latency: bool = True, progress: bool = True
    ) -> Results:
        """Fit, score and evaluate each detector.

        Args:
            detectors: names or detectors; None: every one that works on features, and the shaping combinations.
            latency: also time the score stage.
            progress: show a bar when it takes more than two seconds.
        """
        chosen = list(default_detectors() if detectors is None else detectors)
        rows = [self._row(item, latency) for item in track(chosen, "comparing detectors", enabled=progress)]
        return Results(self._setting(), _with_own_names(rows), self._figures())

    def _figures(self) -> dict[str, Any]:
        from fdbd.report import figures  # the report stands on the benchmark, hence not at the top

        return figures(self)

    def _row(self, item: str | Detector, latency: bool) -> Row:
        name = item if isinstance(item, str) else label(item)
        try:
            detector = create(item) if isinstance(item, str) else item
            start = time.perf_counter()
            fit_together([detector], self.train, self.head, self._full_statistics)
            if isinstance(detector, Ensemble):
                raise ValueError("needs calibration data of its own, which a benchmark does not set aside")
            seconds = time.perf_counter() - start
            inside = self._score(detector, self.test)
            outside = {samples.name: self._score(detector, samples) for samples in self.ood}
            evaluations = {name: evaluate(inside, scores, positive=self.positive) for name, scores in outside.items()}
            timings = [measure(detector, self.test, size) for size in BATCH_SIZES] if latency else []
        except Exception as error:  # the others' results stand, whatever goes wrong in one
            return Row.failed(name, " ".join(f"{type(error).__name__}: {error}".split()))
        return Row(name, _paper(detector), seconds, evaluations, timings, inside, outside)

    def _score(self, detector: Detector, samples: FeatureSet) -> Tensor:
        with torch.inference_mode():
            return torch.cat([detector.score(batch) for batch in samples.batches()]).clone()

    def _full_statistics(self, statistic: Any) -> Any:
        """Means and covariances of the full training set in place of those of the part."""
        full = self.statistics
        if full is not None and isinstance(statistic, PartMoments) and not statistic.layers:
            statistic.parts = [full]
        if full is None or type(statistic) not in (Mean, Moments, ClassMoments):
            return statistic
        if isinstance(statistic, Mean):
            statistic.count, statistic.total = full.count, full.mean() * full.count
        else:
            statistic.count, statistic.average, statistic.scatter = full.count, full.average, full.scatter
            if isinstance(statistic, ClassMoments):
                statistic.counts, statistic.totals = full.counts, full.totals
        return statistic

    def _setting(self) -> Setting:
        return Setting(
            title=self.title,
            notes=self.notes,
            positive=self.positive,
            num_classes=self.head.num_classes,
            num_features=self.head.num_features,
            num_train=self.train.features.shape[0] if self.statistics is None else self.statistics.count,
            test=(self.test.name, len(self.test)),
            ood={samples.name: len(samples) for samples in self.ood},
            groups=self.groups,
            accuracy=self._accuracy(),
            forward_seconds=self.forward_seconds,
        )

    def _accuracy(self) -> float | None:
        if self.test.labels is None:
            return None
        correct = 0
        for batch in self.test.batches():
            logits = self.head(batch.features) if batch.logits is None else batch.logits
            assert batch.labels is not None
            correct += int((logits.argmax(dim=1) == batch.labels).sum())
        return correct / max(len(self.test), 1)


def _paper(detector: Detector) -> Paper | None:
    """Where a detector comes from: for a shaped one, its shaping."""
    return detector.shaping.paper if isinstance(detector, Shaped) else detector.paper


def _with_own_names(rows: list[Row]) -> list[Row]:
    """Rows of one name told apart by a number: tables and comparisons go by name."""
    seen: dict[str, int] = {}
    for position, row in enumerate(rows):
        seen[row.name] = seen.get(row.name, 0) + 1
        if seen[row.name] > 1:
            rows[position] = replace(row, name=f"{row.name} #{seen[row.name]}")
    return rows


def label(detector: Detector) -> str:
    """A short name for a detector: its registered name and the options that are not at their default."""
    import inspect

    parameters = inspect.signature(type(detector).__init__).parameters
    options = detector.options()
    inner = "+".join(part.name for part in options.values() if isinstance(part, Configured))
    changed = ", ".join(
        f"{name}={value}"
        for name, value in options.items()
        if not isinstance(value, (Configured, list)) and value != parameters[name].default
    )
    name = inner or detector.name or type(detector).__name__
    return f"{name} ({changed})" if changed else name
