"""Micro-batching: requests that arrive together go through the model together."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from fdbd.serve.answers import Answers


class QueueFull(Exception):
    """More rows wait than the queue holds: come again later."""


class ShuttingDown(Exception):
    """The service finishes what it took and takes no more."""


class DeadlinePassed(Exception):
    """The answer was not ready in time."""


Rows = NDArray[np.float32]
Answer = asyncio.Future[Answers]


class Batcher:
    """Collects rows of concurrent requests and runs them through `decide` in one thread of its own.

    While the model works, requests wait in a queue; when it is free, as many rows as fit go through it together. A
    batch that is not full waits up to `delay` for company. A request whose caller has gone is left out.

    Args:
        decide: (N, …) rows to answers; an exception goes to the requests of that batch alone.
        size: the largest number of rows per batch. A request with more rows is a batch of its own.
        delay: seconds that a batch waits for company.
        capacity: the largest number of rows that wait.
        observe: called after each batch with its number of rows and its seconds.
    """

    def __init__(
        self,
        decide: Callable[[Rows], Answers],
        *,
        size: int = 32,
        delay: float = 0.001,
        capacity: int = 1024,
        observe: Callable[[int, float], object] | None = None,
    ) -> None:
        if size < 1 or capacity < size or delay < 0:
            raise ValueError(
                f"size {size}, capacity {capacity}, delay {delay}: expected 1 ≤ size ≤ capacity, delay ≥ 0"
            )
        self.size, self.delay, self.capacity = size, delay, capacity
        self.waiting = 0
        """Rows that wait now."""
        self._decide, self._observe = decide, observe
        self._queue: dict[Answer, Rows] = {}  # in the order of arrival
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fdbd-model")
        self._worker: asyncio.Task[None] | None = None
        self._is_open = False

    def start(self) -> None:
        """Begin to answer, in the running event loop."""
        self._is_open = True
        self._worker = asyncio.get_running_loop().create_task(self._work())

    async def stop(self) -> None:
        """Refuse new requests, answer those that wait, and end."""
        self._is_open = False
        self._arrived.set()
        if self._worker is not None:
            await self._worker
        self._thread.shutdown()

    async def submit(self, rows: Rows, timeout: float | None = None) -> Answers:
        """The answers on (N, …) rows. A cancelled call gives its place in the queue back.

        Raises QueueFull, ShuttingDown or DeadlinePassed; or whatever `decide` raised.
        """
        if not self._is_open:
            raise ShuttingDown
        if self.waiting and self.waiting + len(rows) > self.capacity:
            raise QueueFull
        answer: Answer = asyncio.get_running_loop().create_future()
        self._queue[answer] = rows
        self.waiting += len(rows)
        self._arrived.set()
        try:
            return await asyncio.wait_for(answer, timeout)
        except asyncio.TimeoutError:
            raise DeadlinePassed from None
        finally:
            self._leave(answer)

    async def _work(self) -> None:
        while True:
            if not self._queue:
                if not self._is_open:
                    return
                self._arrived.clear()
                await self._arrived.wait()
                continue
            if self.waiting < self.size and self.delay and self._is_open:
                await self._company()
            if batch := self._take():
                await self._run(batch)

    async def _company(self) -> None:
        """Wait until a batch is full or the delay is over."""
        end = time.monotonic() + self.delay
        while self.waiting < self.size and self._is_open and (left := end - time.monotonic()) > 0:
            self._arrived.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), left)

    def _take(self) -> dict[Answer, Rows]:
        """The requests of the next batch, all of one row shape."""
        batch: dict[Answer, Rows] = {}
        count = 0
        for answer, rows in self._queue.items():
            first = next(iter(batch.values()), rows)
            if batch and (count + len(rows) > self.size or rows.shape[1:] != first.shape[1:]):
                break
            batch[answer] = rows
            count += len(rows)
        for answer in batch:
            self._leave(answer)
        return batch

    def _leave(self, answer: Answer) -> None:
        """Give a request's place in the queue back, where it still has one."""
        if (rows := self._queue.pop(answer, None)) is not None:
            self.waiting -= len(rows)

    async def _run(self, batch: dict[Answer, Rows]) -> None:
        parts = list(batch.values())
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        start = time.perf_counter()
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._decide, rows)
        except Exception as error:
            for answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            return
        if self._observe is not None:
            self._observe(len(rows), time.perf_counter() - start)
        place = 0
        for answer, part in batch.items():
            stop = place + len(part)
            if not answer.done():  # its caller may have left meanwhile
                answer.set_result(answers.rows(place, stop))
            place = stop
