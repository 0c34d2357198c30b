"""Images through a network, with the cores kept busy: workers prepare batches while the model computes."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fdbd.core.batch import Batch, Head
from fdbd.data.datasets.collection import Images
from fdbd.data.decoding import Decoded, by_processes, by_threads
from fdbd.data.images import MAX_PIXELS, Pixels
from fdbd.data.preprocessing import Preprocess
from fdbd.data.shards import Arrays, Failure

Progress = Callable[[int, int], None]
"""Called with the images done so far, and in all."""

_AHEAD = 3  # batches that wait for the model
T = TypeVar("T")


class Extractor(Protocol):
    """What is asked of a classifier; `fdbd.Classifier` is one."""

    model: nn.Module

    @property
    def head(self) -> Head: ...

    def __call__(self, inputs: Any, /) -> Batch: ...


class Extracted(NamedTuple):
    """What the network says of one shard."""

    number: int
    arrays: Arrays
    failures: list[Failure]


class Prepared(NamedTuple):
    """Some images of a set, ready for the network."""

    rows: range
    inputs: Tensor
    """(n, 3, size, size), without those that cannot be decoded."""
    failures: list[Failure]


class Sliceable(Protocol):
    """Images in an array, or in a file that is read as it is sliced: uint8 (N, H, W, 3)."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> Pixels: ...


def extract(
    classifier: Extractor,
    images: Images,
    preprocess: Preprocess,
    shards: Sequence[int],
    shard_rows: int,
    *,
    batch_size: int = 128,
    dtype: str = "float32",
    progress: Progress | None = None,
    workers: int | None = None,
) -> Generator[Extracted, None, None]:
    """Runs the network over the shards with these numbers; shard i is rows i·shard_rows and following.

    Arrays are ``features`` (N, P) and ``layer:NAME`` (N, P_layer), without the rows that cannot be decoded.
    """
    total = len(images)
    done = total - sum(min(shard_rows, total - number * shard_rows) for number in shards)
    parts: list[Arrays] = []
    failures: list[Failure] = []
    stops = {number: min((number + 1) * shard_rows, total) for number in shards}
    spans = [span for number in shards for span in cut(range(number * shard_rows, stops[number]), batch_size)]
    with contextlib.closing(prepare(images.images, preprocess, spans, workers=workers)) as prepared:
        for batch in prepared:
            number = batch.rows.start // shard_rows
            is_last = batch.rows.stop == stops[number]
            failures += batch.failures
            if len(batch.inputs) or (is_last and not parts):  # an empty part says how many features there are
                parts.append(_forward(classifier, batch.inputs, preprocess.size, dtype, images.name))
            done += len(batch.rows)
            if progress is not None:
                progress(done, total)
            if is_last:
                arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
                yield Extracted(number, arrays, failures)
                parts, failures = [], []


def cut(rows: range, size: int) -> list[range]:
    """The rows in runs of `size`, the last one perhaps shorter.

    >>> cut(range(10, 15), 2)
    [range(10, 12), range(12, 14), range(14, 15)]
    """
    return [range(start, min(start + size, rows.stop)) for start in range(rows.start, rows.stop, size)]


def prepare(
    pixels: Sequence[Pixels] | Sliceable,
    preprocess: Preprocess,
    spans: Sequence[range],
    *,
    workers: int | None = None,
    processes: bool = False,
) -> Generator[Prepared, None, None]:
    """The images of each span of rows, in order, made ahead of the one who asks for them.

    Args:
        pixels: an array or `Sliceable`; or a sequence of images that are decoded when asked for, where an ImageError
            becomes a failure.
        preprocess: what the network expects.
        spans: which rows go together.
        workers: how many decode at once; None: one a core.
        processes: decode in processes instead of threads: for tiny images, where threads wait for each other.
    """
    return prefetch(_prepare(pixels, preprocess, spans, workers or _num_cores(), processes), _AHEAD)


def prefetch(items: Generator[T, None, None], ahead: int) -> Generator[T, None, None]:
    """The same items, made by a thread up to `ahead` in advance. Closing the generator stops the thread.

    >>> list(prefetch((number**2 for number in range(4)), 2))
    [0, 1, 4, 9]
    """
    waiting: queue.Queue[tuple[bool, Any]] = queue.Queue(ahead)
    is_closed = threading.Event()

    def put(has_item: bool, item: Any) -> None:
        while not is_closed.is_set():
            with contextlib.suppress(queue.Full):
                waiting.put((has_item, item), timeout=0.1)
                return

    def produce() -> None:
        try:
            with contextlib.closing(items):
                for item in items:
                    put(True, item)
                    if is_closed.is_set():
                        return
            put(False, None)
        except BaseException as error:  # raised again where the items are consumed
            put(False, error)

    thread = threading.Thread(target=produce, name="fdbd-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            has_item, item = waiting.get()
            if has_item:
                yield item
            elif item is not None:
                raise item
            else:
                return
    finally:
        is_closed.set()
        thread.join()


def _prepare(
    pixels: Sequence[Pixels] | Sliceable, preprocess: Preprocess, spans: Sequence[range], workers: int, processes: bool
) -> Generator[Prepared, None, None]:
    if not isinstance(pixels, Sequence):
        # Large images come in slices that are no larger than one image may be.
        step = max(1, MAX_PIXELS // max(1, pixels.shape[1] * pixels.shape[2]))
        for rows in spans:
            parts = [preprocess(pixels[part.start : part.stop]) for part in cut(rows, step)]
            yield Prepared(rows, parts[0] if len(parts) == 1 else torch.cat(parts), [])
        return
    decoded = Decoded(pixels, preprocess, spans)
    results = by_processes(decoded, workers) if processes else by_threads(decoded, workers)
    with contextlib.closing(results):
        for rows, (images, failures) in zip(spans, results):
            yield Prepared(rows, preprocess.normalise(images), failures)


def _forward(classifier: Extractor, inputs: Tensor, size: int, dtype: str, name: str) -> Arrays:
    count = len(inputs)
    if not count:
        inputs = torch.zeros(1, 3, size, size)
    with torch.inference_mode():
        batch = classifier(inputs)
    if batch.features.ndim != 2 or len(batch.features) != len(inputs):
        raise ValueError(
            f"the classifier gives features {tuple(batch.features.shape)} for {len(inputs)} images, expected (N, P)"
        )
    arrays = {}
    layers = {f"layer:{key}": layer for key, layer in (batch.layers or {}).items()}
    for key, tensor in {"features": batch.features, **layers}.items():
        values = tensor[:count].cpu()
        stored = values.to(getattr(torch, dtype))
        if dtype == "float16" and (stored.isinf() & values.isfinite()).any():
            raise ValueError(
                f"{key} of {name} reach {float(values.abs().max()):.3g}, too much for float16; use float32"
            )
        arrays[key] = np.ascontiguousarray(stored.numpy())
    return arrays


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
