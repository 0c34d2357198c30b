"""JPEG files that are decoded at a reduced size: near the whole picture, and only if asked for."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from fdbd.core.pixels import decode_draft
from fdbd.core.preprocessing import Preprocess
from fdbd.data.decoding import prepare
from fdbd.data.images import find_images


def photograph(height: int, width: int, seed: int = 0) -> np.ndarray:
    """An image with the spectrum of photographs: amplitudes fall as one over frequency."""
    noise = np.random.default_rng(seed).standard_normal((height, width, 3))
    rows = np.fft.fftfreq(height)[:, None]
    columns = np.fft.fftfreq(width)[None]
    frequency = np.hypot(rows, columns)
    frequency[0, 0] = 1
    spectrum = np.fft.fft2(noise, axes=(0, 1)) / frequency[..., None]
    spectrum[0, 0] = 0
    image = np.fft.ifft2(spectrum, axes=(0, 1)).real
    return np.clip(127 + 50 * image / image.std(), 0, 255).astype(np.uint8)


def jpeg(image: np.ndarray) -> bytes:
    pil = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    pil.fromarray(image).save(buffer, "JPEG", quality=92)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("size", "least_side", "expected"),
    [
        ((300, 400), 112, (150, 200)),
        ((300, 400), 75, (75, 100)),
        ((301, 401), 37, (38, 51)),
        ((300, 400), 151, (300, 400)),
        ((75, 1250), 112, (75, 1250)),
    ],
)
def test_a_draft_keeps_at_least_the_side_that_is_needed(size, least_side, expected) -> None:
    picture = decode_draft(jpeg(photograph(*size)), least_side)
    assert picture.pixels.shape == (*expected, 3)
    assert (picture.height, picture.width) == size


def test_other_formats_are_decoded_whole() -> None:
    pil = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    pil.fromarray(photograph(64, 64)).save(buffer, "PNG")
    assert decode_draft(buffer.getvalue(), 8).pixels.shape == (64, 64, 3)


def test_a_turned_draft_is_upright() -> None:
    pil = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    exif = pil.Exif()
    exif[0x0112] = 6
    pil.fromarray(photograph(200, 401)).save(buffer, "JPEG", exif=exif)
    picture = decode_draft(buffer.getvalue(), 50)
    assert picture.pixels.shape == (101, 50, 3)
    assert (picture.height, picture.width) == (401, 200)


@pytest.mark.parametrize("crop", ["centre", "tf", "none"])
@pytest.mark.parametrize("size", [(400, 520), (403, 517), (603, 399)])
def test_a_prepared_draft_is_near_the_prepared_picture(
    crop: str, size: tuple[int, int], tmp_path: Path
) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg(photograph(*size)))
    images = find_images(tmp_path)
    resize = 72 if crop == "centre" else None
    exact = Preprocess(64, crop=crop, resize=resize)
    draft = Preprocess(64, crop=crop, resize=resize, draft=True)
    [whole] = prepare(images.images, exact, [range(1)], workers=1)
    [reduced] = prepare(images.images, draft, [range(1)], workers=1)
    difference = 255 * (whole.inputs - reduced.inputs).abs()
    assert 0 < difference.mean() < 1.5
    assert difference.quantile(0.999) < 10


def test_drafts_are_off_unless_asked_for_and_have_keys_of_their_own() -> None:
    plain = Preprocess.preset("imagenet")
    assert plain.needed_side is None
    draft = Preprocess.from_dict({**plain.to_dict(), "draft": True})
    assert draft.needed_side == 512
    assert draft.key() != plain.key()
    without = {name: value for name, value in plain.to_dict().items() if name != "draft"}
    assert Preprocess.from_dict(without) == plain
    with pytest.raises(ValueError, match="draft is 1, expected true or false"):
        Preprocess(8, draft=1)  # type: ignore[arg-type]
