"""The driver of passes. A detector's `passes` is a generator that yields empty statistics; a driver
sums them over the training data and sends them back. `fit_detector` sums in this process, `fit_by`
wherever its caller does."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any, Protocol

import torch
import torch.distributed

from fdbd.core.batch import Batch, Head, as_batch, as_matrix, as_tensor
from fdbd.core.configuration import Needs, Passes
from fdbd.fitting.statistics import Count, NonFiniteRow, Together, check_finite
from fdbd.util.torch_compat import undisturbed

_NO_SAMPLES = "the training data hold no samples; give at least one non-empty batch"


class Learner(Protocol):
    """What is fitted: a detector."""

    needs: Needs

    def start(self, head: Head, dtype: torch.dtype | None = None) -> Passes: ...

    def forget(self) -> None: ...

    def to(self, device: torch.device) -> Any: ...


def fit_detector(
    detector: Learner,
    batches: Batch | Iterable[Batch],
    head: Head,
    combine: Callable[[Together], Together] | None = None,
) -> None:
    """Fit a detector on one Batch, or on an iterable that restarts with each pass. `combine` merges
    the statistics of processes that each see a shard of the data (`over_processes`)."""
    detector.forget()
    data = [batches] if isinstance(batches, Batch) else batches
    iterator = iter(data)
    first = [as_batch(batch) for batch in islice(iterator, 1)]
    if not first and combine is None:  # one of several processes may have no data
        raise ValueError(_NO_SAMPLES)
    is_wide = bool(first) and as_tensor(first[0].features).dtype == torch.float64
    source: Iterable[Batch] | None = chain(iter([first.pop()] if first else []), iterator)

    def sum_up(statistics: Together) -> Together:
        nonlocal source
        if source is None and iterator is data:
            raise ValueError(
                f"{type(detector).__name__} needs another pass over the training data, but a one-shot iterator is used "
                "up: give a list of batches, one Batch, or an object whose __iter__ restarts"
            )
        batches, source = source or data, None
        add_batches(statistics, batches, head, detector)
        return statistics if combine is None else combine(statistics)

    fit_by(sum_up, detector, head, torch.float64 if is_wide else torch.float32)


def fit_by(
    sum_up: Callable[[Together], Together], detector: Learner, head: Head, dtype: torch.dtype
) -> None:
    """Fit a detector on data, of this dtype, that only `sum_up` can reach. It is called once per
    pass with empty statistics and returns those of all training data: of each shard by
    `add_batches`, merged."""
    device, head = head.weight.device, head.cpu()
    try:
        with undisturbed():
            program = detector.start(head, dtype)
        summed = None
        while True:
            with undisturbed():
                try:
                    asked = program.send(summed)
                except StopIteration:
                    break
            seen, summed = sum_up(Together([Count(), asked])).parts
            if not seen.count:
                raise ValueError(_NO_SAMPLES)
        if device.type != "cpu":  # sums are taken on the CPU, scores where the model is
            detector.to(device)
    except BaseException:
        detector.forget()  # half fitted is not fitted
        raise


def side_by_side(programs: Sequence[Passes]) -> Passes:
    """Several `passes` as one, which asks for the statistics of all that are not finished."""
    sums: dict[Passes, Any] = dict.fromkeys(programs)
    while sums:
        asked = {}
        for program, summed in sums.items():
            with suppress(StopIteration):
                asked[program] = program.send(summed)
        sums = dict(zip(asked, (yield Together(asked.values())).parts)) if asked else {}


def over_processes() -> Callable[[Any], Any] | None:
    """Under torchrun, a function that merges a statistic over all processes in the order of their
    ranks, so that each gets the same; None for a single process."""
    group = torch.distributed
    if not (group.is_available() and group.is_initialized() and group.get_world_size() > 1):
        return None

    def combine(statistic: Any) -> Any:
        shards: list[Any] = [None] * group.get_world_size()
        group.all_gather_object(shards, statistic)
        for shard in shards[1:]:
            shards[0].merge(shard)
        return shards[0]

    return combine


def add_batches(
    statistics: Together, batches: Iterable[Batch], head: Head, detector: Learner
) -> None:
    """Add batches of training data to the statistics that a detector asks for; each batch is
    checked first."""
    head = head.cpu()
    for number, batch in enumerate(batches):
        with undisturbed():
            batch = check_training_batch(batch, number, head, detector)
            try:
                if (
                    not statistics.finds_non_finite
                ):  # a sum shows a NaN by itself, so that features are read only once
                    check_finite(batch.features, "its features")
                statistics.update(batch)
            except NonFiniteRow as error:
                what = f"batch {number}, row {error.row}: {error.what} hold NaN or infinity"
                raise ValueError(f"{what}; remove the sample or repair the model") from None


def check_training_batch(batch: Batch, number: int, head: Head, detector: Learner) -> Batch:
    """The batch on the CPU, with its shapes and labels checked."""
    batch = as_batch(batch).cpu().detach()
    features = as_matrix(
        batch.features, head.num_features, f"features of batch {number}", "the head's input"
    )
    logits, labels, rows = batch.logits, batch.labels, len(features)
    if logits is not None:
        logits = as_matrix(
            logits, head.num_classes, f"logits of batch {number}", "the head's classes"
        )
        if len(logits) != rows:
            raise ValueError(
                f"batch {number} has {rows} rows of features but {len(logits)} rows of logits"
            )
    if labels is not None:
        what = f"labels of batch {number}"
        if labels.shape != (rows,):
            raise ValueError(f"{what} have shape {tuple(labels.shape)}, expected ({rows},)")
        if labels.is_floating_point() or labels.is_complex():
            raise TypeError(f"{what} are {labels.dtype}, expected integers")
        least, most = (int(labels.min()), int(labels.max())) if rows else (0, 0)
        if least < 0 or most >= head.num_classes:
            raise ValueError(
                f"{what} range from {least} to {most}, expected 0 to {head.num_classes - 1}"
            )
    elif detector.needs.labels:
        remedy = f"batch {number} has none: give Batch(features, logits, labels)"
        raise ValueError(f"{type(detector).__name__} needs labels to fit, {remedy}")
    return batch._replace(features=features, logits=logits)
