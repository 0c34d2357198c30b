"""Decoding: every kind of pixel becomes upright RGB, and what is broken or too large is refused in
one sentence."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdbd.core.pixels import ImageError, centre_square, decode

Image = pytest.importorskip("PIL.Image")


def encoded(image: Any, file_format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def gradient(height: int = 6, width: int = 9) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def huge_png(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes whose header claims any size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(b"\0" * 100_000)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    )


def test_rgb_survives_unchanged(tmp_path: Path) -> None:
    pixels = gradient()
    (tmp_path / "a.png").write_bytes(encoded(Image.fromarray(pixels)))
    np.testing.assert_array_equal(decode(tmp_path / "a.png"), pixels)
    np.testing.assert_array_equal(decode(str(tmp_path / "a.png")), pixels)


def test_grey_becomes_three_equal_channels() -> None:
    grey = gradient()[..., 0]
    np.testing.assert_array_equal(
        decode(encoded(Image.fromarray(grey))), np.stack([grey] * 3, axis=2)
    )


def test_one_bit_images_become_black_and_white() -> None:
    bits = gradient()[..., 0] > 127
    assert set(np.unique(decode(encoded(Image.fromarray(bits))))) == {0, 255}


def test_palette_images_take_their_colours() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putdata([0, 1])
    np.testing.assert_array_equal(decode(encoded(image)), [[[10, 20, 30], [200, 100, 50]]])


def test_alpha_is_left_out() -> None:
    pixels = gradient()
    alpha = np.full((*pixels.shape[:2], 1), 7, np.uint8)
    np.testing.assert_array_equal(
        decode(encoded(Image.fromarray(np.concatenate([pixels, alpha], axis=2)))), pixels
    )


def test_cmyk_becomes_rgb() -> None:
    cyan_ink = Image.new("CMYK", (8, 8), (255, 0, 0, 0))
    red, green, blue = decode(encoded(cyan_ink, "JPEG", quality=100)).reshape(-1, 3).mean(axis=0)
    assert red < 30
    assert green > 225
    assert blue > 225


def test_sixteen_bit_grey_is_scaled_to_eight() -> None:
    values = np.array([[0, 257, 128 * 257, 65535]], dtype=np.uint16)
    np.testing.assert_array_equal(
        decode(encoded(Image.fromarray(values)))[0, :, 0], [0, 1, 128, 255]
    )


def test_exif_orientation_is_applied() -> None:
    pixels = gradient()
    exif = Image.Exif()
    # The camera was turned: rotate by 270° to see it upright.
    exif[0x0112] = 6
    np.testing.assert_array_equal(
        decode(encoded(Image.fromarray(pixels), exif=exif)), np.rot90(pixels, k=3)
    )


def test_an_animation_gives_its_first_frame() -> None:
    frames = [Image.new("L", (4, 4), value) for value in (0, 255)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode(data).max() == 0


@pytest.mark.parametrize("data", [b"", b"not an image", b"\xff\xd8\xff\xe0 JPEG, almost"])
def test_what_is_no_image_is_refused_with_its_name(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "broken.jpg"
    path.write_bytes(data)
    with pytest.raises(ImageError, match=r"broken\.jpg is not a readable image \(.+\)$"):
        decode(path)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG"])
def test_a_truncated_file_is_refused(file_format: str) -> None:
    data = encoded(Image.fromarray(gradient(200, 200)), file_format)
    with pytest.raises(ImageError, match="holiday is not a readable image"):
        decode(data[: len(data) // 2], name="holiday")


def test_every_cut_of_a_file_gives_an_image_or_an_image_error() -> None:
    data = encoded(Image.fromarray(gradient()), "PNG")
    for length in range(len(data)):
        # Anything else would fail here.
        with contextlib.suppress(ImageError):
            assert decode(data[:length]).shape == (6, 9, 3)


def test_a_missing_file_is_an_image_error(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="No such file"):
        decode(tmp_path / "nothing.png")


def test_a_large_image_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(ImageError, match="9000 × 9000 pixels, more than the limit of 64,000,000"):
        decode(huge_png(9000, 9000))
    with pytest.raises(ImageError, match="limit of 100"):
        decode(encoded(Image.fromarray(gradient(11, 11))), max_pixels=100)


def test_a_decompression_bomb_is_refused() -> None:
    with pytest.raises(ImageError, match="limit"):
        decode(huge_png(60_000, 60_000))


def test_tiles_that_are_larger_than_their_image_are_bounded_too(tiff_of_tiles) -> None:
    assert decode(tiff_of_tiles(64)).shape == (10, 10, 3)
    with pytest.raises(ImageError, match="tiles of 67,108,864 pixels, more than the limit"):
        decode(tiff_of_tiles(8192))


def test_formats_that_run_other_programs_are_refused() -> None:
    with pytest.raises(ImageError, match="cannot identify"):
        decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")


def test_floating_point_pixels_are_refused() -> None:
    with pytest.raises(ImageError, match="no fixed range"):
        decode(encoded(Image.fromarray(np.ones((3, 3), np.float32)), "TIFF"))


def test_global_pillow_settings_are_left_alone() -> None:
    from PIL import ImageFile

    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
    decode(encoded(Image.fromarray(gradient())))
    with pytest.raises(ImageError):
        decode(huge_png(9000, 9000))
    after = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
    assert after == before


def test_centre_square_cuts_the_longer_side() -> None:
    pixels = gradient(4, 8)
    np.testing.assert_array_equal(centre_square(pixels, 4), pixels[:, 2:6])
    assert centre_square(pixels, 3).shape == (3, 3, 3)
