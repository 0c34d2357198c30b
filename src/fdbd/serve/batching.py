"""Micro-batching: requests that arrive together go through the model together."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray
from starlette.exceptions import HTTPException

from fdbd.serve.answers import Answers

Rows = NDArray[np.float32]
Answer = asyncio.Future[Answers]


class Batcher:
    """Collects rows of concurrent requests and runs them through `decide` in one thread of its own.

    While the model works, requests wait in a queue; when it is free, as many rows as fit go through it together. The
    callers of a batch often come back together, so the next one waits for as many rows, up to `delay` or a twentieth of
    the model's time; who is alone is answered at once. A request whose caller has gone is left out.

    Args:
        decide: (N, …) rows to answers; an exception goes to the requests of that batch alone.
        size: the largest number of rows per batch. A request with more rows is a batch of its own.
        delay: seconds that a batch waits for company; 0: none does.
        capacity: the largest number of rows that wait.
        observe: called after each batch with its answers and its seconds.
    """

    def __init__(
        self,
        decide: Callable[[Rows], Answers],
        *,
        size: int = 32,
        delay: float = 0.001,
        capacity: int = 1024,
        observe: Callable[[Answers, float], object] = lambda answers, seconds: None,
    ) -> None:
        self.size, self.delay, self.capacity = size, delay, capacity
        self.waiting = 0
        """Rows that wait now."""
        self._decide, self._observe = decide, observe
        self._queue: dict[Answer, Rows] = {}  # in the order of arrival
        self._arrived, self._gathered = asyncio.Event(), asyncio.Event()
        self._company = 0  # rows of the batch before, where they came from several callers
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
        self._gathered.set()
        if self._worker is not None:
            await self._worker
        self._thread.shutdown()

    def submit(self, rows: Rows) -> Answer:
        """The answers on (N, …) rows, in time; cancelled, the future gives its place in the queue back.

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
        self._arrived.set()
        if self.waiting >= self._company:
            self._gathered.set()
        return answer

    def _leave(self, answer: Answer) -> None:
        """Give a request's place in the queue back, where it still has one."""
        self.waiting -= len(self._queue.pop(answer, ()))

    async def _work(self) -> None:
        patience = 0.0
        while self._is_open or self._queue:
            if not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
            if self.waiting < self._company and patience and self._is_open:
                self._gathered.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._gathered.wait(), patience)
            batch: list[tuple[Answer, Rows]] = []
            count = 0
            for answer, rows in list(self._queue.items()):
                if batch and count + len(rows) > self.size:
                    break
                count += len(rows)
                self._leave(answer)
                batch.append((answer, rows))
            if batch:
                self._company, start = count if len(batch) > 1 else 0, time.monotonic()
                await self._run(batch)
                patience = self.delay and max(self.delay, (time.monotonic() - start) / 20)

    async def _run(self, batch: list[tuple[Answer, Rows]]) -> None:
        rows = batch[0][1] if len(batch) == 1 else np.concatenate([rows for _, rows in batch])
        start = time.perf_counter()
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._decide, rows)
        except Exception as error:
            for answer, _ in batch:
                if not answer.done():
                    answer.set_exception(error)
            return
        self._observe(answers, time.perf_counter() - start)
        place = 0
        for answer, rows in batch:
            if not answer.done():  # its caller may have left meanwhile
                answer.set_result(answers.rows(place, place + len(rows)))
            place += len(rows)
