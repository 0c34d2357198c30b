"""Benchmark: all detectors on the same features, in one process; the failure of one leaves the
others' results."""

import contextlib
import copy
import inspect
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from fdbd.bench.figures import figures
from fdbd.bench.page import html
from fdbd.bench.rows import Latency, Row, Setting
from fdbd.bench.table import PathLike, ResultTable
from fdbd.core.batch import Batch, Head
from fdbd.core.configuration import registered
from fdbd.data.features import FeatureSet
from fdbd.detectors import (
    Configured,
    Detector,
    Ensemble,
    Shaped,
    create,
    list_detectors,
    list_shapings,
)
from fdbd.detectors.mds import LayerMoments
from fdbd.fitting.driver import fit_detector
from fdbd.fitting.statistics import ClassMoments, Count, Mean, Moments, Together, Transformed
from fdbd.kernels.dispatch import WORTH_A_KERNEL, compile_kernels
from fdbd.networks.classifier import Classifier
from fdbd.util.devices import device_of
from fdbd.util.files import write_text
from fdbd.util.progress import track

BATCH_SIZES = (1, 256)  # at which scores are timed


def default_detectors() -> list[str]:
    """Names of every detector that features and logits suffice for, then each shaping before Energy
    and fDBD.

    >>> "react+fdbd" in default_detectors()
    True
    """
    plain, before = (
        [name for name in names if not registered()[name].needs.network]
        for names in (list_detectors(shapings=False), list_shapings())
    )
    combined = [f"{shaping}+{name}" for name in ("energy", "fdbd") for shaping in before]
    return [
        name for name in plain + combined if name != "lts+fdbd"
    ]  # scaled logits have the same argmax


class Results(ResultTable):
    """What `Benchmark.run` returns. ``print(results)`` shows the table; `table` gives it for rich,
    `to_json`, `to_csv`, `to_markdown`, `to_latex` and `to_html` write files, `from_json` reads one,
    `to_pandas` gives one line per detector and dataset, and `compare` tells whether two detectors
    differ.

    >>> from fdbd.bench import load_bundle
    >>> results = load_bundle("cifar10-ce").run(["fdbd", "msp"], latency=False)
    >>> results.compare("fdbd", "msp").verdict()
    'higher'
    """

    def to_html(self, path: PathLike) -> Path:
        """The report, one self-contained page."""
        return write_text(path, html(self))


@dataclass(eq=False, repr=False)
class Benchmark:
    """One model, one in-distribution set, several out-of-distribution sets.

    Args:
        head: the classifier's linear head.
        train: training features that detectors learn from.
        test: in-distribution features that are scored.
        ood: out-of-distribution feature sets.
        groups: name of a group (near, far) to names of its sets; averages are given for each, and
            for all.
        title: what is compared; stands above every table.
        notes: which data and weights, one line each; stand below every table.
        statistics: moments of the full training set, where `train` is only a part of it. Detectors
            that ask for means and covariances get these; percentiles and neighbours come from
            `train`, and their rows say so.
        validation: ID features apart from `train` and `test`, with labels, for what must not be
            learnt from data that the network was trained on: a temperature, or the p-values of an
            ensemble's members.
        forward: times the network's forward pass at a batch size, for the share of it that a score
            takes.
        positive: the convention of FPR: "id" as in the paper, "ood" as in OpenOOD.
        warnings: sentences that stand in front of every table.
        class_names: in the order of the labels.

    >>> generator = torch.Generator().manual_seed(0)
    >>> head = Head(torch.eye(3), torch.zeros(3))
    >>> inside = FeatureSet("inside", 3 * torch.eye(3).repeat(40, 1) + torch.rand(120, 3, generator=generator))
    >>> outside = FeatureSet("outside", torch.rand(60, 3, generator=generator))
    >>> results = Benchmark(head, inside, inside, [outside]).run(["fdbd", "msp"], latency=False)
    >>> results.row("fdbd").evaluations["outside"].auroc > 0.9
    True
    """

    head: Head
    train: FeatureSet
    test: FeatureSet
    ood: Sequence[FeatureSet]
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    title: str = ""
    notes: Sequence[str] = ()
    statistics: ClassMoments | None = None
    validation: FeatureSet | None = None
    forward: Callable[[int], Latency] | None = None
    positive: Literal["id", "ood"] = "id"
    warnings: Sequence[str] = ()
    class_names: Sequence[str] = ()

    def __post_init__(self) -> None:
        names = [samples.name for samples in self.ood]
        if not names:
            raise ValueError("a benchmark needs at least one out-of-distribution set")
        if len({self.test.name, *names}) < len(names) + 1:
            raise ValueError(f"datasets need names of their own, got {[self.test.name, *names]}")
        if unknown := {name for members in self.groups.values() for name in members} - set(names):
            raise ValueError(
                f"groups name {', '.join(sorted(unknown))}, which are not among the OOD sets"
            )
        for samples in (self.train, self.test, *self.ood, self.validation or self.train):
            if samples.features.ndim != 2 or samples.features.shape[1] != self.head.num_features:
                raise ValueError(
                    f"features of {samples.name} have shape {tuple(samples.features.shape)}, "
                    f"expected (N, {self.head.num_features}): the head's input"
                )

    def run(
        self,
        detectors: Iterable[str | Detector] | Mapping[str, str | Detector] | None = None,
        *,
        latency: bool = True,
        progress: bool = True,
    ) -> Results:
        """Fit, score and evaluate each detector.

        Args:
            detectors: names or detectors, perhaps by the title of their row; None: every one that
                works on the features at hand, and the shaping combinations.
            latency: also time the score stage, and the network's forward pass where `forward` is
                given.
            progress: show a bar when it takes more than two seconds.
        """
        notes = list(self.notes)
        if detectors is None:
            names = default_detectors()
            detectors = [
                name for name in names if self.validation or not create(name).needs.heldout
            ]
            if left_out := [name for name in names if name not in detectors]:
                notes.append(
                    f"Left out, since there are no validation data: {', '.join(left_out)}."
                )
        if not isinstance(detectors, Mapping):
            detectors = _by_name(detectors)
        if self.train.features.numel() >= WORTH_A_KERNEL:
            compile_kernels(
                self.head.weight.dtype
            )  # else the first fit's time would have the compiler in it
        items = track(detectors.items(), "comparing detectors", enabled=progress)
        rows = [self._row(name, item, latency) for name, item in items]
        return Results(
            self.setting(notes, self._time_forward() if latency else ()), rows, figures(self)
        )

    def _row(self, name: str, item: str | Detector, latency: bool) -> Row:
        try:
            detector = create(item) if isinstance(item, str) else item
            self._warm_up(detector)
            start = time.perf_counter()
            from_bank = self._fit(detector)
            seconds = time.perf_counter() - start
            with torch.inference_mode():
                scores = {
                    s.name: torch.cat([detector.score(b) for b in s.batches()])
                    for s in (self.test, *self.ood)
                }
            paper = detector.shaping.paper if isinstance(detector, Shaped) else detector.paper
            about = {
                "paper": None if paper is None else str(paper),
                "fit_seconds": seconds,
                "from_bank": from_bank,
            }
            timings = (
                [measure(detector, self.test, size) for size in BATCH_SIZES] if latency else []
            )
            return Row.of(name, scores, self.positive, latencies=timings, **about)
        except Exception as error:  # the others' results stand, whatever goes wrong in one
            return Row(name, error=" ".join(f"{type(error).__name__}: {error}".split()))

    def _warm_up(self, detector: Detector) -> None:
        """Fit a copy on a few rows, classes and features, so that the time of the fit has no
        compiler in it."""
        head = Head(self.head.weight[:16, :64], self.head.bias[:16])
        features = self.train.rows(slice(0, 512)).features[:, :64]
        batch = Batch(features, None, head(features).argmax(dim=1))
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit_detector(copy.deepcopy(detector), batch, head)

    def _fit(self, detector: Detector) -> bool:
        """Fit a detector on the data that are meant for it; whether it rests on the bank alone."""
        apart: Iterable[Batch] = self.validation or ()
        if self.validation is None and (detector.needs.heldout or isinstance(detector, Ensemble)):
            raise ValueError(
                f"{detector.label} learns from ID data that neither the network nor the fit has seen: give `validation`"
            )
        if detector.needs.heldout:
            fit_detector(detector, apart, self.head)
            return False
        full = _FullStatistics(self.statistics, self.train)
        fit_detector(detector, self.train, self.head, full)
        if isinstance(detector, Ensemble):
            detector.calibrate(apart)
        return full.used_bank

    def _time_forward(self) -> tuple[Latency, ...]:
        """The forward pass at the batch sizes of the scores, smaller where a call would take more
        than a second."""
        if self.forward is None:
            return ()
        single = self.forward(1)
        largest = int(1 / max(single.median, 1e-9))
        return tuple(
            single if size == 1 else self.forward(max(2, min(size, largest)))
            for size in BATCH_SIZES
        )

    def setting(self, notes: Sequence[str] = (), forward: tuple[Latency, ...] = ()) -> Setting:
        """What all rows of the results have in common."""
        accuracy = None
        if self.test.labels is not None:
            batches = (
                self.head(b.features) if b.logits is None else b.logits for b in self.test.batches()
            )
            predicted = torch.cat([logits.argmax(dim=1) for logits in batches])
            accuracy = int((predicted == self.test.labels).sum()) / max(len(self.test), 1)
        return Setting(
            title=self.title,
            notes=tuple(notes),
            positive=self.positive,
            num_classes=self.head.num_classes,
            num_features=self.head.num_features,
            num_train=len(self.train) if self.statistics is None else self.statistics.count,
            test=(self.test.name, len(self.test)),
            ood={samples.name: len(samples) for samples in self.ood},
            groups={name: tuple(members) for name, members in self.groups.items()},
            accuracy=accuracy,
            forward=forward,
            num_bank=None if self.statistics is None else len(self.train),
            warnings=tuple(self.warnings),
            class_names=tuple(self.class_names),
            samples={samples.name: samples.key for samples in (self.test, *self.ood)},
        )


class _FullStatistics:
    """Replaces the moments of the bank, which are the samples at hand, by those of the full
    training set, once a fit has summed them up.

    Means and covariances follow from the moments, also for the members of an ensemble and behind a
    shaping that leaves all samples of the bank as they are. Percentiles, neighbours and statistics
    of shaped features do not: they remain the bank's, and `used_bank` says so. Without moments
    (None) the bank is the full set.
    """

    def __init__(self, full: ClassMoments | None, bank: FeatureSet) -> None:
        self.full, self.bank = full, bank
        self.used_bank = False

    def __call__(self, statistic: Any) -> Any:
        """The statistic with the sums of the full training set, where they are known."""
        full = self.full
        if full is None or isinstance(statistic, Count):
            return statistic
        if isinstance(statistic, LayerMoments) and not statistic.layers:
            statistic.parts = [full]
        elif type(statistic) is Together:
            statistic.parts = [self(part) for part in statistic.parts]
        elif isinstance(statistic, Transformed) and all(
            torch.equal(statistic.transform(batch).features, batch.features)
            for batch in self.bank.batches()
        ):
            statistic.statistic = self(statistic.statistic)
        elif type(statistic) is Mean:
            statistic.count, statistic.total = full.count, full.mean() * full.count
        elif type(statistic) in (Moments, ClassMoments):
            statistic.count, statistic.average, statistic.scatter = (
                full.count,
                full.average,
                full.scatter,
            )
            if isinstance(statistic, ClassMoments):
                statistic.counts, statistic.totals = full.counts, full.totals
        else:
            self.used_bank = True
        return statistic


def _by_name(detectors: Iterable[str | Detector]) -> dict[str, str | Detector]:
    """Detectors by the title of their row: the registered name, the options that are not at their
    default, and a number where another has the same title."""
    found: dict[str, str | Detector] = {}
    seen: Counter[str] = Counter()
    for item in detectors:
        name = item if isinstance(item, str) else item.label
        if not isinstance(item, str):
            defaults = {
                key: parameter.default
                for key, parameter in inspect.signature(type(item)).parameters.items()
            }
            options = {
                k: v for k, v in item.options().items() if not isinstance(v, (Configured, list))
            }
            changed = ", ".join(
                f"{key}={value}" for key, value in options.items() if value != defaults[key]
            )
            name += f" ({changed})" if changed else ""
        seen[name] += 1
        found[name if seen[name] == 1 else f"{name} #{seen[name]}"] = item
    return found


def measure(
    detector: Detector, samples: FeatureSet, batch_size: int, budget: float = 0.15
) -> Latency:
    """Time `detector.score` on batches of the samples with their logits at hand, for about `budget`
    seconds.

    Logits are part of the forward pass of any classifier, so computing them is not charged to the
    detector.
    """
    last = max(len(samples) - batch_size, 0)
    batches = [
        samples.rows(slice(start, start + batch_size))
        for start in range(0, min(last + 1, 4096), 256)
    ]
    batches = [
        b if b.logits is not None else b._replace(logits=detector.head(b.features)) for b in batches
    ]
    count = len(batches[0].features)
    return Latency.of(batch_size, timed(detector.score, batches, count, budget, fewest=7))


def measure_forward(
    network: Classifier, side: int, batch_size: int, budget: float = 0.5, fewest: int = 3
) -> Latency:
    """Time the network's forward pass on images of zeros, (3, side, side) each, where it is, for
    about `budget` seconds and at least `fewest` calls."""
    images = torch.zeros(batch_size, 3, side, side, device=device_of(network.model))
    return Latency.of(batch_size, timed(network, [images], batch_size, budget, fewest))


def choose_batch_size(network: Classifier, side: int) -> int:
    """Images per forward pass: the fastest per image of a few sizes, each tried once after a
    warm-up. A larger one is not tried where the last was no gain, so that slow networks are not
    held up."""
    timings = (measure_forward(network, side, size, budget=0, fewest=2) for size in (8, 32, 128))
    best = next(timings)
    for timing in timings:
        if timing.median > 0.95 * best.median:
            break
        best = timing
    return best.batch_size


@torch.inference_mode()
def timed(
    call: Callable[[Any], Any], inputs: Sequence[Any], count: int, budget: float, fewest: int
) -> list[float]:
    """Seconds per sample of each call on `count` samples, for about `budget` seconds, after one
    that does not count."""

    def run(number: int) -> float:
        start = time.perf_counter()
        output = call(inputs[number % len(inputs)])
        values = output.features if isinstance(output, Batch) else output
        if values.device.type != "cpu":  # wait for a device that computes on its own
            values.flatten()[:1].cpu()
        return (time.perf_counter() - start) / count

    run(0)
    found: list[float] = []
    end = time.perf_counter() + budget
    while len(found) < fewest or (time.perf_counter() < end and len(found) < 2000):
        found.append(run(len(found)))
    return found
