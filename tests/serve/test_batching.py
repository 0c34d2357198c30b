"""Micro-batches: together where they arrive together, refused where they do not fit, dropped where
nobody waits."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import socket
import threading
import time

import numpy as np
import pytest
from starlette.exceptions import HTTPException

from fdbd.serve.backend import Answers
from fdbd.serve.batching import SLOW, Batcher, ModelFailure
from fdbd.serve.run import Service, bind
from fdbd.serve.run import run as run_service


def answers(rows: np.ndarray) -> Answers:
    """Scores that name their row, so that a mixed-up answer shows."""
    first = rows.reshape(len(rows), -1)[:, 0].astype(np.float64)
    labels = np.zeros(len(rows), np.int64)
    return Answers(rows.astype(np.float32), labels, first, first, np.zeros(len(rows), bool))


def rows(*values: float) -> np.ndarray:
    return np.array(values, np.float32)[:, None]


class Model:
    """Answers when it is let, and remembers the sizes of its batches."""

    def __init__(self, *, held: bool = False) -> None:
        self.gate, self.started, self.sizes = threading.Event(), threading.Event(), []
        if not held:
            self.gate.set()

    def __call__(self, batch: np.ndarray) -> Answers:
        self.started.set()
        self.gate.wait(20)
        self.sizes.append(len(batch))
        return answers(batch)


def run(program) -> None:
    asyncio.run(asyncio.wait_for(program(), 30))


async def running(model: Model, **options) -> Batcher:
    batcher = Batcher(model, **options)
    batcher.start()
    return batcher


async def until_started(model: Model) -> None:
    assert await asyncio.to_thread(model.started.wait, 10)


def test_each_caller_gets_its_own_rows_in_order() -> None:
    async def program() -> None:
        batcher = await running(Model(), size=8)
        asked = [rows(*range(start, start + 1 + start % 3)) for start in range(0, 90, 3)]
        found = await asyncio.gather(*(batcher.submit(part) for part in asked))
        for part, answer in zip(asked, found):
            assert answer.scores.tolist() == part[:, 0].tolist()
        await batcher.stop()

    run(program)


def test_requests_that_wait_together_go_through_the_model_together() -> None:
    async def program() -> None:
        model = Model(held=True)
        batcher = await running(model, size=8, delay=0)
        first = batcher.submit(rows(0))
        await until_started(model)
        others = [batcher.submit(rows(value)) for value in range(1, 13)]
        await asyncio.sleep(0.01)
        assert batcher.waiting == 12
        model.gate.set()
        await asyncio.gather(first, *others)
        assert model.sizes == [1, 8, 4]
        assert batcher.waiting == 0
        await batcher.stop()

    run(program)


def test_a_full_queue_refuses_and_a_place_given_back_is_free_again() -> None:
    async def program() -> None:
        model = Model(held=True)
        batcher = await running(model, size=2, capacity=2, delay=0)
        first = batcher.submit(rows(0))
        await until_started(model)
        leaving = batcher.submit(rows(1, 2))
        await asyncio.sleep(0.01)
        with pytest.raises(HTTPException, match="queue is full"):
            await batcher.submit(rows(3))
        leaving.cancel()
        await asyncio.sleep(0.01)
        staying = batcher.submit(rows(4))
        await asyncio.sleep(0.01)
        model.gate.set()
        assert (await staying).scores.tolist() == [4.0]
        await first
        assert model.sizes == [1, 1], "rows whose caller left went through the model"
        await batcher.stop()

    run(program)


def test_stopping_answers_what_was_taken_and_refuses_the_rest() -> None:
    async def program() -> None:
        model = Model(held=True)
        batcher = await running(model, size=2)
        taken = [batcher.submit(rows(value)) for value in range(5)]
        await until_started(model)
        stopping = asyncio.ensure_future(batcher.stop())
        await asyncio.sleep(0.01)
        with pytest.raises(HTTPException, match="shutting down"):
            await batcher.submit(rows(9))
        model.gate.set()
        assert [answer.scores.tolist() for answer in await asyncio.gather(*taken)] == [
            [0.0],
            [1.0],
            [2.0],
            [3.0],
            [4.0],
        ]
        await stopping

    run(program)


def test_an_error_of_the_model_reaches_its_own_batch_alone() -> None:
    def decide(batch: np.ndarray) -> Answers:
        if batch.max() > 100:
            raise RuntimeError("too hot")
        return answers(batch)

    async def program() -> None:
        batcher = Batcher(decide, size=1)
        batcher.start()
        hot, cold = await asyncio.gather(
            batcher.submit(rows(101)), batcher.submit(rows(1)), return_exceptions=True
        )
        assert isinstance(hot, ModelFailure)
        assert isinstance(hot.__cause__, RuntimeError)
        assert cold.scores.tolist() == [1.0]
        await batcher.stop()

    run(program)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, BaseException])
def test_a_model_that_ends_its_thread_does_not_end_the_batching(error) -> None:
    def decide(batch: np.ndarray) -> Answers:
        if batch.max() > 100:
            raise error("over")
        return answers(batch)

    async def program() -> None:
        batcher = Batcher(decide, size=1)
        batcher.start()
        with pytest.raises(ModelFailure):
            await batcher.submit(rows(101))
        assert batcher.is_failing
        assert (await batcher.submit(rows(1))).scores.tolist() == [1.0]
        assert not batcher.is_failing
        await batcher.stop()

    run(program)


def test_answers_that_cannot_be_counted_are_given_and_so_are_the_next() -> None:
    def observe(found: Answers, seconds: float) -> None:
        raise KeyError("no such counter")

    async def program() -> None:
        batcher = await running(Model(), observe=observe)
        for value in (1.0, 2.0):
            assert (await batcher.submit(rows(value))).scores == [value]
        assert not batcher.is_failing
        await batcher.stop()

    run(program)


def test_a_thread_that_cannot_start_is_a_failure_and_nobody_waits_for_it() -> None:
    def enter(sharing: int) -> None:
        raise OSError("no more threads")

    async def program() -> None:
        batcher = await running(Model(), enter=enter)
        for _ in range(3):
            with pytest.raises(ModelFailure):
                await batcher.submit(rows(1.0))
        assert batcher.is_failing
        await batcher.stop()

    run(program)


def test_a_model_with_too_few_answers_has_failed() -> None:
    async def program() -> None:
        batcher = Batcher(lambda batch: answers(batch[:1]))
        batcher.start()
        with pytest.raises(ModelFailure, match="answered 1 of 2 rows"):
            await batcher.submit(rows(1.0, 2.0))
        assert (await batcher.submit(rows(3.0))).scores == [3.0]
        await batcher.stop()

    run(program)


def test_a_batcher_whose_model_hangs_says_so_refuses_and_can_be_stopped() -> None:
    async def program() -> None:
        model = Model(held=True)
        batcher = await running(model, patience=0.05)
        asked = batcher.submit(rows(1))
        await until_started(model)
        await asyncio.sleep(0.1)
        assert batcher.is_stuck
        with pytest.raises(HTTPException, match="has not answered"):
            batcher.submit(rows(2))
        await batcher.stop(0.05)
        assert not asked.done() or asked.cancelled()
        model.gate.set()

    run(program)


def test_a_lone_caller_does_not_wait_for_company() -> None:
    async def program() -> None:
        model = Model()
        batcher = await running(model, size=8, delay=60.0)
        for value in (1.0, 2.0, 3.0):
            assert (await batcher.submit(rows(value))).scores.tolist() == [value]
        assert model.sizes == [1, 1, 1]
        await batcher.stop()

    # Ends after 30 s.
    run(program)


def test_callers_that_came_together_are_waited_for_until_all_are_back() -> None:
    async def program() -> None:
        model = Model(held=True)
        batcher = await running(model, size=8, delay=60.0)
        first = batcher.submit(rows(0))
        await until_started(model)
        together = [batcher.submit(rows(value)) for value in (1, 2, 3)]
        model.gate.set()
        await asyncio.gather(first, *together)
        back = [batcher.submit(rows(value)) for value in (4, 5)]
        await asyncio.sleep(0.05)
        assert batcher.waiting == 2, "a batch of two went ahead, though three were there before"
        back.append(batcher.submit(rows(6)))
        await asyncio.gather(*back)
        assert model.sizes == [1, 3, 3]
        await batcher.stop()

    # Ends after 30 s, before the delay does.
    run(program)


def test_a_slow_model_takes_two_batches_at_a_time_under_load_and_a_lone_request_with_all_cores() -> (
    None
):
    entered: dict[int, int] = {}
    decided: list[tuple[int, int]] = []
    both = threading.Barrier(2, timeout=20)

    def decide(batch: np.ndarray) -> Answers:
        sharing = entered[threading.get_ident()]
        decided.append((sharing, len(batch)))
        if sharing == 2:
            # Ends only if two batches are under way at the same time.
            both.wait()
        else:
            time.sleep(2 * SLOW)
        return answers(batch)

    async def program() -> None:
        batcher = Batcher(
            decide, size=8, enter=lambda n: entered.update({threading.get_ident(): n})
        )
        batcher.start()
        assert (await batcher.submit(rows(1))).scores.tolist() == [1.0]
        found = await asyncio.gather(*(batcher.submit(rows(value)) for value in range(8)))
        assert [answer.scores.tolist() for answer in found] == [[value] for value in range(8)]
        assert (await batcher.submit(rows(2))).scores.tolist() == [2.0]
        await batcher.stop()
        assert decided == [(1, 1), (2, 4), (2, 4), (1, 1)]

    run(program)


def test_an_answer_in_two_segments_does_not_wait_for_the_clients_acknowledgement() -> None:
    with bind("127.0.0.1", 0) as listening:
        listening.listen()
        with socket.create_connection(listening.getsockname()), listening.accept()[0] as taken:
            assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_supervisor_can_be_told_to_end_while_its_processes_start(monkeypatch) -> None:
    spawn = multiprocessing.get_context("spawn")
    installed = {}

    def start(_: object) -> None:
        raise ChildProcessError

    monkeypatch.setattr(spawn.Process, "start", start)
    monkeypatch.setattr(signal, "signal", installed.__setitem__)
    with pytest.raises(ChildProcessError):
        run_service(Service({"guard": "guard.onnx"}, workers=2), "127.0.0.1", 0)
    assert {signal.SIGINT, signal.SIGTERM} <= set(installed)
