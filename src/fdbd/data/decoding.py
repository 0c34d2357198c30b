"""Images in a fixed order, decoded by threads or processes while the model computes. A file that
crashes its decoder ends neither the run nor the other images."""

from __future__ import annotations

import collections
import contextlib
import itertools
import multiprocessing
import os
import pickle
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple, TypeVar, Union

import numpy as np
from torch import Tensor

from fdbd.core.pixels import MAX_PIXELS, Picture, Pixels, import_pillow
from fdbd.core.preprocessing import Preprocess
from fdbd.data import decoder_process
from fdbd.data.decoder_process import Decoded, Failure, decode_rows
from fdbd.data.images import Drafts, ImageFiles, cut
from fdbd.data.npz import NpzImages

S = TypeVar("S")
T = TypeVar("T")


Sliceable = Union[Pixels, NpzImages]
"""Images in an array, or in a file that is read as it is sliced."""


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

    def next_item(_: None) -> Any:
        return next(items, end)

    with contextlib.closing(items), ThreadPoolExecutor(1, "fdbd-prefetch") as pool:
        made = in_order(pool, next_item, itertools.repeat(None), ahead + 1)
        with contextlib.closing(made):
            for item in made:
                if item is end:
                    return
                yield item


def _by_threads(
    pixels: Sequence[Pixels | Picture], preprocess: Preprocess, spans: Sequence[range], workers: int
) -> Generator[Decoded, None, None]:
    def decode(rows: range) -> Decoded:
        return decode_rows(pixels, preprocess, rows)

    with ThreadPoolExecutor(workers, thread_name_prefix="fdbd-decode") as pool:
        yield from in_order(pool, decode, spans, workers + 1)


class DecodersCannotStart(RuntimeError):
    """No decoding process starts on this machine, which says nothing about the images."""


class _Processes(Executor):
    """Processes that take turns, each of them a pool of its own.

    One pool of several processes starts them as they are needed. One that it starts while another
    crashes is not ended with the others, and the pool waits for it for ever."""

    def __init__(
        self, count: int, initializer: Callable[..., object], arguments: tuple[Any, ...]
    ) -> None:
        self._pools = []
        for _ in range(count):
            pool = ProcessPoolExecutor(
                1, mp_context=_start_method(), initializer=initializer, initargs=arguments
            )
            self._pools.append(pool)
        self._turns = itertools.cycle(self._pools)

    def submit(self, function: Callable[..., T], /, *arguments: Any, **options: Any) -> Future[T]:
        return next(self._turns).submit(function, *arguments, **options)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for pool in self._pools:
            pool.shutdown(wait, cancel_futures=cancel_futures)


class _DecodingProcesses:
    """Processes that decode these images."""

    def __init__(self, pixels: Sequence[Pixels | Picture], preprocess: Preprocess) -> None:
        self._pixels = pixels
        self._preprocess = preprocess

    def spans(self, spans: Sequence[range], workers: int) -> Generator[Decoded, None, None]:
        """The images of each span, in order. After a crash, the spans that were under way are
        decoded in processes of their own, to find the file."""
        ahead = 2 * workers
        done = 0
        while done < len(spans):
            try:
                with self._started(min(workers, len(spans) - done)) as pool:
                    for span in in_order(pool, decoder_process.decode_here, spans[done:], ahead):
                        done += 1
                        yield span
            except BrokenProcessPool:
                for rows in spans[done : done + ahead]:
                    done += 1
                    yield self._apart(rows)

    def _apart(self, rows: Sequence[int]) -> Decoded:
        """Some rows in a separate process; if that crashes, each half of them in another one."""
        try:
            with self._started(1) as pool:
                return pool.submit(decoder_process.decode_here, rows).result()
        except BrokenProcessPool:
            pass
        if len(rows) == 1:
            no_images, _ = decode_rows(self._pixels, self._preprocess, ())
            return no_images, [Failure(rows[0], "the decoder crashed on it")]
        half = len(rows) // 2
        first_images, first_failures = self._apart(rows[:half])
        second_images, second_failures = self._apart(rows[half:])
        images = np.concatenate([first_images, second_images])
        return images, first_failures + second_failures

    @contextlib.contextmanager
    def _started(self, count: int) -> Generator[Executor, None, None]:
        """Processes that have all answered, so that a later crash can only come from a picture.
        DecodersCannotStart if one of them does not."""
        arguments = (self._pixels, self._preprocess)
        with _Processes(count, decoder_process.start, arguments) as pool:
            try:
                answers = [pool.submit(decoder_process.is_ready) for _ in range(count)]
                for answer in answers:
                    answer.result()
            except (BrokenProcessPool, OSError) as error:
                raise DecodersCannotStart(
                    f"the processes that decode images cannot start ({error}), so no image was "
                    'read; in a script of your own, start under `if __name__ == "__main__":`, '
                    "because each of these processes imports the script"
                ) from None
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                raise TypeError(
                    f"a {type(self._pixels).__name__} cannot be sent to the processes that decode "
                    f"images ({error}): make it picklable"
                ) from None
            yield pool


def _start_method() -> BaseContext:
    """Never a fork of this process: its threads (torch's, Ray's, ours) would be missing in the
    child, whose first wait for one of their locks never ends."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("forkserver")
    return multiprocessing.get_context("spawn")


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
        pixels: `Sliceable`; or images that are decoded on access: an ImageError becomes a
            failure.
        preprocess, spans: what the network expects, and which rows go together.
        workers: how many decode at once; None: one per core.
        processes: decode in processes instead of threads, which wait for each other if images are
            tiny, and which a decoder that crashes takes with it. The images must be picklable.
        pin: into pinned memory, from which copies to CUDA overlap with the model.
    """
    count = workers or _cores()

    def made() -> Generator[Prepared, None, None]:
        with contextlib.closing(_decoded(pixels, preprocess, spans, count, processes)) as found:
            for rows, (images, failures) in zip(spans, found):
                inputs = preprocess.normalise(images)
                if pin:
                    inputs = inputs.pin_memory()
                yield Prepared(rows, inputs, failures)

    return prefetch(made(), ahead=3)


def _cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _decoded(
    pixels: Sequence[Pixels] | Sliceable,
    preprocess: Preprocess,
    spans: Sequence[range],
    workers: int,
    processes: bool,
) -> Generator[Decoded, None, None]:
    """The images of each span, in order, cropped to the network's size."""
    if not isinstance(pixels, Sequence):
        for rows in spans:
            yield _sliced(pixels, preprocess, rows), []
        return
    # Here, so that a missing Pillow is one sentence and not a worker's traceback.
    import_pillow()
    # Files that were cut to squares already have another size, which needs the whole picture.
    images: Sequence[Pixels | Picture] = pixels
    if preprocess.needed_side is not None and isinstance(pixels, ImageFiles) and not pixels.size:
        images = Drafts(pixels, preprocess.needed_side)
    if processes:
        yield from _DecodingProcesses(images, preprocess).spans(spans, workers)
    else:
        yield from _by_threads(images, preprocess, spans, workers)


def _sliced(pixels: Sliceable, preprocess: Preprocess, rows: range) -> Pixels:
    """The images of some rows, cropped to the network's size. Large ones are read in slices of at
    most the pixels that a single image may have."""
    step = max(1, MAX_PIXELS // max(1, pixels.shape[1] * pixels.shape[2]))
    fitted = []
    for part in cut(rows, step):
        for image in pixels[part.start : part.stop]:
            fitted.append(preprocess.fit(image))
    return np.stack(fitted)
