"""The driver of passes. A detector's `passes` is a generator that yields empty statistics; a driver sums them over the
training data and sends them back. `fit_together` sums in this process, `fit_by` wherever its caller does."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any, Protocol

import torch
import torch.distributed

from fdbd.core.batch import Batch, Head, as_batch, as_matrix, as_tensor
from fdbd.core.configuration import Needs, Passes
from fdbd.fitting.statistics import Count, NonFiniteRow, Statistic, Together, check_finite
from fdbd.util.torch_compat import undisturbed

_NO_SAMPLES = "the training data hold no samples; give at least one non-empty batch"


class Learner(Protocol):
    """What is fitted: a detector."""

    needs: Needs

    def start(self, head: Head, dtype: torch.dtype | None = None) -> Passes: ...

    def forget(self) -> None: ...

    def to(self, device: torch.device) -> Any: ...


def fit_together(
    detectors: Sequence[Learner],
    batches: Batch | Iterable[Batch],
    head: Head,
    combine: Callable[[Any], Any] | None = None,
) -> None:
    """Fit several detectors on the same data: one Batch, or an iterable that restarts with each pass, which serves all
    detectors that still ask for one. `combine` merges a statistic over processes that each see a shard of the data
    (`over_processes`)."""
    data = [batches] if isinstance(batches, Batch) else batches
    iterator = iter(data)
    first = [as_batch(batch) for batch in islice(iterator, 1)]
    if not first and combine is None:  # one of several processes may have no data
        for detector in detectors:
            detector.forget()
        raise ValueError(_NO_SAMPLES)
    is_wide = bool(first) and as_tensor(first[0].features).dtype == torch.float64
    source: Iterable[Batch] | None = chain(iter([first.pop()] if first else []), iterator)

    def sum_up(statistics: list[Statistic], asking: list[Learner]) -> list[Statistic]:
        nonlocal source
        if source is None and iterator is data:
            names = ", ".join(type(detector).__name__ for detector in asking)
            raise ValueError(
                f"{names} needs another pass over the training data, but a one-shot iterator is used up: give a list "
                "of batches, one Batch, or an object whose __iter__ restarts"
            )
        batches, source = source or data, None
        update_all(statistics, batches, head, asking)
        return statistics if combine is None else list(map(combine, statistics))

    fit_by(sum_up, detectors, head, torch.float64 if is_wide else torch.float32)


def fit_by(
    sum_up: Callable[[list[Any], list[Any]], list[Any]], detectors: Sequence[Learner], head: Head, dtype: torch.dtype
) -> None:
    """Fit detectors on data, of this dtype, that only `sum_up` can reach. It is called once per pass with empty
    statistics and the detectors that ask for them, and returns the statistics of all training data, in the same order:
    those of each shard by `update_all`, merged."""
    device, head = head.weight.device, head.cpu()
    try:
        summed = None
        with undisturbed():
            program = side_by_side([detector.start(head, dtype) for detector in detectors])
        while True:
            with undisturbed():
                try:
                    asked = program.send(summed)
                except StopIteration:
                    break
            seen, *sums = sum_up([Count(), *asked.parts], [detectors[number] for number in asked.numbers])
            if not seen.count:
                raise ValueError(_NO_SAMPLES)
            summed = Together(sums)
        if device.type != "cpu":  # sums are taken on the CPU, scores where the model is
            for detector in detectors:
                detector.to(device)
    except BaseException:
        for detector in detectors:
            detector.forget()  # half fitted is not fitted
        raise


def side_by_side(programs: Sequence[Passes]) -> Passes:
    """Several `passes` as one, which yields the statistics of all that are not finished, `Together` with their
    `numbers`."""
    sums: dict[int, Any] = dict.fromkeys(range(len(programs)))
    while sums:
        asked = {}
        for number, summed in sums.items():
            with suppress(StopIteration):
                asked[number] = programs[number].send(summed)
        sums = dict(zip(asked, (yield Together(asked.values(), tuple(asked))).parts)) if asked else {}


def over_processes() -> Callable[[Any], Any] | None:
    """Under torchrun, a function that merges a statistic over all processes in the order of their ranks, so that each
    gets the same; None for a single process."""
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


def update_all(
    statistics: Sequence[Statistic], batches: Iterable[Batch], head: Head, asking: Sequence[Learner]
) -> None:
    """Add batches of training data to the statistics that these detectors ask for; each batch is checked first."""
    # A sum over a NaN is NaN: if every statistic notices that, the features are read only once.
    together = Together(statistics)
    head = head.cpu()
    for number, batch in enumerate(batches):
        with undisturbed():
            batch = check_training_batch(batch, number, head, asking)
            try:
                if not together.finds_non_finite:
                    check_finite(batch.features, "its features")
                together.update(batch)
            except NonFiniteRow as error:
                what = f"batch {number}, row {error.row}: {error.what} hold NaN or infinity"
                raise ValueError(f"{what}; remove the sample or repair the model") from None


def check_training_batch(batch: Batch, number: int, head: Head, detectors: Sequence[Learner]) -> Batch:
    """The batch on the CPU, with its shapes and labels checked."""
    batch = as_batch(batch).cpu().detach()
    features = as_matrix(batch.features, head.num_features, f"features of batch {number}", "the head's input")
    logits, labels, rows = batch.logits, batch.labels, len(features)
    if logits is not None:
        logits = as_matrix(logits, head.num_classes, f"logits of batch {number}", "the head's classes")
        if len(logits) != rows:
            raise ValueError(f"batch {number} has {rows} rows of features but {len(logits)} rows of logits")
    if labels is not None:
        what = f"labels of batch {number}"
        if labels.shape != (rows,):
            raise ValueError(f"{what} have shape {tuple(labels.shape)}, expected ({rows},)")
        if labels.is_floating_point() or labels.is_complex():
            raise TypeError(f"{what} are {labels.dtype}, expected integers")
        least, most = (int(labels.min()), int(labels.max())) if rows else (0, 0)
        if least < 0 or most >= head.num_classes:
            raise ValueError(f"{what} range from {least} to {most}, expected 0 to {head.num_classes - 1}")
    elif needing := ", ".join(type(detector).__name__ for detector in detectors if detector.needs.labels):
        remedy = f"batch {number} has none: give Batch(features, logits, labels)"
        raise ValueError(f"{needing} needs labels to fit, {remedy}")
    return batch._replace(features=features, logits=logits)
