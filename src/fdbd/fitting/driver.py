"""The driver of passes. A detector's `passes` is a generator that yields empty statistics; a driver
sums them over the training data and sends them back. `fit_detector` sums in this process, `fit_by`
wherever its caller does."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from fdbd.core.batch import Batch, Head, as_batch, as_matrix, as_tensor, unit_rows
from fdbd.core.configuration import Needs, Passes
from fdbd.fitting.statistics import Count, NonFiniteRow, Together, check_finite
from fdbd.kernels import survive_forks
from fdbd.util.torch_compat import undisturbed

_NO_SAMPLES = (
    "the training data hold no samples; give at least one non-empty batch, and of maps at least "
    "one position whose label is a class (others, such as 255, are left out)"
)


class Learner(Protocol):
    """A detector, as the driver of its fit sees it."""

    needs: Needs

    def _start_fit(self, head: Head, dtype: torch.dtype | None = None) -> Passes: ...

    def _forget(self) -> None: ...

    def to(self, device: torch.device) -> Any: ...


def fit_detector(
    detector: Learner,
    batches: Batch | Iterable[Batch],
    head: Head,
    combine: Callable[[Together], Together] | None = None,
) -> None:
    """Fit a detector on one Batch, or on an iterable that restarts with each pass. `combine` merges
    the statistics of processes that each see a shard of the data (`over_processes`)."""
    detector._forget()
    data = _TrainingData(batches, type(detector).__name__)
    # One of several processes may have no data.
    if data.first is None and combine is None:
        raise ValueError(_NO_SAMPLES)

    def sum_up(statistics: Together) -> Together:
        add_batches(statistics, data.next_pass(), head, detector)
        return statistics if combine is None else combine(statistics)

    fit_by(sum_up, detector, head, data.dtype())


class _TrainingData:
    """Batches that are gone through once per pass. The first is looked at before the first pass, to
    learn the dtype, and a one-shot iterator is refused only when a second pass is asked for."""

    def __init__(self, batches: Batch | Iterable[Batch], used_by: str) -> None:
        self._used_by = used_by
        self._data = [batches] if isinstance(batches, Batch) else batches
        self._iterator = iter(self._data)
        self._is_one_shot = self._iterator is self._data
        self._passes = 0
        self.first: Batch | None = None
        for batch in self._iterator:
            self.first = as_batch(batch)
            break

    def dtype(self) -> torch.dtype:
        """float64 if the first features are, else float32."""
        if self.first is None:
            return torch.float32
        is_wide = as_tensor(self.first.features).dtype == torch.float64
        return torch.float64 if is_wide else torch.float32

    def next_pass(self) -> Iterable[Batch]:
        """All batches, from the first."""
        self._passes += 1
        if self._passes == 1:
            return self._first_pass()
        if self._is_one_shot:
            raise ValueError(
                f"{self._used_by} needs another pass over the training data, but a one-shot "
                "iterator is used up: give a list of batches, one Batch, or an object whose "
                "__iter__ restarts"
            )
        return self._data

    def _first_pass(self) -> Iterator[Batch]:
        if self.first is not None:
            first = self.first
            # Not kept while the others are read: a batch may be large.
            self.first = None
            yield first
            del first
        yield from self._iterator


def fit_by(
    sum_up: Callable[[Together], Together], detector: Learner, head: Head, dtype: torch.dtype
) -> None:
    """Fit a detector on data, of this dtype, that only `sum_up` can reach. It is called once per
    pass with empty statistics, and returns them summed over all training data: `add_batches` sums
    each shard, and the shards are merged."""
    survive_forks()
    device = head.weight.device
    try:
        with undisturbed():
            program = detector._start_fit(head.cpu(), dtype)
        asked = next_request(program, None)
        while asked is not None:
            seen, summed = sum_up(Together([Count(), asked])).parts
            if not seen.count:
                raise ValueError(_NO_SAMPLES)
            asked = next_request(program, summed)
        # Sums are taken on the CPU, scores computed where the model is.
        if device.type != "cpu":
            detector.to(device)
    except BaseException:
        # Half fitted is not fitted.
        detector._forget()
        raise


def next_request(program: Passes, summed: Any) -> Any:
    """The empty statistic that a running `passes` asks for next, given the sums of the pass before;
    None when it is finished."""
    with undisturbed():
        try:
            return program.send(summed)
        except StopIteration:
            return None


def side_by_side(programs: Sequence[Passes]) -> Passes:
    """Several `passes` as one, which asks for the statistics of all that are not finished."""
    asked = {}
    for program in programs:
        request = next_request(program, None)
        if request is not None:
            asked[program] = request
    while asked:
        together = yield Together(asked.values())
        summed = dict(zip(asked, together.parts))
        asked = {}
        for program, sums in summed.items():
            request = next_request(program, sums)
            if request is not None:
                asked[program] = request


def over_processes() -> Callable[[Any], Any] | None:
    """Under torchrun, a function that merges a statistic over all processes in the order of their
    ranks, so that each gets the same; None for a single process."""
    group = torch.distributed
    if not (group.is_available() and group.is_initialized() and group.get_world_size() > 1):
        return None

    def combine(statistic: Any) -> Any:
        shards: list[Any] = [None] * group.get_world_size()
        group.all_gather_object(shards, statistic)
        merged, *others = shards
        for shard in others:
            merged.merge(shard)
        return merged

    return combine


def add_batches(
    statistics: Together, batches: Iterable[Batch], head: Head, detector: Learner
) -> None:
    """Add batches of training data to the statistics that a detector asks for; each batch is
    checked first."""
    head = head.cpu()
    for number, batch in enumerate(batches):
        with undisturbed():
            checked = check_training_batch(batch, number, head, detector)
            try:
                # A sum shows a NaN by itself, so that features are read only once.
                if not statistics.finds_non_finite:
                    check_finite(checked.features, "its features")
                statistics.update(checked)
            except NonFiniteRow as error:
                raise ValueError(
                    f"batch {number}, row {error.row}: {error.what} hold NaN or infinity; "
                    "remove the sample or repair the model"
                ) from None


def check_training_batch(batch: Batch, number: int, head: Head, detector: Learner) -> Batch:
    """The batch on the CPU, with its shapes and labels checked; features of a cosine head are
    divided by their norms."""
    batch = as_batch(batch).cpu().detach()
    features = as_matrix(
        batch.features, head.num_features, f"features of batch {number}", "the head's input"
    )
    if head.is_cosine:
        features = unit_rows(features)
        if batch.views is not None:
            batch = batch._replace(views=torch.stack([unit_rows(view) for view in batch.views]))
        if batch.perturbed is not None:
            batch = batch._replace(perturbed=unit_rows(batch.perturbed))
    logits = batch.logits
    if logits is not None:
        what = f"logits of batch {number}"
        logits = as_matrix(logits, head.num_classes, what, "the head's classes")
        if len(logits) != len(features):
            raise ValueError(
                f"batch {number} has {len(features)} rows of features but {len(logits)} rows of "
                "logits"
            )
    if batch.labels is not None:
        _check_labels(batch.labels, f"labels of batch {number}", len(features), head, detector)
    elif detector.needs.labels:
        raise ValueError(
            f"{type(detector).__name__} needs labels to fit, batch {number} has none: "
            "give Batch(features, logits, labels)"
        )
    return batch._replace(features=features, logits=logits)


def _check_labels(labels: Tensor, what: str, rows: int, head: Head, detector: Learner) -> None:
    """An error unless these are class indices (N,), or (N, C) zeros and ones for a detector that
    does not learn by class."""
    if labels.shape == (rows, head.num_classes):
        _check_multi_hot(labels, what, detector)
        return
    if labels.shape != (rows,):
        raise ValueError(
            f"{what} have shape {tuple(labels.shape)}, expected ({rows},), or for several labels "
            f"per sample ({rows}, {head.num_classes})"
        )
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"{what} are {labels.dtype}, expected integers")
    if not rows:
        return
    least = int(labels.min())
    most = int(labels.max())
    if least < 0 or most >= head.num_classes:
        raise ValueError(
            f"{what} range from {least} to {most}, expected 0 to {head.num_classes - 1}"
        )


def _check_multi_hot(labels: Tensor, what: str, detector: Learner) -> None:
    if detector.needs.labels:
        raise ValueError(
            f"{what} are multi-hot, {tuple(labels.shape)}, and {type(detector).__name__} learns by "
            "class, one per sample: use a detector that needs no labels, such as multilabel-fdbd"
        )
    if not ((labels == 0) | (labels == 1)).all():
        raise ValueError(f"{what} have shape {tuple(labels.shape)}, expected only 0 and 1 in them")
