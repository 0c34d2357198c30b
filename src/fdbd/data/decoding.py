"""Images in a fixed order, made ready ahead of the model: decoded by threads or processes while it computes.

A file that crashes its decoder ends neither the run nor the other images.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple, Protocol, TypeVar, Union

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fdbd.data.images import MAX_PIXELS, ImageError, Pixels, decode, import_pillow
from fdbd.data.preprocessing import Preprocess
from fdbd.util.files import stamp

CHANGED = "was changed or replaced during the run"
CRASHED = "the decoder crashed on it"
TOO_LARGE = "there is not enough memory to prepare it"
_AHEAD = 2  # spans that a process works on before they are asked for
_PREPARED = 3  # batches that wait for the model
_served: Decoded
"""What a process that decodes apart works on."""

Names = Union[range, Sequence[str]]
"""A path below a folder for each row, or row numbers."""
S = TypeVar("S")
T = TypeVar("T")


class Failure(NamedTuple):
    """An image that could not be decoded, and is left out."""

    row: int
    """Its position in the dataset."""
    reason: str
    """One sentence that names the file."""


class Span(NamedTuple):
    """Images of a run of rows."""

    images: Pixels
    """(n, size, size, 3) uint8, without those that cannot be decoded."""
    failures: list[Failure]


class Decoded(torch.utils.data.Dataset[Span]):
    """Span i of the rows."""

    def __init__(self, pixels: Sequence[Pixels], preprocess: Preprocess, spans: Sequence[range]) -> None:
        self.pixels, self.preprocess, self.spans = pixels, preprocess, spans

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> Span:
        return self.decode(self.spans[index])

    def decode(self, rows: Sequence[int]) -> Span:
        """These rows; an ImageError or a lack of memory becomes a failure."""
        size = self.preprocess.size
        images = np.empty((len(rows), size, size, 3), np.uint8)
        failures: list[Failure] = []
        count = 0
        for row in rows:
            try:
                images[count] = self.preprocess.fit(self.pixels[row])
                count += 1
            except ImageError as error:
                failures.append(Failure(row, str(error)))
            except MemoryError:
                failures.append(Failure(row, TOO_LARGE))
        return Span(images[:count], failures)


def by_threads(decoded: Decoded, workers: int) -> Generator[Span, None, None]:
    """All spans, in order."""
    with ThreadPoolExecutor(workers, thread_name_prefix="fdbd-decode") as pool:
        yield from in_order(pool, decoded.__getitem__, range(len(decoded)), workers + 1)


def by_processes(decoded: Decoded, workers: int) -> Generator[Span, None, None]:
    """All spans, in order. After a crash the spans that were under way are decoded apart, to find the file."""
    done = 0
    while done < len(decoded):
        loader = torch.utils.data.DataLoader(
            decoded,
            batch_size=None,
            sampler=range(done, len(decoded)),
            collate_fn=_as_it_is,
            num_workers=min(workers, len(decoded) - done),
            prefetch_factor=_AHEAD,
            worker_init_fn=functools.partial(_leave_with_parent, os.getpid()),
        )
        spans = iter(loader)
        try:
            while (span := next(spans, None)) is not None:
                done += 1
                yield span
        except RuntimeError as error:
            if "exited unexpectedly" not in str(error) and "killed by signal" not in str(error):
                raise
            del spans, loader  # ends the other workers
            for rows in decoded.spans[done : done + _AHEAD * workers]:
                done += 1
                yield apart(decoded, rows)


def apart(decoded: Decoded, rows: Sequence[int]) -> Span:
    """Some rows in a process of their own; where that crashes, each half of them in one of its own."""
    try:
        # As an argument of the initializer a fork has the images as they are; with each call they would be pickled.
        with ProcessPoolExecutor(1, initializer=_serve, initargs=(decoded, os.getpid())) as pool:
            return pool.submit(_decode, rows).result()
    except BrokenProcessPool:
        if len(rows) == 1:
            size = decoded.preprocess.size
            return Span(np.empty((0, size, size, 3), np.uint8), [Failure(rows[0], CRASHED)])
        first, second = (apart(decoded, part) for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :]))
        return Span(np.concatenate([first.images, second.images]), first.failures + second.failures)


def _serve(decoded: Decoded, parent: int) -> None:
    global _served
    _served = decoded
    _leave_with_parent(parent)


def _decode(rows: Sequence[int]) -> Span:
    return _served.decode(rows)


def _leave_with_parent(parent: int, _: int = 0) -> None:
    """In a worker: end soon after the parent does. A parent that was killed tells nobody, and a worker that waits for
    room in its pipe would keep files and locks for good."""

    def watch() -> None:
        above = multiprocessing.parent_process()
        if os.name == "nt" and above is not None:  # where a process keeps the number of a parent that has ended
            above.join()
        else:
            while os.getppid() == parent:
                time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="fdbd-parent", daemon=True).start()


def _as_it_is(value: T) -> T:
    return value


def in_order(pool: Executor, function: Callable[[S], T], items: Iterable[S], ahead: int) -> Generator[T, None, None]:
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


def cut(rows: range, size: int) -> list[range]:
    """The rows in runs of `size`, the last one perhaps shorter.

    >>> cut(range(10, 15), 2)
    [range(10, 12), range(12, 14), range(14, 15)]
    """
    return [range(start, min(start + size, rows.stop)) for start in range(rows.start, rows.stop, size)]


class ImageRows:
    """Images in a fixed order.

    Attributes:
        pixels: files that are decoded when asked for, or an array that is read in slices.
        names: a path below the folder for each image, or row numbers.
        labels: (N,) positions in `classes`, or class indices where there are no `classes`; or None.
        classes: names of the classes, perhaps none.
        key: changes when an image is added, removed, written anew or replaced.
        source: for people.
        skipped: how many entries of a folder were passed over, by reason.
    """

    def __init__(
        self,
        pixels: Sequence[Pixels] | Sliceable,
        names: Names,
        labels: NDArray[np.int64] | None,
        classes: Sequence[str],
        key: str,
        source: str,
        skipped: Mapping[str, int] | None = None,
    ) -> None:
        self.pixels, self.names, self.labels = pixels, names, labels
        self.classes, self.key, self.source = tuple(classes), key, source
        self.skipped = dict(skipped or {})

    def __len__(self) -> int:
        return len(self.names)

    def spans(self, size: int) -> list[range]:
        """All rows in runs of `size`."""
        return cut(range(len(self)), size)


class Files(Sequence[Pixels]):
    """Image files below a folder, decoded when asked for. A file that is no longer the one that was listed cannot be
    read: its row would belong to other data than its neighbours."""

    def __init__(self, folder: str, names: Sequence[str]) -> None:
        self.folder, self.names = folder, names
        self._marks = np.array([_mark(self.path(index)) for index in range(len(names))], np.uint64)

    def path(self, index: int) -> str:
        return os.path.join(self.folder, self.names[index])

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: Any) -> Any:
        name = self.names[index]
        pixels = decode(self.path(index), name=name)
        if _mark(self.path(index)) != self._marks[index]:
            raise ImageError(f"{name} {CHANGED}")
        return pixels

    def key(self) -> str:
        """SHA-256 over the folder, the names, and what changes with each file."""
        digest = hashlib.sha256(os.path.abspath(self.folder).encode(errors="surrogateescape"))
        for name in self.names:
            digest.update(f"\0{name}".encode(errors="surrogateescape"))
        digest.update(self._marks.tobytes())
        return digest.hexdigest()


def _mark(path: str) -> int:
    """Eight bytes for what any machine says of a file, its size and time: a list of a million files stays small."""
    text = " ".join(stamp(path).split(" ")[:2])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def prepare(
    pixels: Sequence[Pixels] | Sliceable,
    preprocess: Preprocess,
    spans: Sequence[range],
    *,
    workers: int | None = None,
    processes: bool = False,
    pin: bool = False,
) -> Generator[Prepared, None, None]:
    """The images of each span of rows, in order, made ahead of the one who asks for them.

    Args:
        pixels: an array or `Sliceable`; or a sequence of images that are decoded when asked for, where an ImageError
            becomes a failure.
        preprocess: what the network expects.
        spans: which rows go together.
        workers: how many decode at once; None: one per core.
        processes: decode in processes instead of threads: for tiny images, where threads wait for each other.
        pin: into pinned memory, from which copies to CUDA go on beside the model.
    """
    made = _prepare(pixels, preprocess, spans, workers or _num_cores(), processes)
    return prefetch(_pinned(made) if pin else made, _PREPARED)


def _pinned(batches: Generator[Prepared, None, None]) -> Generator[Prepared, None, None]:
    with contextlib.closing(batches):
        for batch in batches:
            yield batch._replace(inputs=batch.inputs.pin_memory())


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
    import_pillow()  # here, so that a missing one is one sentence and no traceback of a worker's
    decoded = Decoded(pixels, preprocess, spans)
    results = by_processes(decoded, workers) if processes else by_threads(decoded, workers)
    with contextlib.closing(results):
        for rows, (images, failures) in zip(spans, results):
            yield Prepared(rows, preprocess.normalise(images), failures)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
