"""Benchmark: all detectors on the same features, in one process; the failure of one leaves the
others' results."""

from __future__ import annotations

import contextlib
import copy
import inspect
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fdbd.bench.collapse import collapse_ratio
from fdbd.bench.figures import figures
from fdbd.bench.results import Results
from fdbd.bench.rows import Latency, Published, Row, Setting
from fdbd.bench.timing import BATCH_SIZES, time_score
from fdbd.bench.tuning import Grid, tune
from fdbd.core.batch import Batch, Head
from fdbd.core.configuration import registered
from fdbd.data.features import FeatureSet
from fdbd.data.images import spread_evenly
from fdbd.decision.choice import AUTO, FEWEST, Auto, choose_members
from fdbd.decision.choice_samples import pseudo_ood
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
from fdbd.util.progress import track
from fdbd.util.terminal import one_line

Contender = str | Detector | Auto
"""What can have a row: a detector, its name, or the options of "auto"."""


def default_detectors() -> list[str]:
    """Names of every detector that features and logits suffice for, then each shaping before Energy
    and fDBD.

    >>> "react+fdbd" in default_detectors()
    True
    """
    found = [name for name in list_detectors(shapings=False) if not _needs_network(name)]
    for detector in ("energy", "fdbd"):
        for shaping in list_shapings():
            # Logits that are scaled by one number have the same argmax, and fDBD the same score.
            is_fdbd_again = (shaping, detector) == ("lts", "fdbd")
            if not _needs_network(shaping) and not is_fdbd_again:
                found.append(f"{shaping}+{detector}")
    return found


def _needs_network(name: str) -> bool:
    return registered()[name].needs.network


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
        statistics: moments of the full training set, if `train` is only a part of it. Detectors
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
        shifted: covariate-shifted ID sets, which count as ID in the full-spectrum measures.
        ood_validation: OOD features apart from `ood`, for choosing options (`tune`).
        grids: options to choose from by detector, as `run` takes them with ``tuned=True``.
        kinds: makes pseudo-OOD samples of held-out ones and gives their features by kind, for
            "auto"; None: there are no images to make them of, and its members have equal weights.
        published: what others have published for exactly this benchmark.

    >>> generator = torch.Generator().manual_seed(0)
    >>> head = Head(torch.eye(3), torch.zeros(3))
    >>> corners = 3 * torch.eye(3).repeat(40, 1)
    >>> inside = FeatureSet("inside", corners + torch.rand(120, 3, generator=generator))
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
    shifted: Sequence[FeatureSet] = ()
    ood_validation: FeatureSet | None = None
    grids: Mapping[str, Grid] = field(default_factory=dict)
    kinds: Callable[[Auto], Mapping[str, FeatureSet]] | None = None
    published: Published | None = None

    def __post_init__(self) -> None:
        if not self.ood:
            raise ValueError("a benchmark needs at least one out-of-distribution set")
        names = [samples.name for samples in self.scored]
        if len(set(names)) < len(names):
            raise ValueError(f"datasets need names of their own, got {names}")
        known = {samples.name for samples in self.ood}
        for members in self.groups.values():
            for name in members:
                if name not in known:
                    raise ValueError(f"groups name {name}, which is not among the OOD sets")
        for samples in self.all_sets:
            if samples.features.ndim != 2 or samples.features.shape[1] != self.head.num_features:
                raise ValueError(
                    f"features of {samples.name} have shape {tuple(samples.features.shape)}, "
                    f"expected (N, {self.head.num_features}): the head's input"
                )

    @property
    def scored(self) -> list[FeatureSet]:
        """The sets that detectors score: the ID set, the OOD sets, the shifted sets."""
        return [self.test, *self.ood, *self.shifted]

    @property
    def all_sets(self) -> list[FeatureSet]:
        """Every set of features."""
        found = [self.train, *self.scored]
        for samples in (self.validation, self.ood_validation):
            if samples is not None:
                found.append(samples)
        return found

    def run(
        self,
        detectors: Iterable[Contender] | Mapping[str, Contender] | None = None,
        *,
        latency: bool = True,
        progress: bool = True,
        tuned: bool = False,
    ) -> Results:
        """Fit, score and evaluate each detector.

        Args:
            detectors: names or detectors, perhaps by the title of their row; "auto" or an `Auto`
                among them chooses and weighs several on `validation`. None: every one that works on
                the features at hand, the shaping combinations, and "auto".
            latency: also time the score stage, and the network's forward pass if `forward` is
                given.
            progress: show a bar when it takes more than two seconds.
            tuned: choose the options of the detectors in `grids` by AUROC of `validation` against
                `ood_validation`; their rows say what was chosen.
        """
        notes = list(self.notes)
        if detectors is None:
            detectors = self._usable_detectors(notes)
        if not isinstance(detectors, Mapping):
            detectors = by_title(detectors)
        if tuned and (self.validation is None or self.ood_validation is None):
            raise ValueError("tuning takes ID and OOD validation sets, and this benchmark has none")
        if self.train.features.numel() >= WORTH_A_KERNEL:
            # Otherwise the first fit's time would include the compiler's.
            compile_kernels(self.head.weight.dtype)
        rows = []
        for title, item in track(detectors.items(), "comparing detectors", enabled=progress):
            rows.append(self._row(title, item, latency, tuned))
        forward = self._time_forward() if latency else ()
        return Results(self.setting(notes, forward), rows, partial(figures, self))

    def _usable_detectors(self, notes: list[str]) -> list[str]:
        """The default detectors that the data suffice for; a note names the others."""
        usable = []
        left_out = []
        for name in default_detectors():
            if create(name).needs.heldout and self.validation is None:
                left_out.append(name)
            else:
                usable.append(name)
        if self.validation is None or len(self.validation) < FEWEST:
            left_out.append(AUTO)
        else:
            usable.append(AUTO)
        if left_out:
            notes.append(f"Left out, since there are no validation data: {', '.join(left_out)}.")
        return usable

    def _row(self, title: str, item: Contender, latency: bool, tuned: bool) -> Row:
        """One detector's row; the others' results stand, whatever goes wrong in one."""
        try:
            if item == AUTO:
                item = Auto()
            if isinstance(item, Auto):
                return self._auto_row(title, item, latency)
            if tuned and title in self.grids:
                detector, options = self._tuned(title)
                return self._fitted_row(title, detector, latency, options)
            detector = create(item) if isinstance(item, str) else item
            return self._fitted_row(title, detector, latency, "")
        except Exception as error:
            return Row(title, error=f"{type(error).__name__}: {one_line(error)}")

    def _tuned(self, name: str) -> tuple[Detector, str]:
        """The detector with those options of its grid that best tell the validation sets apart, and
        these options in words."""
        assert self.validation is not None
        assert self.ood_validation is not None
        with warnings.catch_warnings():
            # Warnings about the fits that are tried may not hold for the one that is kept.
            warnings.simplefilter("ignore", UserWarning)
            return tune(name, self.grids[name], self._fit, self.validation, self.ood_validation)

    def _auto_row(self, title: str, auto: Auto, latency: bool) -> Row:
        """The row of several detectors, chosen and weighed on `validation`."""
        if self.validation is None:
            raise ValueError(
                f"{AUTO!r} weighs detectors by ID data that neither the network nor the fit has "
                "seen: give `validation`"
            )
        count = min(auto.held_out, len(self.validation))
        rows = torch.from_numpy(spread_evenly(count, len(self.validation)))
        held_out = self.validation.rows(rows)
        kinds = self._pseudo_ood(auto, held_out)
        pool = auto.make_pool(len(kinds) > 0, len(self.train))
        self._warm_up(pool)
        start = time.perf_counter()
        full = _FullStatistics(self.statistics, self.train)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", UserWarning)
            fit_detector(pool, self.train, self.head, full)
            detector, choice = choose_members(pool, held_out, kinds, auto)
        seconds = time.perf_counter() - start
        notes = [note.rstrip(".") for note in choice.notes]
        return self._scored_row(
            title,
            detector,
            latency,
            paper=None,
            fit_seconds=seconds,
            from_bank=full.used_bank,
            warnings=(*_texts_of(said), *notes),
            chosen=choice.summary,
        )

    def _pseudo_ood(self, auto: Auto, held_out: Batch) -> dict[str, Batch]:
        """Features of pseudo-OOD samples by kind; none if they cannot be made."""
        if auto.kinds is not None:
            return pseudo_ood(None, held_out, auto)
        if self.kinds is None:
            return {}
        found = self.kinds(auto)
        return {kind: samples.rows(slice(None)) for kind, samples in found.items()}

    def _fitted_row(self, title: str, detector: Detector, latency: bool, options: str) -> Row:
        self._warm_up(detector)
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", UserWarning)
            from_bank = self._fit(detector)
        seconds = time.perf_counter() - start
        paper = detector.shaping.paper if isinstance(detector, Shaped) else detector.paper
        return self._scored_row(
            title,
            detector,
            latency,
            paper=None if paper is None else str(paper),
            fit_seconds=seconds,
            from_bank=from_bank,
            warnings=_texts_of(said),
            tuned=options,
        )

    def _scored_row(self, title: str, detector: Detector, latency: bool, **about: Any) -> Row:
        """The row of a fitted detector; `about` are further attributes."""
        scores = {samples.name: score_all(detector, samples) for samples in self.scored}
        timings = []
        if latency:
            timings = [time_score(detector, self.test, size) for size in BATCH_SIZES]
        return Row.from_scores(
            title,
            scores[self.test.name],
            {samples.name: scores[samples.name] for samples in self.ood},
            self.positive,
            shifted_scores={samples.name: scores[samples.name] for samples in self.shifted},
            latencies=timings,
            **about,
        )

    def _warm_up(self, detector: Detector) -> None:
        """Fit a copy on a few rows, classes and features, so that the time of the fit does not
        include what is only done once per process, such as compilation."""
        head = Head(self.head.weight[:16, :64], self.head.bias[:16])
        features = self.train.rows(slice(0, 512)).features[:, :64]
        batch = Batch(features, None, head(features).argmax(dim=1))
        # An error of so small a fit says nothing about the real one.
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit_detector(copy.deepcopy(detector), batch, head)

    def _fit(self, detector: Detector) -> bool:
        """Fit a detector on the data that are meant for it. Returns whether anything that it has
        learnt comes from the bank instead of the full training set."""
        learns_apart = detector.needs.heldout or isinstance(detector, Ensemble)
        if learns_apart and self.validation is None:
            raise ValueError(
                f"{detector.label} learns from ID data that neither the network nor the fit has "
                "seen: give `validation`"
            )
        if detector.needs.heldout:
            assert self.validation is not None
            fit_detector(detector, self.validation, self.head)
            return False
        full = _FullStatistics(self.statistics, self.train)
        fit_detector(detector, self.train, self.head, full)
        if isinstance(detector, Ensemble):
            assert self.validation is not None
            detector.calibrate(self.validation)
        return full.used_bank

    def _time_forward(self) -> tuple[Latency, ...]:
        """The forward pass at the batch sizes of the scores, smaller if a call would take more than
        a second."""
        if self.forward is None:
            return ()
        single = self.forward(1)
        largest = int(1 / max(single.median, 1e-9))
        timings = [single]
        for size in BATCH_SIZES[1:]:
            timings.append(self.forward(max(2, min(size, largest))))
        return tuple(timings)

    def setting(self, notes: Sequence[str] = (), forward: tuple[Latency, ...] = ()) -> Setting:
        """What all rows of the results have in common."""
        correct = self.correct_predictions()
        accuracy = None
        if correct is not None:
            accuracy = int(correct.sum()) / max(len(correct), 1)
        num_train = len(self.train)
        num_bank = None
        if self.statistics is not None:
            num_train = self.statistics.count
            num_bank = len(self.train)
        return Setting(
            title=self.title,
            notes=tuple(notes),
            positive=self.positive,
            num_classes=self.head.num_classes,
            num_features=self.head.num_features,
            num_train=num_train,
            test=(self.test.name, len(self.test)),
            ood={samples.name: len(samples) for samples in self.ood},
            groups={name: tuple(members) for name, members in self.groups.items()},
            accuracy=accuracy,
            forward=forward,
            num_bank=num_bank,
            warnings=tuple(self.warnings),
            class_names=tuple(self.class_names),
            samples={samples.name: samples.key for samples in self.scored},
            shifted={samples.name: len(samples) for samples in self.shifted},
            correct=None if correct is None else tuple(correct.tolist()),
            collapse=collapse_ratio(self.train, self.statistics),
            published=self.published,
        )

    def correct_predictions(self) -> Tensor | None:
        """(N,) whether the classifier is right on each ID sample; None without labels."""
        if self.test.labels is None:
            return None
        predicted = []
        for batch in self.test.batches():
            logits = self.head(batch.features) if batch.logits is None else batch.logits
            predicted.append(logits.argmax(dim=1))
        return torch.cat(predicted) == self.test.labels


def score_all(detector: Detector, samples: FeatureSet) -> Tensor:
    """(N,) scores of a set."""
    with torch.inference_mode():
        return torch.cat([detector.score(batch) for batch in samples.batches()])


def _texts_of(said: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    """What was said, each sentence once, without the final stop."""
    texts = []
    for each in said:
        message = each.message
        text = one_line(message) if isinstance(message, Warning) else message
        texts.append(text.rstrip("."))
    return tuple(dict.fromkeys(texts))


class _FullStatistics:
    """Gives a fit on the bank, which is a part of the training set, the moments of the full set.

    Means and covariances follow from the moments, also for the members of an ensemble and behind a
    shaping that leaves all samples of the bank as they are. Percentiles, neighbours and statistics
    of shaped features do not: they remain the bank's, and `used_bank` says so.

    Args:
        full: the moments; None: the bank is the full set.
    """

    def __init__(self, full: ClassMoments | None, bank: FeatureSet) -> None:
        self.full = full
        self.bank = bank
        self.used_bank = False

    def __call__(self, summed: Together) -> Together:
        """What the fit goes on with after it has summed up the bank (`fit_detector`)."""
        if self.full is None:
            return summed
        parts = [self._of_full_set(part, self.full) for part in summed.parts]
        return Together(parts)

    def _of_full_set(self, summed: Any, full: ClassMoments) -> Any:
        """The statistic of the full set if it follows from the moments, else that of the bank."""
        # `type`, not `isinstance`: a subclass may hold more than follows from the moments.
        kind = type(summed)
        if kind is Count:
            # A fit only asks a count whether there are samples.
            return summed
        if kind is Mean:
            mean = Mean(len(full.mean()))
            mean.count = full.count
            mean.total = full.mean() * full.count
            return mean
        if kind is Moments or kind is ClassMoments:
            return full
        if kind is Together:
            parts = [self._of_full_set(part, full) for part in summed.parts]
            return Together(parts)
        if kind is LayerMoments and not summed.layers:
            moments = LayerMoments(summed.num_classes, ())
            moments.parts = [full]
            moments.has_adversarial = summed.has_adversarial
            return moments
        if kind is Transformed and self._leaves_bank_as_it_is(summed):
            inner = self._of_full_set(summed.statistic, full)
            return Transformed(inner, summed.transform, summed.rows)
        self.used_bank = True
        return summed

    def _leaves_bank_as_it_is(self, statistic: Transformed[Any]) -> bool:
        for batch in self.bank.batches():
            if not torch.equal(statistic.transform(batch).features, batch.features):
                return False
        return True


def by_title(detectors: Iterable[Contender]) -> dict[str, Contender]:
    """Detectors by the title of their row, with a number if another has the same title."""
    found: dict[str, Contender] = {}
    seen: Counter[str] = Counter()
    for item in detectors:
        if isinstance(item, str):
            title = item
        elif isinstance(item, Auto):
            title = AUTO
        else:
            title = title_of(item)
        seen[title] += 1
        if seen[title] > 1:
            title = f"{title} #{seen[title]}"
        found[title] = item
    return found


def title_of(detector: Detector) -> str:
    """The registered name, and the options that are not at their default."""
    parameters = inspect.signature(type(detector)).parameters
    changed = []
    for key, value in detector.options().items():
        # Members of ensembles and parts of compositions are in the name already.
        if isinstance(value, (Configured, list)):
            continue
        if value != parameters[key].default:
            changed.append(f"{key}={value}")
    if not changed:
        return detector.label
    return f"{detector.label} ({', '.join(changed)})"
