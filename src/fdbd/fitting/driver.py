"""The driver of passes: runs training data through the statistics that detectors ask for.

A detector's `passes` is a generator that yields empty statistics; a driver sums them over the data and sends them back.
`fit_together` does so in this process, `fit_by` wherever its caller's sums come from.
"""

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
    """Fit several detectors anew on the same data: one Batch, or an iterable that starts anew with each pass, which
    serves all that still ask for one. `combine` merges a statistic over processes that each see a shard of the data
    (`over_processes`)."""
    data = [batches] if isinstance(batches, Batch) else batches
    iterator = iter(data)
    first = [as_batch(batch) for batch in islice(iterator, 1)]
    if not first and combine is None:  # of several processes, one may have nothing
        for detector in detectors:
            detector.forget()
        raise ValueError(_NO_SAMPLES)
    is_wide = bool(first) and as_tensor(first[0].features).dtype == torch.float64
    source: Iterable[Batch] | None = chain(iter([first.pop()] if first else []), iterator)

    def sum_up(statistics: list[Statistic], asking: list[Learner]) -> list[Statistic]:
        nonlocal source
        if source is None and iterator is data:
            raise ValueError(
                f"{', '.join(type(detector).__name__ for detector in asking)} needs another pass over the training "
                "data, but a one-shot iterator is used up: give a list of batches, one Batch, or an object whose "
                "__iter__ starts anew"
            )
        batches, source = data if source is None else source, None
        update_all(statistics, batches, head, asking)
        return statistics if combine is None else [combine(statistic) for statistic in statistics]

    fit_by(sum_up, detectors, head, torch.float64 if is_wide else torch.float32)


def fit_by(
    sum_up: Callable[[list[Any], list[Any]], list[Any]], detectors: Sequence[Learner], head: Head, dtype: torch.dtype
) -> None:
    """Fit detectors anew on data, of this dtype, that only `sum_up` can reach. It is called once per pass with empty
    statistics and the detectors that ask for them, and returns the statistics of all training data, in the same order.
    `update_all` does that for one shard, and shards merge."""
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
    """Several `passes` as one: asks for what all that are not finished ask for, `Together`, whose `numbers` are
    theirs."""
    sums: dict[int, Any] = dict.fromkeys(range(len(programs)))
    while sums:
        asked = {}
        for number, summed in sums.items():
            with suppress(StopIteration):
                asked[number] = programs[number].send(summed)
        sums = dict(zip(asked, (yield Together(asked.values(), tuple(asked))).parts)) if asked else {}


def over_processes() -> Callable[[Any], Any] | None:
    """Under torchrun, what merges a statistic over all processes in the order of their ranks, so that each gets the
    same; None for a process alone."""
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
    # A sum over a NaN is NaN: where every statistic notices by itself, the features are read only once.
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
                raise ValueError(
                    f"batch {number}, row {error.row}: {error.what} hold NaN or infinity; remove the sample or repair "
                    "the model, a detector cannot learn from it"
                ) from None


def check_training_batch(batch: Batch, number: int, head: Head, detectors: Sequence[Learner]) -> Batch:
    """A batch fit for the statistics of these detectors: on the CPU, with its shapes and labels checked."""
    batch = as_batch(batch).cpu().detach()
    features = as_matrix(batch.features, head.num_features, f"features of batch {number}", "the head's input")
    logits = batch.logits
    if logits is not None:
        logits = as_matrix(logits, head.num_classes, f"logits of batch {number}", "the head's classes")
        if logits.shape[0] != features.shape[0]:
            raise ValueError(
                f"batch {number} has {features.shape[0]} rows of features but {logits.shape[0]} rows of logits"
            )
    if (labels := batch.labels) is not None:
        if labels.shape != features.shape[:1]:
            raise ValueError(
                f"labels of batch {number} have shape {tuple(labels.shape)}, expected ({features.shape[0]},)"
            )
        if labels.is_floating_point() or labels.is_complex():
            raise TypeError(f"labels of batch {number} are {labels.dtype}, expected integers")
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < head.num_classes:
            raise ValueError(
                f"labels of batch {number} range from {int(labels.min())} to {int(labels.max())}, "
                f"expected 0 to {head.num_classes - 1}"
            )
    elif needing := [type(detector).__name__ for detector in detectors if detector.needs.labels]:
        raise ValueError(
            f"{', '.join(needing)} needs labels to fit, batch {number} has none: give Batch(features, logits, labels)"
        )
    return batch._replace(features=features, logits=logits)
