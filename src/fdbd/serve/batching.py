"""Micro-batching: requests that arrive together go through the model together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.exceptions import HTTPException

from fdbd.serve.backend import Answers

log = logging.getLogger("fdbd.serve")

Rows = NDArray[Any]
Answer = asyncio.Future[Answers]
SLOW = 0.05
"""Seconds per batch from which on a model is slow."""


class ModelFailure(Exception):
    """The model raised an error, or ended its thread, while it decided a batch."""


class Batcher:
    """Collects rows of concurrent requests and runs them through `decide` in threads of its own.

    The callers of a batch often come back together, so the next one waits for as many rows, up to
    `delay` or a twentieth of the model's time; a caller alone is answered at once. A slow model
    takes two batches at a time under load, each with half the cores: halves that do not wait for
    each other at every layer get more done. A fast one would lose more to Python's lock than it
    gains.

    Args:
        decide: (N, …) rows to answers; an exception goes to the requests of that batch alone.
        size: the largest number of rows per batch. A request with more rows is decided in pieces.
        delay: seconds that a batch may wait for more requests; 0: none waits.
        capacity: the largest number of rows that wait.
        patience: seconds that a batch may take. After that, new requests are refused until the
            model has answered again.
        enter: called once by each thread that decides, with the number of threads that share the
            cores, 1 or 2; None: batches go through the model one by one.
        observe: called after each batch with its answers and its seconds.
    """

    def __init__(
        self,
        decide: Callable[[Rows], Answers],
        *,
        size: int = 32,
        delay: float = 0.001,
        capacity: int = 1024,
        patience: float = 30.0,
        enter: Callable[[int], object] | None = None,
        observe: Callable[[Answers, float], object] = lambda answers, seconds: None,
    ) -> None:
        self.size = size
        self.delay = delay
        self.capacity = capacity
        self.patience = patience
        self.waiting = 0
        """Rows that wait now."""
        self.is_failing = False
        """Whether the model failed on the latest batch."""
        self._decide = decide
        self._observe = observe
        # Requests in the order of arrival.
        self._queue: dict[Answer, Rows] = {}
        # Set when a request has arrived, a batch is done, or the end is near.
        self._changed = asyncio.Event()
        # Rows of the batch before, if they came from several callers.
        self._company = 0
        self._alone = _threads(1, enter)
        self._together = _threads(2, enter)
        self._lanes = 1 if enter is None else 2
        self._collecting = asyncio.Lock()
        # Rows that go through the model now, and when each batch under way began.
        self._running = 0
        self._began: dict[object, float] = {}
        # Both follow from the model's time for the batch before.
        self._wait_for_company = 0.0
        self._is_slow = False
        self._workers: list[asyncio.Task[None]] = []
        self._is_open = False

    def start(self) -> None:
        """Begin to answer, in the running event loop."""
        self._is_open = True
        loop = asyncio.get_running_loop()
        self._workers = [loop.create_task(self._work()) for _ in range(self._lanes)]

    async def stop(self, seconds: float | None = None) -> None:
        """Refuse new requests, answer those that wait, and end; after so many seconds, give up
        those that a model has not answered."""
        self._is_open = False
        self._changed.set()
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=seconds)
            for worker in late:
                worker.cancel()
        for answer in list(self._queue):
            answer.cancel()
        is_idle = not self._began
        self._alone.shutdown(wait=is_idle, cancel_futures=True)
        self._together.shutdown(wait=is_idle, cancel_futures=True)

    @property
    def running_for(self) -> float:
        """Seconds since the oldest batch under way began; 0 if there is none."""
        if not self._began:
            return 0.0
        return time.monotonic() - min(self._began.values())

    @property
    def is_stuck(self) -> bool:
        """Whether the model works on a batch for longer than a request may take."""
        return self.running_for > self.patience

    def submit(self, rows: Rows) -> Answer:
        """A future of the answers on (N, …) rows. To cancel it gives its place in the queue back.

        Raises HTTPException 503 if the queue is full, the model is stuck or the service shuts down.
        """
        if not self._is_open:
            raise HTTPException(503, "the service is shutting down", {"retry-after": "5"})
        if self.is_stuck:
            reason = f"the model has not answered for {self.running_for:.0f} s; come again later"
            raise HTTPException(503, reason, {"retry-after": "5"})
        # An empty queue takes a request of any size, which could never be answered otherwise.
        if self.waiting and self.waiting + len(rows) > self.capacity:
            raise HTTPException(503, "the queue is full; come again later", {"retry-after": "1"})
        if len(rows) <= self.size:
            return self._enter(rows)
        # In pieces of a batch's size: the request then takes no more memory than a batch, and once
        # it is cancelled, the pieces that still wait are dropped.
        pieces = []
        for start in range(0, len(rows), self.size):
            pieces.append(self._enter(rows[start : start + self.size]))
        return asyncio.ensure_future(_joined(pieces))

    def _enter(self, rows: Rows) -> Answer:
        """Put one request at the end of the queue."""
        answer: Answer = asyncio.get_running_loop().create_future()
        answer.add_done_callback(self._leave)
        self._queue[answer] = rows
        self.waiting += len(rows)
        self._changed.set()
        return answer

    async def try_model(self, rows: Rows) -> None:
        """Have the model decide rows that nobody asked about, to see whether it works again."""
        found = await self._through_model(self._alone, [rows])
        self.is_failing = isinstance(found, ModelFailure)

    def _leave(self, answer: Answer) -> None:
        """Give a request's place in the queue back, if it still has one."""
        rows = self._queue.pop(answer, None)
        if rows is not None:
            self.waiting -= len(rows)

    async def _work(self) -> None:
        while self._is_open or self._queue:
            async with self._collecting:
                batch = await self._collect()
            if batch:
                await self._run(batch)

    async def _collect(self) -> list[tuple[Answer, Rows]]:
        """The requests that have waited longest, as many as fit into a batch: half of all under way
        if the model is slow. None of them if the service ends."""
        await self._until(self._can_begin)
        if self.waiting < self._company and self._wait_for_company:
            together = self._until(self._all_are_back)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(together, self._wait_for_company)
        under_way = self.waiting + self._running
        most = self.size
        if self._is_slow:
            most = min(most, math.ceil(under_way / 2))
        batch: list[tuple[Answer, Rows]] = []
        count = 0
        for answer, rows in list(self._queue.items()):
            if batch and count + len(rows) > most:
                break
            count += len(rows)
            self._leave(answer)
            batch.append((answer, rows))
        return batch

    def _can_begin(self) -> bool:
        if self._running and not self._is_slow:
            return False
        return bool(self._queue) or not self._is_open

    def _all_are_back(self) -> bool:
        return self.waiting >= self._company or not self._is_open

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._changed.clear()
            await self._changed.wait()

    async def _run(self, batch: list[tuple[Answer, Rows]]) -> None:
        start = time.perf_counter()
        count = sum(len(rows) for _, rows in batch)
        is_alone = len(batch) == 1 and not self._running and not self._queue
        threads = self._together if self._is_slow and not is_alone else self._alone
        self._company = 0 if is_alone else count
        self._running += count
        try:
            found = await self._through_model(threads, [rows for _, rows in batch])
        finally:
            self._running -= count
            self._changed.set()
        seconds = time.perf_counter() - start
        self.is_failing = isinstance(found, ModelFailure)
        if isinstance(found, Answers):
            self._note(found, seconds)
        _give_answers(batch, found)
        self._wait_for_company = max(self.delay, seconds / 20) if self.delay else 0.0
        self._is_slow = self._lanes > 1 and seconds > SLOW

    def _note(self, found: Answers, seconds: float) -> None:
        """Have the answers on a batch counted. They are right even if that goes wrong."""
        try:
            self._observe(found, seconds)
        except Exception as error:
            log.error("a batch could not be counted: %r", error, exc_info=error)

    async def _through_model(
        self, threads: ThreadPoolExecutor, rows: list[Rows]
    ) -> Answers | ModelFailure:
        """The model's answers on the rows of some requests, or its failure."""
        batch = object()
        self._began[batch] = time.monotonic()
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(threads, self._guarded, rows)
        except RuntimeError as error:
            # The system gives this process no further thread, for instance.
            return _failure(error)
        finally:
            del self._began[batch]

    def _guarded(self, rows: list[Rows]) -> Answers | ModelFailure:
        # BaseException: a model that calls sys.exit must not end the lane, nor the event loop.
        try:
            joined = rows[0] if len(rows) == 1 else np.concatenate(rows)
            answers = self._decide(joined)
            if len(answers.labels) != len(joined):
                raise ValueError(f"it answered {len(answers.labels)} of {len(joined)} rows")
            return answers
        except BaseException as error:
            return _failure(error)


def _failure(error: BaseException) -> ModelFailure:
    log.error("the model failed on a batch: %r", error)
    failure = ModelFailure(repr(error))
    failure.__cause__ = error
    return failure


def _threads(count: int, enter: Callable[[int], object] | None) -> ThreadPoolExecutor:
    initializer = None if enter is None else partial(enter, count)
    return ThreadPoolExecutor(count, "fdbd-model", initializer)


async def _joined(pieces: list[Answer]) -> Answers:
    """The answers on all pieces of a request, in their order."""
    found = await asyncio.gather(*pieces)
    return Answers.joined(found)


def _give_answers(batch: list[tuple[Answer, Rows]], found: Answers | ModelFailure) -> None:
    """Each request its rows, or the failure that all of the batch share."""
    place = 0
    for answer, rows in batch:
        # A caller may have left meanwhile, which cancels its answer.
        if not answer.done():
            if isinstance(found, ModelFailure):
                answer.set_exception(found)
            else:
                answer.set_result(found.rows(place, place + len(rows)))
        place += len(rows)
