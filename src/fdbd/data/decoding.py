"""Images in a fixed order, decoded by threads or processes while the model computes. A file that
crashes its decoder ends neither the run nor the other images."""

from __future__ import annotations

import collections
import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, NamedTuple, TypeVar, Union

import numpy as np
from torch import Tensor

from fdbd.core.pixels import MAX_PIXELS, ImageError, Pixels, import_pillow
from fdbd.core.preprocessing import Preprocess
from fdbd.data.images import cut
from fdbd.data.npz import NpzImages

S = TypeVar("S")
T = TypeVar("T")


class Failure(NamedTuple):
    """An image that could not be decoded, and is left out: its row in the dataset, and a sentence
    that names it."""

    row: int
    reason: str


Sliceable = Union[Pixels, NpzImages]  # in an array, or in a file that is read as it is sliced
Span = tuple[
    Pixels, list[Failure]
]  # images (n, size, size, 3) of some rows, without those that cannot be decoded
Decode = Callable[[Sequence[int]], Span]


def decode_rows(pixels: Sequence[Pixels], preprocess: Preprocess, rows: Sequence[int]) -> Span:
    """These images, cropped to the network's size; an ImageError or a lack of memory becomes a
    failure."""
    images = np.empty((len(rows), preprocess.size, preprocess.size, 3), np.uint8)
    failures: list[Failure] = []
    for place, row in enumerate(rows):
        try:
            images[place - len(failures)] = preprocess.fit(pixels[row])
        except ImageError as error:
            failures.append(Failure(row, str(error)))
        except MemoryError:
            failures.append(Failure(row, "there is not enough memory to prepare it"))
    return images[: len(rows) - len(failures)], failures


def in_order(
    pool: Executor, function: Callable[[S], T], items: Iterable[S], ahead: int
) -> Generator[T, None, None]:
    """``map(function, items)`` by a pool that works on at most `ahead` items at a time."""
    waiting: collections.deque[Future[T]] = collections.deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def prefetch(items: Generator[T, None, None], ahead: int) -> Generator[T, None, None]:
    """The same items, made by a thread up to `ahead` in advance. Closing the generator stops the
    thread.

    >>> list(prefetch((number**2 for number in range(4)), 2))
    [0, 1, 4, 9]
    """
    end: Any = object()
    with (
        contextlib.closing(items),
        ThreadPoolExecutor(1, thread_name_prefix="fdbd-prefetch") as pool,
        contextlib.closing(
            in_order(pool, lambda _: next(items, end), itertools.repeat(None), ahead + 1)
        ) as made,
    ):
        yield from itertools.takewhile(lambda item: item is not end, made)


def _by_threads(
    decode: Decode, spans: Sequence[range], workers: int
) -> Generator[Span, None, None]:
    with ThreadPoolExecutor(workers, thread_name_prefix="fdbd-decode") as pool:
        yield from in_order(pool, decode, spans, workers + 1)


def _by_processes(
    decode: Decode, spans: Sequence[range], workers: int
) -> Generator[Span, None, None]:
    """After a crash, the spans under way are decoded in processes of their own, to find the
    file."""
    done, ahead = 0, 2 * workers
    while done < len(spans):
        try:
            with _processes(decode, min(workers, len(spans) - done)) as pool:
                for span in in_order(pool, _serve, spans[done:], ahead):
                    done += 1
                    yield span
        except BrokenProcessPool:
            for rows in spans[done : done + ahead]:
                done += 1
                yield _apart(decode, rows)


def _apart(decode: Decode, rows: Sequence[int]) -> Span:
    """Some rows in a separate process; where that crashes, each half of them in another."""
    try:
        with _processes(decode, 1) as pool:
            return pool.submit(_serve, rows).result()
    except BrokenProcessPool:
        half = len(rows) // 2
        if not half:
            return decode(())[0], [Failure(rows[0], "the decoder crashed on it")]
        first, second = _apart(decode, rows[:half]), _apart(decode, rows[half:])
        return np.concatenate([first[0], second[0]]), first[1] + second[1]


def _processes(decode: Decode, workers: int) -> ProcessPoolExecutor:
    # A fork has the initializer's arguments as they are; arguments of each call would be pickled.
    return ProcessPoolExecutor(workers, initializer=_start, initargs=(decode,))


_decode: Decode  # what a process that decodes works with


def _start(decode: Decode) -> None:
    """Runs first in each worker. Ctrl-C is left to the parent."""
    global _decode
    _decode = decode
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="fdbd-parent", daemon=True).start()


def _end_with_parent() -> None:
    """Ends this worker when its parent ends, even if that was killed: a worker that waits for room
    in its pipe would keep files and locks for good."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _serve(rows: Sequence[int]) -> Span:
    return _decode(rows)


class Prepared(NamedTuple):
    """Inputs (n, 3, size, size) of a run of rows, without those that cannot be decoded, ready for
    the network."""

    rows: range
    inputs: Tensor
    failures: list[Failure]


def prepare(
    pixels: Sequence[Pixels] | Sliceable,
    preprocess: Preprocess,
    spans: Sequence[range],
    *,
    workers: int | None = None,
    processes: bool = False,
    pin: bool = False,
) -> Generator[Prepared, None, None]:
    """The images of each span of rows, in order, prepared in advance.

    Args:
        pixels: `Sliceable`; or images that are decoded on access, where an ImageError becomes a
            failure.
        preprocess, spans: what the network expects, and which rows go together.
        workers: how many decode at once; None: one per core.
        processes: decode in processes instead of threads: for tiny images, where threads wait for
            each other.
        pin: into pinned memory, from which copies to CUDA overlap with the model.
    """
    count = workers or (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )

    def made() -> Generator[Prepared, None, None]:
        found: Generator[Span, None, None]
        if isinstance(pixels, Sequence):
            import_pillow()  # here, so that a missing one is one sentence and not a worker's traceback
            by = _by_processes if processes else _by_threads
            found = by(partial(decode_rows, pixels, preprocess), spans, count)
        else:
            found = ((_sliced(pixels, preprocess, rows), []) for rows in spans)
        with contextlib.closing(found):
            for rows, (images, failures) in zip(spans, found):
                inputs = preprocess.normalise(images)
                yield Prepared(rows, inputs.pin_memory() if pin else inputs, failures)

    return prefetch(made(), ahead=3)


def _sliced(pixels: Sliceable, preprocess: Preprocess, rows: range) -> Pixels:
    """Large images come in slices that are no larger than one image may be."""
    step = max(1, MAX_PIXELS // max(1, pixels.shape[1] * pixels.shape[2]))
    return np.stack(
        [
            preprocess.fit(image)
            for part in cut(rows, step)
            for image in pixels[part.start : part.stop]
        ]
    )
