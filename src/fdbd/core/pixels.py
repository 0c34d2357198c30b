"""Pixels: image files to RGB arrays, refusing what is broken or too large. Pillow decodes; none of
its global settings is changed here. Images of a whole dataset or folder are in
`fdbd.data.images`."""

from __future__ import annotations

import base64
import contextlib
import io
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fdbd.core.image_headers import check_exif, check_exif_text, check_header
from fdbd.util.extras import require
from fdbd.util.terminal import one_line

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 64_000_000
"""The largest image that is decoded, in pixels: 192 MB as RGB."""

# Raster formats only: others (EPS, say) start external programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")

EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
)
"""File name endings, in lower case, that count as images in a folder."""

_ORIENTATION = 0x0112
"""Tag of EXIF."""
_EXIF_TEXT = "Raw profile type exif"
"""Name of the text of a PNG that older programs write EXIF data into."""
_TO_UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""Pillow's names of what turns an image upright, by orientation."""
_ON_THEIR_SIDE = (5, 6, 7, 8)
"""Orientations of images that are stored on their side."""
_TILE_WIDTH = 322
_TILE_LENGTH = 323
"""Tags of a TIFF."""

Pixels = NDArray[np.uint8]


class ImageError(ValueError):
    """A file that is not an image, is cut short, or is larger than allowed. The message is one
    sentence that names it."""


def decode(
    source: str | Path | bytes, *, name: str | None = None, max_pixels: int = MAX_PIXELS
) -> Pixels:
    """Decodes one image to uint8 RGB (H, W, 3), upright. Raises ImageError, which calls it `name`,
    if it cannot be decoded.

    Grey, palette, CMYK and 16-bit images are converted, an alpha channel is left out, EXIF
    orientation is applied, and an animation gives its first frame. The size is read from the header
    and checked before any pixel is decoded.

    >>> decode(b"GIF89a, or so they say")
    Traceback (most recent call last):
    ...
    fdbd.core.pixels.ImageError: <bytes> is not a readable image (cannot identify the format)
    """
    with open_image(source, name=name) as image:
        return load_pixels(image, name=_label(source, name), max_pixels=max_pixels)


def decode_draft(
    source: str | Path | bytes, least_side: int, *, name: str | None = None
) -> Picture:
    """As `decode`; but a JPEG file comes out at a half, quarter or eighth of its size, the smallest
    whose sides are both at least `least_side` pixels long. Its decoder then leaves out the fine
    detail, which costs a fraction of the time and memory."""
    label = _label(source, name)
    with open_image(source, name=name) as image:
        width, height = image.size
        _check_size(label, width, height, MAX_PIXELS)
        with _in_one_sentence(label):
            # Pillow ignores it for formats that have no smaller form.
            image.draft(None, (least_side, least_side))
        decoded_width, decoded_height = image.size
        pixels = load_pixels(image, name=label)
    was_turned_upright = pixels.shape[:2] != (decoded_height, decoded_width)
    if was_turned_upright:
        return Picture(pixels, height=width, width=height)
    return Picture(pixels, height, width)


class Picture(NamedTuple):
    """Decoded pixels, and the size of the picture that they show: larger than theirs in a draft."""

    #: (H, W, 3)
    pixels: Pixels
    #: height and width of the whole picture
    height: int
    width: int

    @classmethod
    def from_pixels(cls, pixels: Pixels) -> Picture:
        """A picture that is decoded whole: not a draft."""
        return cls(pixels, *pixels.shape[:2])

    def resized(
        self, top: int, left: int, size: tuple[int, int], to: tuple[int, int], interpolation: str
    ) -> Pixels:
        """The part of `size` (height, width) at (top, left) of the whole picture, resized."""
        if self.pixels.shape[:2] == (self.height, self.width):
            part = self.pixels[top : top + size[0], left : left + size[1]]
            return resize(part, *to, interpolation)
        reduction = _reduction((self.height, self.width), self.pixels.shape[:2])
        # Where the part lies between the pixels of the draft.
        box = (
            left / reduction,
            top / reduction,
            (left + size[1]) / reduction,
            (top + size[0]) / reduction,
        )
        pil = import_pillow()
        resample = pil.Resampling[interpolation.upper()]
        draft = pil.fromarray(self.pixels)
        return np.array(draft.resize((to[1], to[0]), resample, box=box), dtype=np.uint8)


def _reduction(whole: tuple[int, int], draft: tuple[int, ...]) -> int:
    """The factor by which a JPEG decoder has reduced both sides."""
    for factor in (1, 2, 4, 8):
        if all(math.ceil(side / factor) == found for side, found in zip(whole, draft)):
            return factor
    raise ValueError(f"a draft of {draft[0]} × {draft[1]} cannot be of {whole[0]} × {whole[1]}")


@contextlib.contextmanager
def open_image(
    source: str | Path | bytes | IO[bytes],
    *,
    name: str | None = None,
    formats: Sequence[str] = FORMATS,
) -> Iterator[Image]:
    """An image as Pillow opens it: the header is checked, and no pixel is decoded. The file is
    closed at the end, even if the caller opened it."""
    pil = import_pillow()
    label = _label(source, name)
    with contextlib.ExitStack() as opened:
        with _in_one_sentence(label):
            if isinstance(source, bytes):
                file: IO[bytes] = io.BytesIO(source)
            elif not isinstance(source, (str, Path)):
                file = source
            else:
                if os.path.exists(source) and not os.path.isfile(source):
                    # A pipe would block forever.
                    raise ValueError("it is not a regular file")
                file = open(source, "rb")  # noqa: SIM115
            opened.enter_context(file)
            check_header(file)
            image = opened.enter_context(pil.open(file, formats=formats))
        yield image


def upright_size(image: Image) -> tuple[int, int]:
    """Height and width of an opened image once it is upright. No pixel is decoded."""
    width, height = image.size
    if _orientation(image) in _ON_THEIR_SIDE:
        return width, height
    return height, width


def _orientation(image: Image) -> int:
    """The orientation of an image by its EXIF data, 1 to 8; 1, which is upright, if they do not
    say."""
    # Malformed EXIF says nothing about the pixels, which are whole.
    with contextlib.suppress(Exception):
        check_exif(image.info.get("exif", b""))
        check_exif_text(image.info.get(_EXIF_TEXT, ""))
        stated = image.getexif().get(_ORIENTATION, 1)
        if stated in _TO_UPRIGHT:
            return int(stated)
    return 1


def load_pixels(image: Image, *, name: str, max_pixels: int = MAX_PIXELS) -> Pixels:
    """The pixels of an image that `open_image` has opened, as `decode` gives them."""
    width, height = image.size
    _check_size(name, width, height, max_pixels)
    if tile_pixels(image) > max_pixels:
        raise ImageError(
            f"{name} has tiles of {tile_pixels(image):,} pixels, more than the limit of "
            f"{max_pixels:,}"
        )
    with _in_one_sentence(name):
        image.load()
        return np.array(_upright_rgb(image), dtype=np.uint8)


def tile_pixels(image: Image) -> int:
    """Pixels of a tile of an opened TIFF, which may be larger than the image and is decoded whole;
    0 if it has none."""
    tags = getattr(image, "tag_v2", None)
    if image.format != "TIFF" or tags is None:
        return 0
    # A tag may be absent, or hold something that is not a number.
    width = tags.get(_TILE_WIDTH)
    length = tags.get(_TILE_LENGTH)
    if not isinstance(width, int) or not isinstance(length, int):
        return 0
    return width * length


def _check_size(name: str, width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise ImageError(
            f"{name} has {width} × {height} pixels, more than the limit of {max_pixels:,}"
        )


def _label(source: str | Path | bytes | IO[bytes], name: str | None) -> str:
    if name is not None:
        return name
    return str(source) if isinstance(source, (str, Path)) else "<bytes>"


@contextlib.contextmanager
def _in_one_sentence(label: str) -> Iterator[None]:
    """An ImageError for whatever a broken file makes a decoder raise, which is nearly anything."""
    try:
        yield
    except ImageError:
        raise
    except Exception as error:
        if isinstance(error, import_pillow().UnidentifiedImageError):
            reason = "cannot identify the format"
        else:
            reason = getattr(error, "strerror", None) or one_line(error)
        raise ImageError(f"{label} is not a readable image ({reason})") from error


def resize(image: Pixels, height: int, width: int, interpolation: str = "bilinear") -> Pixels:
    """(H, W, 3) to (height, width, 3) with Pillow's antialiased filters; the same array if
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
    top = (image.shape[0] - side) // 2
    left = (image.shape[1] - side) // 2
    return resize(image[top : top + side, left : left + side], size, size)


def small_copy(pixels: Pixels, side: int = 96) -> Pixels:
    """A copy with `side` pixels at its longer side at most."""
    picture = import_pillow().fromarray(pixels)
    picture.thumbnail((side, side))
    return np.array(picture, dtype=np.uint8)


def thumbnail(source: str | Path | bytes | Pixels, side: int = 96) -> str:
    """A small JPEG of an image, `side` pixels at its longer side at most, as a data address for a
    page."""
    pixels = source if isinstance(source, np.ndarray) else decode(source)
    buffer = io.BytesIO()
    import_pillow().fromarray(small_copy(pixels, side)).save(buffer, "JPEG", quality=70)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def import_pillow() -> Any:
    """``PIL.Image``, or an error that names the extra."""
    return require("PIL.Image", "vision")


def _upright_rgb(image: Image) -> Image:
    turn = _TO_UPRIGHT.get(_orientation(image))
    if turn is not None:
        image = image.transpose(import_pillow().Transpose[turn])
    if image.mode == "F":
        raise ValueError("floating-point images have no fixed range")
    # 16-bit grey (I;16…), or 32-bit integers that hold it.
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        if values.size and (values.min() < 0 or values.max() > 65535):
            raise ValueError("32-bit images have no fixed range")
        image = import_pillow().fromarray(((values + 128) // 257).astype(np.uint8))
    if image.mode != "RGB":
        image = image.convert("RGB")
    return image
