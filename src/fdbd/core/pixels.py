"""Pixels: image files to RGB arrays, refusing what is broken or too large. Pillow decodes; none of
its global settings is changed here. Images of a whole dataset or folder are in
`fdbd.data.images`."""

from __future__ import annotations

import base64
import contextlib
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fdbd.util.extras import require
from fdbd.util.terminal import one_line

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 64_000_000  # the largest image that is decoded, in pixels: 192 MB as RGB


# Raster formats only: others (EPS, say) start external programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")


EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
)
"""File name endings, in lower case, that count as images in a folder."""


Pixels = NDArray[np.uint8]


class ImageError(ValueError):
    """A file that is no image, is cut short, or is larger than allowed. The message is one sentence
    that names it."""


def decode(
    source: str | Path | bytes, *, name: str | None = None, max_pixels: int = MAX_PIXELS
) -> Pixels:
    """Decodes one image to uint8 RGB (H, W, 3), upright; ImageError, which calls it `name`, where
    it cannot be.

    Grey, palette, CMYK and 16-bit images are converted, an alpha channel is left out, EXIF
    orientation is applied, and an animation gives its first frame. The size is read from the header
    and checked before any pixel is decoded.

    >>> decode(b"GIF89a, or so they say")
    Traceback (most recent call last):
    ...
    fdbd.core.pixels.ImageError: <bytes> is not a readable image (cannot identify the format)
    """
    pil = import_pillow()
    label = name or ("<bytes>" if isinstance(source, bytes) else str(source))
    try:
        if not isinstance(source, bytes) and os.path.exists(source) and not os.path.isfile(source):
            raise ValueError("it is no regular file")  # a pipe would block forever
        with (
            io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file,
            pil.open(file, formats=FORMATS) as image,
        ):
            width, height = image.size
            if width * height > max_pixels:
                raise ImageError(
                    f"{label} has {width} × {height} pixels, more than the limit of {max_pixels:,}"
                )
            image.load()
            return np.array(_upright_rgb(image), dtype=np.uint8)
    except ImageError:
        raise
    except Exception as error:  # a broken file can make a decoder raise nearly anything
        is_unknown = isinstance(error, pil.UnidentifiedImageError)
        reason = (
            "cannot identify the format"
            if is_unknown
            else getattr(error, "strerror", None) or one_line(error)
        )
        raise ImageError(f"{label} is not a readable image ({reason})") from error


def resize(image: Pixels, height: int, width: int, interpolation: str = "bilinear") -> Pixels:
    """(H, W, 3) to (height, width, 3) with Pillow's antialiased filters; the same array where
    nothing changes."""
    if image.shape[:2] == (height, width):
        return image
    pil = import_pillow()
    resample = pil.Resampling[interpolation.upper()]
    return np.array(
        pil.fromarray(np.ascontiguousarray(image)).resize((width, height), resample), dtype=np.uint8
    )


def centre_square(image: Pixels, size: int) -> Pixels:
    """The largest centred square of an image, at (size, size, 3)."""
    side = min(image.shape[:2])
    top, left = ((whole - side) // 2 for whole in image.shape[:2])
    return resize(image[top : top + side, left : left + side], size, size)


def thumbnail(source: str | Path | bytes | Pixels, side: int = 96) -> str:
    """A small JPEG of an image, `side` pixels at its longer side at most, as a data address for a
    page."""
    picture = import_pillow().fromarray(
        source if isinstance(source, np.ndarray) else decode(source)
    )
    picture.thumbnail((side, side))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=70)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def import_pillow() -> Any:
    """``PIL.Image``, or an error that names the extra."""
    return require("PIL.Image", "vision")


def _upright_rgb(image: Image) -> Image:
    from PIL import ImageOps

    with contextlib.suppress(
        Exception
    ):  # malformed EXIF says nothing about the pixels, which are whole
        image = ImageOps.exif_transpose(image) or image
    if image.mode == "F":
        raise ValueError("floating-point images have no fixed range")
    if image.mode.startswith("I"):  # 16-bit grey (I;16…), or 32-bit integers that hold it
        values = np.asarray(image).astype(np.int64)
        if values.size and (values.min() < 0 or values.max() > 65535):
            raise ValueError("32-bit images have no fixed range")
        image = import_pillow().fromarray(((values + 128) // 257).astype(np.uint8))
    return image if image.mode == "RGB" else image.convert("RGB")
