"""The threads that decode: what they say of themselves while some of them are busy."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from types import SimpleNamespace

import pytest
from PIL import Image

from fdbd.core.pixels import ImageError
from fdbd.core.preprocessing import Preprocess
from fdbd.serve.images import MOST_READS, DecodedImage, ImageDecoder
from fdbd.serve.memory import MemoryBudget, OutOfMemory, TooLargeForMemory


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


SIDE = 8


def encoded(kind: str, width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, kind)
    return buffer.getvalue()


def decoded(decoder: ImageDecoder, content: bytes) -> DecodedImage:
    asked = request(decoder.budget)
    return asyncio.run(decoder.decode(content, Preprocess(SIDE), (3, SIDE, SIDE), asked))


@pytest.mark.parametrize(
    "filling",
    [b"\xff" * (MOST_READS + 1), b"\xff\xfe\x00\x02" * MOST_READS],
    ids=["padding", "comments"],
)
def test_a_file_of_countless_pieces_is_not_read_to_its_end(decoder, filling: bytes) -> None:
    photo = encoded("JPEG", 20, 20)
    assert decoded(decoder, photo).row.shape == (3, SIDE, SIDE)
    with pytest.raises(ImageError, match="more than 500,000 pieces"):
        decoded(decoder, photo[:2] + filling + photo[2:])


def test_the_tiles_of_a_small_image_are_bounded_as_images_are(decoder, tiff_of_tiles) -> None:
    assert decoded(decoder, tiff_of_tiles(16)).row.shape == (3, SIDE, SIDE)
    with pytest.raises(ImageError, match=r"tiles of 16,777,216 pixels.*--max-pixels"):
        decoded(decoder, tiff_of_tiles(4096))


@pytest.mark.parametrize(("kind", "held"), [("WEBP", 22), ("PNG", 12)])
def test_memory_is_taken_for_what_a_decoder_holds_beside_the_image(kind: str, held: int) -> None:
    budget = MemoryBudget(100_000_000)
    decoder = ImageDecoder(budget, threads=1, max_pixels=10**6, keep_small=False)
    decoder.budget = budget
    photo = encoded(kind, 1000, 1000)
    decoded(decoder, photo)
    assert held * 1_000_000 <= budget.most_used <= 2 * held * 1_000_000
    assert budget.used == 0


def test_memory_is_taken_for_a_jpeg_with_a_scan_for_each_colour_at_its_whole_size() -> None:
    budget = MemoryBudget(90_000_000)
    decoder = ImageDecoder(budget, threads=1, max_pixels=10**6, keep_small=False)
    decoder.budget = budget
    photo = encoded("JPEG", 4000, 4000)
    decoded(decoder, photo)

    place = photo.index(b"\xff\xda")
    scan_of_one = bytes([0xFF, 0xDA, 0, 8, 1, 1, 0, 0, 63, 0])
    photo = photo[:place] + scan_of_one + photo[place + 14 :]
    with pytest.raises(TooLargeForMemory):
        decoded(decoder, photo)


def test_what_never_fits_is_told_so_and_what_does_not_fit_now_may_come_again() -> None:
    budget = MemoryBudget(1000)
    share = budget.share()
    share.take(600)
    other = budget.share()
    with pytest.raises(OutOfMemory) as refused:
        other.take(600)
    assert refused.value.status_code == 503
    for take in (lambda: budget.take(1001), lambda: share.take(401)):
        with pytest.raises(TooLargeForMemory) as refused:
            take()
        assert refused.value.status_code == 413
        assert "for all requests (--memory)" in refused.value.detail
    share.let_go()
    other.take(600)
