"""The threads that decode: what they say of themselves while some of them are busy."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from fdbd.serve.images import ImageDecoder
from fdbd.serve.memory import MemoryBudget


def request(budget: MemoryBudget) -> SimpleNamespace:
    """What a decoder needs to know of a request."""
    return SimpleNamespace(deadline=SimpleNamespace(remaining=60.0), memory=budget.share())


@pytest.fixture
def decoder():
    budget = MemoryBudget(10**8)
    decoder = ImageDecoder(budget, threads=1, max_pixels=10**6, keep_small=False)
    decoder.budget = budget
    return decoder


def test_one_slow_image_beside_others_is_not_taken_for_decoders_that_are_stuck(decoder) -> None:
    gate = threading.Event()

    async def ask() -> None:
        slow = asyncio.ensure_future(decoder.run_large(request(decoder.budget), gate.wait))
        while not decoder.longest_running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        assert decoder.stuck_for >= 0.4
        await decoder.run(request(decoder.budget), time.sleep, 0.01)
        assert decoder.stuck_for < decoder.longest_running - 0.3
        gate.set()
        await slow
        assert decoder.stuck_for == decoder.longest_running == 0.0

    asyncio.run(ask())


def test_a_decoder_that_ended_long_ago_does_not_count_as_stuck_when_the_next_begins(
    decoder,
) -> None:
    async def ask() -> None:
        await decoder.run(request(decoder.budget), time.sleep, 0.01)
        await asyncio.sleep(0.5)
        started = threading.Event()
        gate = threading.Event()

        def wait() -> None:
            started.set()
            gate.wait()

        asked = asyncio.ensure_future(decoder.run(request(decoder.budget), wait))
        await asyncio.to_thread(started.wait)
        assert decoder.stuck_for < 0.4
        gate.set()
        await asked

    asyncio.run(ask())
