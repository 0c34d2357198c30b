"""Micro-batching: requests that arrive together go through the model together."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray
from starlette.exceptions import HTTPException

from fdbd.serve.backend import Answers

Rows = NDArray[np.float32]
Answer = asyncio.Future[Answers]
SLOW = 0.05  # seconds per batch from which on a model is slow


class Batcher:
    """Collects rows of concurrent requests and runs them through `decide` in threads of its own.

    The callers of a batch often come back together, so the next one waits for as many rows, up to
    `delay` or a twentieth of the model's time; a caller alone is answered at once. A slow model
    takes two batches at a time under load, each with half the cores: halves that do not wait for
    each other at every layer get more done. A fast one would lose more to Python's lock than it
    gains.

    Args:
        decide: (N, …) rows to answers; an exception goes to the requests of that batch alone.
        size: the largest number of rows per batch. A request with more rows is a batch of its own.
        delay: seconds that a batch may wait for more requests; 0: none waits.
        capacity: the largest number of rows that wait.
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
        enter: Callable[[int], object] | None = None,
        observe: Callable[[Answers, float], object] = lambda answers, seconds: None,
    ) -> None:
        self.size, self.delay, self.capacity = size, delay, capacity
        self.waiting = 0  # rows that wait now
        self._decide, self._observe = decide, observe
        self._queue: dict[Answer, Rows] = {}  # in the order of arrival
        self._changed = (
            asyncio.Event()
        )  # a request has arrived, a batch is done, or the end is near
        self._company = 0  # rows of the batch before, where they came from several callers
        self._alone, self._together = (
            ThreadPoolExecutor(count, "fdbd-model", enter and partial(enter, count))
            for count in (1, 2)
        )
        self._lanes, self._collecting = 1 if enter is None else 2, asyncio.Lock()
        self._running = 0  # rows that go through the model now
        self._patience, self._is_slow = 0.0, False  # by the model's time for the batch before
        self._workers: list[asyncio.Task[None]] = []
        self._is_open = False

    def start(self) -> None:
        """Begin to answer, in the running event loop."""
        self._is_open = True
        self._workers = [
            asyncio.get_running_loop().create_task(self._work()) for _ in range(self._lanes)
        ]

    async def stop(self) -> None:
        """Refuse new requests, answer those that wait, and end."""
        self._is_open = False
        self._changed.set()
        await asyncio.gather(*self._workers)
        self._alone.shutdown()
        self._together.shutdown()

    def submit(self, rows: Rows) -> Answer:
        """The answers on (N, …) rows, in time; cancelled, the future gives its place in the queue
        back.

        Raises HTTPException 503 where the queue is full or the service shuts down.
        """
        if not self._is_open:
            raise HTTPException(503, "the service is shutting down", {"retry-after": "5"})
        if self.waiting and self.waiting + len(rows) > self.capacity:
            raise HTTPException(503, "the queue is full; come again later", {"retry-after": "1"})
        answer: Answer = asyncio.get_running_loop().create_future()
        answer.add_done_callback(self._leave)
        self._queue[answer] = rows
        self.waiting += len(rows)
        self._changed.set()
        return answer

    def _leave(self, answer: Answer) -> None:
        """Give a request's place in the queue back, where it still has one."""
        self.waiting -= len(self._queue.pop(answer, ()))

    async def _work(self) -> None:
        while self._is_open or self._queue:
            async with self._collecting:
                batch = await self._collect()
            if batch:
                await self._run(batch)

    async def _collect(self) -> list[tuple[Answer, Rows]]:
        """The requests that have waited longest, as many as fit into a batch: half of all under way
        where the model is slow. None of them where the service ends."""
        await self._until(
            lambda: (self._is_slow or not self._running) and bool(self._queue or not self._is_open)
        )
        if self.waiting < self._company and self._patience:
            together = self._until(lambda: self.waiting >= self._company or not self._is_open)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(together, self._patience)
        most = min(self.size, -(-(self.waiting + self._running) // (2 if self._is_slow else 1)))
        batch: list[tuple[Answer, Rows]] = []
        count = 0
        for answer, rows in list(self._queue.items()):
            if batch and count + len(rows) > most:
                break
            count += len(rows)
            self._leave(answer)
            batch.append((answer, rows))
        return batch

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._changed.clear()
            await self._changed.wait()

    async def _run(self, batch: list[tuple[Answer, Rows]]) -> None:
        start, count, place = time.perf_counter(), sum(len(rows) for _, rows in batch), 0
        is_alone = len(batch) == 1 and not self._running and not self._queue
        thread = self._together if self._is_slow and not is_alone else self._alone
        self._company = 0 if is_alone else count
        self._running += count
        found: Answers | Exception
        try:
            rows = batch[0][1] if len(batch) == 1 else np.concatenate([rows for _, rows in batch])
            found = await asyncio.get_running_loop().run_in_executor(thread, self._decide, rows)
            self._observe(found, time.perf_counter() - start)
        except Exception as error:
            found = error
        for answer, rows in batch:
            if not answer.done():  # its caller may have left meanwhile
                if isinstance(found, Exception):
                    answer.set_exception(found)
                else:
                    answer.set_result(found.rows(place, place + len(rows)))
            place += len(rows)
        seconds = time.perf_counter() - start
        self._running -= count
        self._patience = self.delay and max(self.delay, seconds / 20)
        self._is_slow = self._lanes > 1 and seconds > SLOW
        self._changed.set()
