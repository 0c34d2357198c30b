"""The driver of passes: runs training data through the statistics that detectors ask for.

A detector's `passes` is a generator that yields empty statistics; a driver sums them over the data and sends them back.
`fit_together` does so in this process, `fit_by` wherever its caller's sums come from.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Protocol

import torch
from torch import Tensor

from fdbd.core.batch import Batch, Head, as_batch, as_matrix, as_tensor
from fdbd.core.configuration import Needs, Passes
from fdbd.fitting.statistics import Count, NonFiniteRow, Statistic, check_finite, finds_non_finite
from fdbd.util.torch_compat import undisturbed

_NO_SAMPLES = "the training data hold no samples; give at least one non-empty batch"


class Learner(Protocol):
    """What is fitted: a detector."""

    needs: Needs

    @property
    def label(self) -> str: ...

    def start(self, head: Head, dtype: torch.dtype | None = None) -> Passes: ...

    def forget(self) -> None: ...

    def to(self, device: torch.device) -> Any: ...


def fit_together(
    detectors: Sequence[Learner],
    batches: Batch | Iterable[Batch],
    head: Head,
    combine: Callable[[Any], Any] | None = None,
) -> None:
    """Fit several detectors on the same data; each pass over the data serves all that still ask for one.

    Args:
        detectors: unfitted or fitted before; all are fitted anew.
        batches: one Batch, or an iterable that starts anew with each pass.
        head: the linear head.
        combine: merges a statistic over processes that each see a shard of the data (`fdbd.fitting.distributed`).
    """
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
    """Fit detectors on data that only `sum_up` can reach.

    Args:
        sum_up: called once per pass with empty statistics and the detectors that ask for them; returns the statistics
            of all training data, in the same order. `update_all` does that for one shard, and shards merge.
        detectors: unfitted or fitted before; all are fitted anew.
        head: the linear head.
        dtype: of the features.
    """
    running: dict[int, tuple[Passes, Statistic]] = {}
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
        if device.type != "cpu":  # sums are taken on the CPU, scores where the model is
            for detector in detectors:
                detector.to(device)
    except BaseException:
        for detector in detectors:
            detector.forget()  # half fitted is not fitted
        raise


def _advance(running: dict[int, tuple[Passes, Statistic]], index: int, program: Passes, summed: Any) -> None:
    try:
        with undisturbed():
            running[index] = (program, program.send(summed))
    except StopIteration:
        running.pop(index, None)


def update_all(
    statistics: Sequence[Statistic], batches: Iterable[Batch], head: Head, asking: Sequence[Learner]
) -> None:
    """Add batches of training data to the statistics that these detectors ask for; each batch is checked first."""
    # A sum over a NaN is NaN: where every statistic notices by itself, the features are read only once.
    look = not all(map(finds_non_finite, statistics))
    head = head.cpu()
    for number, batch in enumerate(batches):
        with undisturbed():
            batch = check_training_batch(batch, number, head, asking)
            with named_row(number):
                if look:
                    check_finite(batch.features, "its features")
                for statistic in statistics:
                    statistic.update(batch)


@contextlib.contextmanager
def named_row(number: int) -> Iterator[None]:
    """Completes a `NonFiniteRow` with the number of the batch."""
    try:
        yield
    except NonFiniteRow as error:
        raise ValueError(
            f"batch {number}, row {error.row}: {error.what} hold NaN or infinity; remove the sample or repair the "
            "model, a detector cannot learn from it"
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
    if batch.labels is not None:
        check_labels(batch.labels, features.shape[0], head.num_classes, number)
    elif needing := [type(detector).__name__ for detector in detectors if detector.needs.labels]:
        raise ValueError(
            f"{', '.join(needing)} needs labels to fit, batch {number} has none: give Batch(features, logits, labels)"
        )
    return batch._replace(features=features, logits=logits)


def check_labels(labels: Tensor, rows: int, num_classes: int, number: int) -> None:
    """Refuse labels that are not (N,) integers within the head's classes."""
    if labels.shape != (rows,):
        raise ValueError(f"labels of batch {number} have shape {tuple(labels.shape)}, expected ({rows},)")
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"labels of batch {number} are {labels.dtype}, expected integers")
    if rows and (int(labels.min()) < 0 or int(labels.max()) >= num_classes):
        raise ValueError(
            f"labels of batch {number} range from {int(labels.min())} to {int(labels.max())}, "
            f"expected 0 to {num_classes - 1}"
        )
