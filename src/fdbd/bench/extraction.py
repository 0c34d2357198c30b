"""Images through a network, with the cores kept busy: threads prepare batches while the model computes."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fdbd.batch import Batch, Head

from ..images import ImageError, Pixels
from ..preprocess import Preprocess
from .datasets.collection import ImageFiles, Images
from .shards import Arrays, Failure

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


class _Prepared(NamedTuple):
    """One batch, ready for the network."""

    number: int
    inputs: Tensor
    failures: list[Failure]
    is_last: bool


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
    batches = _prepare(images, preprocess, shards, shard_rows, batch_size, workers)
    with contextlib.closing(prefetch(batches, _AHEAD)) as prepared:
        for batch in prepared:
            failures += batch.failures
            if len(batch.inputs) or (batch.is_last and not parts):  # an empty part says how many features there are
                parts.append(_forward(classifier, batch.inputs, preprocess.size, dtype, images.name))
            done += len(batch.inputs) + len(batch.failures)
            if progress is not None:
                progress(done, total)
            if batch.is_last:
                arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
                yield Extracted(batch.number, arrays, failures)
                parts, failures = [], []


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
    images: Images, preprocess: Preprocess, shards: Sequence[int], shard_rows: int, batch_size: int, workers: int | None
) -> Generator[_Prepared, None, None]:
    pixels = images.images
    with ThreadPoolExecutor(workers or _num_cores(), thread_name_prefix="fdbd-decode") as pool:
        for number in shards:
            stop = min((number + 1) * shard_rows, len(images))
            for start in range(number * shard_rows, stop, batch_size):
                rows = range(start, min(start + batch_size, stop))
                failures: list[Failure] = []
                if isinstance(pixels, ImageFiles):
                    results = list(pool.map(lambda row: _decode(pixels, row, preprocess), rows))
                    failures = [result for result in results if isinstance(result, Failure)]
                    inputs = preprocess.normalise_all([r for r in results if not isinstance(r, Failure)])
                else:
                    inputs = preprocess(pixels[rows.start : rows.stop])
                yield _Prepared(number, inputs, failures, rows.stop == stop)


def _decode(files: ImageFiles, row: int, preprocess: Preprocess) -> Pixels | Failure:
    try:
        return preprocess.fit(files[row])
    except ImageError as error:
        return Failure(row, str(error))


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
