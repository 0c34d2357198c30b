"""The contract of a detector: ask for statistics, keep buffers, score batches.

A detector knows arrays, never models or loaders. The base class drives its fit, checks what it is given, and fails
closed: a row with a NaN or an infinity in what the detector reads scores −inf.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from fdbd import kernels
from fdbd.core.batch import Batch, Head, as_tensor
from fdbd.core.configuration import Configured, NotFittedError, Paper, Passes, from_config
from fdbd.fitting.statistics import Count, NonFiniteRow, check_finite

__all__ = ["Configured", "Detector", "NotFittedError", "Paper", "Passes", "fit_together", "from_config"]

_LARGE = {torch.float32: 1e15, torch.float64: 1e145}
"""Magnitudes whose squares, summed over any feature width, still fit the dtype."""

_NO_SAMPLES = "the training data hold no samples; give at least one non-empty batch"

_LOGITS_AT_A_TIME = 1 << 22
"""Logits that are computed for a fit at once: 16 MB, whatever the batch."""

_KINDS = ("cpu", "cuda")
"""Devices that autocast is known for."""


class Detector(Configured):
    """Scores how in-distribution a sample is: higher is more in-distribution.

    A subclass writes `passes` (what to learn from the training data) and `score` (what to say of a batch); the base
    class wraps `score` so that batches are checked and rows with non-finite numbers score −inf.
    """

    reads: ClassVar[tuple[str, ...]] = ("features",)
    """What `score` looks at: "features", "logits" or both. Missing logits are computed from the head."""
    fit_reads: ClassVar[tuple[str, ...] | None] = None
    """What the statistics look at; None: the same as `reads`."""
    needs_labels: ClassVar[bool] = False
    """Whether fitting needs Batch.labels."""
    needs_network: ClassVar[bool] = False
    """Whether the score needs the network's gradient or inner layers, so that only a Guard can give it."""
    fits_on_heldout: ClassVar[bool] = False
    """Whether it learns from data that the network was not trained on, so that training data mislead it."""
    one_pass: ClassVar[bool] = False
    """Whether `passes` asks for at most one statistic; a Guard sets features aside on disk for all others."""
    head_weight: Tensor
    head_bias: Tensor

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "score" in cls.__dict__ and not getattr(cls.__dict__["score"], "_checked", False):
            cls.score = _checked(cls.__dict__["score"])  # type: ignore[method-assign, assignment]

    def passes(self, head: Head) -> Passes:
        """Ask for statistics: ``m = yield Moments(P)`` suspends until m holds the sum over the training data."""
        return
        yield

    def score(self, batch: Batch) -> Tensor:
        """(N,) scores of a batch; higher is more in-distribution."""
        raise NotImplementedError(f"{type(self).__name__} defines no score")

    def fit(self, batches: Batch | Iterable[Batch], head: Head) -> Self:
        """Learn from training data: one Batch, or an iterable of batches that can be run through once a pass."""
        if self.needs_network:
            raise ValueError(
                f"{self.label} needs the network itself, not only its features: use it as "
                f"fdbd.Guard(model, {self.label!r}) and call fit on the guard"
            )
        fit_together([self], batches, head)
        return self

    def forward(self, batch: Batch) -> Tensor:
        return self.score(batch)

    @property
    def learns_from(self) -> tuple[str, ...]:
        """What its statistics look at: "features", "logits" or both."""
        return self.reads if self.fit_reads is None else self.fit_reads

    def network_batch(self, images: Any, classifier: Callable[[Any], Batch]) -> Batch:
        """What a Guard asks of a detector that `needs_network`, in fit and in scoring: the untouched model's Batch of
        these images, with whatever else the score rests on in ``Batch.views``."""
        return classifier(images)

    @property
    def label(self) -> str:
        """How `fdbd.create` spells this detector, such as "react+energy"."""
        return self.name or type(self).__name__

    def start(self, head: Head, dtype: torch.dtype | None = None) -> Passes:
        """Begin a fit: keep the head and return the running `passes`. Drivers call this, users call `fit`."""
        self.begin(head, dtype)
        return self.passes(head)

    def begin(self, head: Head, dtype: torch.dtype | None = None) -> None:
        """Keep the head and the dtype of the fit."""
        if head.num_classes < 2:
            raise ValueError(f"a detector needs at least two classes, the head has {head.num_classes}")
        self.fit_dtype = head.weight.dtype if dtype is None else torch.promote_types(head.weight.dtype, dtype)
        self.set(head_weight=head.weight, head_bias=head.bias)
        self._warm_up()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._warm_up()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._warm_up()  # a copy may wake up in another process

    def _warm_up(self) -> None:
        if self.is_fitted:
            self.warm_up(self.head_weight.dtype)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Have compiled what a score will need, so that no score waits for a compiler; a fit and a file do."""
        kernels.warm_up(dtype)

    @property
    def is_fitted(self) -> bool:
        """Whether `fit` or a file has filled the buffers."""
        return "head_weight" in self._buffers

    @property
    def head(self) -> Head:
        """The head this detector was fitted with."""
        self._require_fitted()
        head = Head.__new__(Head)  # checked when it was kept
        head.weight, head.bias, head.is_binary = self.head_weight, self.head_bias, False
        return head

    def example(self) -> Batch:
        """Two rows of zeros with all that a score reads, to try a fitted detector on."""
        weight = self.head_weight
        return Batch(weight.new_zeros(2, weight.shape[1]))

    def forget(self) -> None:
        """Drop everything that was learnt."""
        for module in self.modules():
            if isinstance(module, Configured):
                module._buffers.clear()

    def _require_fitted(self) -> None:
        if not self.is_fitted:
            raise NotFittedError(
                f"{type(self).__name__} is not fitted: call fit(batches, head), or load a fitted one from a file"
            )

    def prepare(self, batch: Batch) -> Batch:
        """The batch as `score` wants it: checked shapes, the detector's dtype, logits where it reads them."""
        self._require_fitted()
        weight = self._buffers.get("head_weight")  # as an attribute of a module it would cost a microsecond
        if weight is None:  # that of the detector inside
            weight = self.head_weight
        classes, width = weight.shape
        features = as_matrix(batch.features, width, "features", "the head's input", weight.dtype)
        logits = batch.logits
        if "logits" in self.reads:
            if logits is None:
                logits = kernels.linear(features, weight, self.head_bias)
            else:
                logits = as_matrix(logits, classes, "logits", "the head's classes", weight.dtype)
        if isinstance(logits, Tensor) and logits.shape[0] != features.shape[0]:
            raise ValueError(f"{features.shape[0]} rows of features but {logits.shape[0]} rows of logits")
        if batch.layers is not None or batch.views is not None:
            layers = batch.layers and {name: as_tensor(part).to(weight.dtype) for name, part in batch.layers.items()}
            views = None if batch.views is None else as_tensor(batch.views).to(weight.dtype)
            return Batch(features, logits, batch.labels, layers, views)
        if features is batch.features and logits is batch.logits:
            return batch
        return batch._replace(features=features, logits=logits)

    def _fail_closed(self, given: Batch, batch: Batch, scores: Tensor) -> Tensor:
        """−inf for rows with non-finite input; rows too large for the dtype are scored in float64."""
        read = [getattr(batch, name) for name in ("features", "logits") if name in self.reads]
        limit = _LARGE[scores.dtype]
        if kernels.tracing():
            # Nobody can look, so nothing can be scored anew in float64. A comparison with NaN is false.
            within = [(values.abs() < limit).all(dim=1) for values in read]
            return torch.where(functools.reduce(torch.logical_and, within) & ~scores.isnan(), scores, -torch.inf)
        if all(_within(values.detach(), limit) for values in (*read, scores)):
            return scores
        largest = functools.reduce(torch.maximum, [magnitude(values.detach()) for values in read])
        # A comparison with NaN is false: this one catches NaN, infinities, overflow and merely large numbers at once.
        doubtful = ~((largest < limit) & torch.isfinite(scores.detach()))
        if not doubtful.any():
            return scores
        finite = self._rows_finite(given)
        scores = torch.where(finite, scores, -torch.inf)
        rescue = (doubtful & finite).nonzero()[:, 0]
        if batch.features.dtype == torch.float64 or not len(rescue):
            return torch.where(scores.isnan(), -torch.inf, scores)
        exact = copy.deepcopy(self).double().score(take(given, rescue, torch.float64))
        limits = torch.finfo(scores.dtype)
        exact = torch.where(exact.isinf(), exact, exact.clamp(limits.min, limits.max))
        return scores.index_copy(0, rescue, exact.to(scores.dtype))

    def _rows_finite(self, given: Batch) -> Tensor:
        """(N,) whether all numbers that the score rests on are finite, in the dtype in which they were given."""
        parts = []
        if "features" in self.reads or given.logits is None:
            parts.append(as_tensor(given.features))
        if "logits" in self.reads and given.logits is not None:
            parts.append(as_tensor(given.logits))
        return functools.reduce(torch.logical_and, [torch.isfinite(part).all(dim=1) for part in parts])


def _checked(score: Callable[[Any, Batch], Tensor]) -> Callable[[Any, Batch], Tensor]:
    """`score` with its batch prepared before and non-finite rows closed after."""

    @functools.wraps(score)
    def checked(self: Detector, batch: Batch) -> Tensor:
        prepared = self.prepare(batch)
        if not kernels.tracing() and not prepared.features.shape[0]:
            return prepared.features.new_zeros(0)
        return self._fail_closed(batch, prepared, score(self, prepared))

    return closes_itself(checked)


def closes_itself(score: Callable[[Any, Batch], Tensor]) -> Callable[[Any, Batch], Tensor]:
    """Marks a `score` that prepares its batch and handles non-finite rows without the base class. Under autocast it
    still computes in the dtype of the fit: mixed precision is for the network."""

    @functools.wraps(score)
    def exact(self: Detector, batch: Batch) -> Tensor:
        if not autocasts():
            return score(self, batch)
        with full_precision():
            return score(self, batch)

    exact._checked = True  # type: ignore[attr-defined]
    return exact


def autocasts() -> bool:
    """Whether operations choose their precision by themselves now; a graph under construction has none of that."""
    return any(map(torch.is_autocast_enabled, _KINDS)) and not kernels.tracing()


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Operations keep the dtype of their arguments, whatever autocast surrounds them."""
    with contextlib.ExitStack() as without:
        if autocasts():
            for kind in filter(torch.is_autocast_enabled, _KINDS):
                without.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """A fit's own arithmetic, whatever surrounds it: no autocast, and new tensors in the CPU's memory."""
    with full_precision(), contextlib.ExitStack() as at_home:
        if torch.get_default_device().type != "cpu":
            at_home.enter_context(torch.device("cpu"))
        yield


def as_matrix(values: Any, width: int, what: str, expected: str, dtype: torch.dtype | None = None) -> Tensor:
    """A real (N, width) tensor of this dtype, or of at least float32, from a tensor or an array."""
    matrix = as_tensor(values)
    shape = matrix.shape
    if len(shape) != 2 or shape[1] != width:
        raise ValueError(f"{what} have shape {tuple(shape)}, expected (N, {width}): {expected}")
    if matrix.dtype is dtype:
        return matrix
    if matrix.is_complex():
        raise TypeError(f"{what} are complex, expected real numbers")
    if dtype is None:
        dtype = torch.float64 if matrix.dtype == torch.float64 else torch.float32
    return matrix.to(dtype)


def _within(values: Tensor, limit: float) -> bool:
    """Whether all values lie within ±limit, and none is NaN: ten times as fast as a look at each row."""
    if not values.numel():
        return True
    low, high = torch.aminmax(values)
    return low.item() > -limit and high.item() < limit


def magnitude(values: Tensor) -> Tensor:
    """(N,) largest absolute value of each row of (N, D); NaN where the row holds one."""
    return torch.maximum(values.amax(dim=1), -values.amin(dim=1))


def rows_of(batch: Batch, start: int, stop: int) -> Batch:
    """Rows from start to stop of a batch of tensors, without a copy."""
    logits, labels = (None if part is None else part[start:stop] for part in batch[1:3])
    layers = batch.layers and {name: part[start:stop] for name, part in batch.layers.items()}
    views = None if batch.views is None else batch.views[:, start:stop]
    return Batch(batch.features[start:stop], logits, labels, layers, views)


def take(batch: Batch, rows: Tensor, dtype: torch.dtype) -> Batch:
    """Some rows of a batch, in another dtype."""
    logits = None if batch.logits is None else as_tensor(batch.logits)[rows].to(dtype)
    layers = None if batch.layers is None else {name: part[rows].to(dtype) for name, part in batch.layers.items()}
    views = None if batch.views is None else batch.views[:, rows].to(dtype)
    return Batch(as_tensor(batch.features)[rows].to(dtype), logits, None, layers, views)


def fit_together(
    detectors: Sequence[Detector],
    batches: Batch | Iterable[Batch],
    head: Head,
    combine: Callable[[Any], Any] | None = None,
) -> None:
    """Fit several detectors on the same data, each pass over the data serving all that still ask for one.

    Args:
        detectors: unfitted or fitted before; all are fitted anew.
        batches: one Batch, or an iterable that starts anew with each pass.
        head: the linear head.
        combine: merges a statistic over processes that each see a shard of the data (`fdbd.fitting.distributed`).
    """
    data = [batches] if isinstance(batches, Batch) else batches
    first = _Peek(data)
    if not first.head and combine is None:  # of several processes, one may have nothing
        for detector in detectors:
            detector.forget()
        raise ValueError(_NO_SAMPLES)
    source: Iterable[Batch] | None = first.first_pass()

    def sum_up(statistics: list[Any], asking: list[Detector]) -> list[Any]:
        nonlocal source
        batches = source if source is not None else first.another_pass([type(detector).__name__ for detector in asking])
        source = None
        update_all(statistics, batches, head, asking)
        return statistics if combine is None else [combine(statistic) for statistic in statistics]

    fit_by(sum_up, detectors, head, first.dtype)


def fit_by(
    sum_up: Callable[[list[Any], list[Detector]], list[Any]],
    detectors: Sequence[Detector],
    head: Head,
    dtype: torch.dtype,
) -> None:
    """Fit detectors on data that only `sum_up` can reach.

    Args:
        sum_up: called once a pass with empty statistics and the detectors that ask for them; returns the statistics of
            all training data, in the same order. `update_all` does that for one shard, and shards merge.
        detectors: unfitted or fitted before; all are fitted anew.
        head: the linear head.
        dtype: of the features.
    """
    running: dict[int, tuple[Passes, Any]] = {}
    device, head = head.weight.device, head.cpu()
    try:
        for index, detector in enumerate(detectors):
            with undisturbed():
                program = detector.start(head, dtype)
            _advance(running, index, program, None)
        while running:
            asked = [Count(), *(statistic for _, statistic in running.values())]
            seen, *sums = sum_up(asked, [detectors[index] for index in running])
            if not seen.count:
                raise ValueError(_NO_SAMPLES)
            for (index, (program, _)), statistic in zip(list(running.items()), sums):
                _advance(running, index, program, statistic)
        if device.type != "cpu":  # sums are taken there, scores where the model is
            for detector in detectors:
                detector.to(device)
    except BaseException:
        for detector in detectors:
            detector.forget()  # half fitted is not fitted
        raise


def update_all(statistics: list[Any], batches: Iterable[Batch], head: Head, asking: Sequence[Detector]) -> None:
    """Add batches of training data to the statistics that these detectors ask for, each batch checked before."""
    # A sum that meets NaN shows it: where every statistic tells by itself, the features are read only once.
    look = not all(getattr(statistic, "finds_non_finite", False) for statistic in statistics)
    head = head.cpu()
    for number, batch in enumerate(batches):
        with undisturbed():
            batch = check_training_batch(batch, number, head, asking, look)
            if not any("logits" in detector.learns_from for detector in asking):
                _update(statistics, batch, number)
                continue
            rows = max(1024, _LOGITS_AT_A_TIME // head.num_classes)
            for start in range(0, batch.features.shape[0], rows):
                piece = rows_of(batch, start, start + rows)
                logits = head(piece.features) if piece.logits is None else piece.logits
                with named_row(number, start):
                    _check_logits(logits, piece)
                _update(statistics, piece._replace(logits=logits), number, start)


def _check_logits(logits: Tensor, batch: Batch) -> None:
    try:
        check_finite(logits, "its logits")
    except NonFiniteRow:
        if batch.logits is None:  # they follow from the features, which are to blame
            check_finite(batch.features, "its features")
        raise


def _advance(running: dict[int, tuple[Passes, Any]], index: int, program: Passes, statistic: Any) -> None:
    try:
        with undisturbed():
            running[index] = (program, program.send(statistic))
    except StopIteration:
        running.pop(index, None)


def _update(statistics: list[Any], batch: Batch, number: int, start: int = 0) -> None:
    with named_row(number, start):
        for statistic in statistics:
            statistic.update(batch)


@contextlib.contextmanager
def named_row(number: int, start: int = 0) -> Iterator[None]:
    """Completes a `NonFiniteRow` with the number of the batch, of which rows from `start` on are looked at."""
    try:
        yield
    except NonFiniteRow as error:
        raise ValueError(
            f"batch {number}, row {start + error.row}: {error.what} hold NaN or infinity; remove the sample or repair "
            "the model, a detector cannot learn from it"
        ) from None


class _Peek:
    """Batches that are looked at before the first pass, without losing one of a one-shot iterator."""

    def __init__(self, data: Iterable[Batch]) -> None:
        self.data = data
        self.iterator = iter(data)
        self.head: list[Batch] = []
        for batch in self.iterator:
            self.head.append(as_batch(batch))
            break

    @property
    def dtype(self) -> torch.dtype:
        if not self.head:
            return torch.float32
        dtype = as_tensor(self.head[0].features).dtype
        return torch.float64 if dtype == torch.float64 else torch.float32

    def first_pass(self) -> Iterator[Batch]:
        yield from self.head
        self.head = []
        yield from self.iterator

    def another_pass(self, names: list[str]) -> Iterable[Batch]:
        if iter(self.data) is self.data:
            raise ValueError(
                f"{', '.join(names)} needs another pass over the training data, but a one-shot iterator is used up: "
                "give a list of batches, one Batch, or an object whose __iter__ starts anew"
            )
        return self.data


def as_batch(value: Any) -> Batch:
    """A Batch, or an error that says what came instead."""
    if not isinstance(value, Batch):
        raise TypeError(f"expected fdbd.Batch(features, logits, labels), got {type(value).__name__}")
    return value


def check_training_batch(
    batch: Batch, number: int, head: Head, detectors: Sequence[Detector], look: bool = True
) -> Batch:
    """A batch fit for the statistics of these detectors, on the CPU, with its shapes, labels and features checked.
    Without `look` the search for non-finite features is left to the statistics."""
    batch = as_batch(batch).cpu()
    features = as_matrix(batch.features, head.num_features, f"features of batch {number}", "the head's input")
    logits = batch.logits
    if logits is not None:
        logits = as_matrix(logits, head.num_classes, f"logits of batch {number}", "the head's classes")
        if logits.shape[0] != features.shape[0]:
            raise ValueError(
                f"batch {number} has {features.shape[0]} rows of features but {logits.shape[0]} rows of logits"
            )
    labels = batch.labels
    if labels is not None:
        labels = check_labels(labels, features.shape[0], head.num_classes, number)
    elif any(detector.needs_labels for detector in detectors):
        names = ", ".join(type(detector).__name__ for detector in detectors if detector.needs_labels)
        raise ValueError(f"{names} needs labels to fit, batch {number} has none: give Batch(features, logits, labels)")
    if look and (logits is None or any("features" in detector.learns_from for detector in detectors)):
        with named_row(number):
            check_finite(features, "its features")
    return batch._replace(features=features.detach(), logits=logits, labels=labels)


def check_labels(labels: Any, rows: int, num_classes: int, number: int) -> Tensor:
    """(N,) integer labels within the head's classes."""
    labels = as_tensor(labels)
    if labels.shape != (rows,):
        raise ValueError(f"labels of batch {number} have shape {tuple(labels.shape)}, expected ({rows},)")
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"labels of batch {number} are {labels.dtype}, expected integers")
    if rows and (int(labels.min()) < 0 or int(labels.max()) >= num_classes):
        raise ValueError(
            f"labels of batch {number} range from {int(labels.min())} to {int(labels.max())}, "
            f"expected 0 to {num_classes - 1}"
        )
    return labels  # type: ignore[no-any-return]
