"""Encoded images to rows of a guard's input: in threads of their own, within the memory budget."""

from __future__ import annotations

import asyncio
import io
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fdbd.core.image_headers import decoder_holds_all
from fdbd.core.pixels import (
    ImageError,
    Pixels,
    load_pixels,
    open_image,
    small_copy,
    tile_pixels,
)
from fdbd.core.preprocessing import Preprocess
from fdbd.serve.asked import Asked
from fdbd.serve.memory import MemoryBudget

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
"""What is decoded for strangers. PPM is left out: its text form is parsed in Python, slowly."""
MAX_SCANS = 64
"""A progressive JPEG has about ten scans. Each scan may cost as much as decoding the image."""
MOST_READS = 500_000
"""Pieces in which a decoder may read a file. Headers, and the runs of some formats, are read in
Python, a few bytes at a time; a photograph takes some thousand pieces."""
BYTES_PER_PIXEL = 16
"""Pillow's image (4), a converted or upright copy (4), the array (3), and what a decoder needs
beside: a progressive JPEG is held as coefficients."""
_PER_PIXEL_16_BIT = 32
"""An image of 16 bits is brought to 8 through integers of 64."""
_PER_PIXEL_WEBP = 24
"""Its decoder also holds the picture and the one before, for animations."""
_PER_PIXEL_OF_TILE = 8
"""Of a TIFF's tile, which may have four channels of 16 bits."""
MAX_TEXTS = 16
"""Compressed texts of a PNG; Pillow unpacks them before the first pixel."""
_LARGE_PIXELS = 2_000_000
"""Pixels from which on an image is decoded in the thread for large ones."""
_TEXT_CHUNK = 1024**2
"""Bytes that a compressed text of a PNG may have once it is unpacked."""
_THUMBNAIL_SIDE = 96


class DecodedImage(NamedTuple):
    """An image, ready for the model."""

    row: NDArray[np.float32]
    small: Pixels | None
    """A small copy for the page; None if no thumbnails are kept."""


class _Content(io.BytesIO):
    """The bytes of an image, which are read in at most `MOST_READS` pieces."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self._reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads += 1
        if self._reads > MOST_READS:
            raise ImageError(f"the image is made of more than {MOST_READS:,} pieces")
        return super().read(size)


class ImageDecoder:
    """A bounded pool of threads that decode. Large images wait for each other in a thread of their
    own, so that small ones do not wait for them.

    Args:
        budget: what decoded pixels are taken from while they are needed.
        threads: small images decoded at the same time.
        max_pixels: pixels of an image as it is decoded. A JPEG that has more is decoded at a half,
            a quarter or an eighth of its size if that is within the limit and not below twice the
            size that the guard needs; all others are decoded as `fdbd score` does.
        keep_small: whether small copies for the page are made.
    """

    def __init__(
        self, budget: MemoryBudget, *, threads: int, max_pixels: int, keep_small: bool
    ) -> None:
        self._budget = budget
        self._max_pixels = max_pixels
        self._keep_small = keep_small
        self._threads = ThreadPoolExecutor(threads, "fdbd-decode")
        self._for_large = ThreadPoolExecutor(1, "fdbd-decode-large")
        self._began: dict[int, float] = {}
        self._ended = -math.inf
        self._lock = threading.Lock()

    @property
    def longest_running(self) -> float:
        """Seconds for which the oldest decoding has been running; 0 if there is none."""
        with self._lock:
            oldest = min(self._began.values(), default=None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    @property
    def stuck_for(self) -> float:
        """Seconds for which no decoding has ended though one is running. A single large image that
        takes long while others end says nothing against the process."""
        with self._lock:
            oldest = min(self._began.values(), default=None)
            last_end = self._ended
        return 0.0 if oldest is None else time.monotonic() - max(oldest, last_end)

    async def decode(
        self, content: bytes, preprocess: Preprocess, row_shape: tuple[int, ...], asked: Asked
    ) -> DecodedImage:
        """One image. ValueError says what is wrong with it."""
        arguments = (content, preprocess, row_shape)
        found = await self.run(asked, self._decode_if_small, *arguments)
        if found is None:
            found = await self._run(self._for_large, asked, self._decode, *arguments)
        assert isinstance(found, DecodedImage)
        return found

    async def run(self, asked: Asked, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function on a client's data in one of the threads, unless the deadline passes
        while it waits for its turn."""
        return await self._run(self._threads, asked, function, *arguments)

    async def run_large(self, asked: Asked, function: Callable[..., Any], *arguments: Any) -> Any:
        """The same in the thread in which large inputs wait for each other."""
        return await self._run(self._for_large, asked, function, *arguments)

    async def _run(
        self,
        threads: ThreadPoolExecutor,
        asked: Asked,
        function: Callable[..., Any],
        *arguments: Any,
    ) -> Any:
        asked.memory.hold()
        future = threads.submit(self._timed, asked, function, arguments)
        future.add_done_callback(lambda _: asked.memory.let_go())
        return await asyncio.wrap_future(future)

    def _timed(self, asked: Asked, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if asked.deadline.remaining == 0:
            raise TimeoutError
        thread = threading.get_ident()
        with self._lock:
            self._began[thread] = time.monotonic()
        try:
            return function(*arguments)
        finally:
            with self._lock:
                del self._began[thread]
                self._ended = time.monotonic()

    def _decode_if_small(
        self, content: bytes, preprocess: Preprocess, row_shape: tuple[int, ...]
    ) -> DecodedImage | None:
        """The image, or None if it is large. What can be refused by its header is refused."""
        _refuse_many_texts(content)
        with open_image(_Content(content), name="the image", formats=FORMATS) as image:
            self._reduce(image, preprocess.longest_side)
            self._check_size(image)
            width, height = image.size
            if max(width * height, tile_pixels(image)) > _LARGE_PIXELS:
                return None
            return self._decode_opened(image, content, preprocess, row_shape)

    def _decode(
        self, content: bytes, preprocess: Preprocess, row_shape: tuple[int, ...]
    ) -> DecodedImage:
        with open_image(_Content(content), name="the image", formats=FORMATS) as image:
            self._reduce(image, preprocess.longest_side)
            return self._decode_opened(image, content, preprocess, row_shape)

    def _decode_opened(
        self, image: Image, content: bytes, preprocess: Preprocess, row_shape: tuple[int, ...]
    ) -> DecodedImage:
        """Decode an image of which only the header was read; the memory is taken first."""
        with self._budget.taken(_memory_needed(image, content, preprocess)):
            pixels = load_pixels(image, name="the image", max_pixels=self._max_pixels)
            # Its pixels are copied.
            image.close()
            row = preprocess.array([pixels]).reshape(row_shape)
            small = small_copy(pixels, _THUMBNAIL_SIDE) if self._keep_small else None
        return DecodedImage(row, small)

    def _check_size(self, image: Image) -> None:
        width, height = image.size
        limit = f"more than the limit of {self._max_pixels:,} (--max-pixels)"
        if width * height > self._max_pixels:
            raise ImageError(f"the image has {width} × {height} pixels, {limit}")
        if tile_pixels(image) > self._max_pixels:
            raise ImageError(f"the image has tiles of {tile_pixels(image):,} pixels, {limit}")

    def _reduce(self, image: Image, needed: int) -> None:
        """Have a JPEG that is too large decoded at a fraction of its size."""
        width, height = image.size
        if width * height <= self._max_pixels or image.format not in ("JPEG", "MPO"):
            return
        for factor in (2, 4, 8):
            reduced = (math.ceil(width / factor), math.ceil(height / factor))
            if min(reduced) < 2 * needed:
                return
            if reduced[0] * reduced[1] <= self._max_pixels:
                image.draft(None, reduced)
                return

    def stop(self) -> None:
        """Begin nothing more. What runs is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._for_large.shutdown(wait=False, cancel_futures=True)


def _memory_needed(image: Image, content: bytes, preprocess: Preprocess) -> int:
    """Bytes that decoding and preparing an image may take. ImageError if it is made to be slow."""
    width, height = image.size
    per_pixel = BYTES_PER_PIXEL
    if image.mode.startswith(("I", "F")):
        per_pixel = _PER_PIXEL_16_BIT
    elif image.format == "WEBP":
        per_pixel = _PER_PIXEL_WEBP
    # First the image is decoded, then its array alone is prepared.
    pixels = width * height
    needed: int = max(pixels * per_pixel, pixels * 3 + preprocess.memory_needed(width, height))
    if image.format in ("JPEG", "MPO"):
        if content.count(b"\xff\xda") > MAX_SCANS:
            raise ImageError(f"the image has more than {MAX_SCANS} scans, which no camera makes")
        if decoder_holds_all(content):
            whole_width, whole_height = _size_in_file(image)
            needed += 6 * whole_width * whole_height
    needed += _PER_PIXEL_OF_TILE * tile_pixels(image)
    if image.format == "PNG":
        needed += _texts(content) * _TEXT_CHUNK
    return needed


def _texts(content: bytes) -> int:
    """How many compressed texts a PNG may have."""
    return content.count(b"zTXt") + content.count(b"iTXt") + content.count(b"iCCP")


def _refuse_many_texts(content: bytes) -> None:
    is_png = content.startswith(b"\x89PNG")
    if is_png and _texts(content) > MAX_TEXTS:
        raise ImageError(f"the image has more than {MAX_TEXTS} compressed texts")


def _size_in_file(image: Image) -> tuple[int, int]:
    """The size of a JPEG as its header states it, before `draft` reduced it."""
    scale = getattr(image, "decoderconfig", None)
    factor = scale[0] if scale else 1
    width, height = image.size
    return width * factor, height * factor
