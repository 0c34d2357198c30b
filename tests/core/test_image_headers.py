"""Headers that are made to take memory or time are refused before Pillow reads them; damaged ones
are left to Pillow."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence

import numpy as np
import pytest

from fdbd.core.pixels import ImageError, decode

Image = pytest.importorskip("PIL.Image")

BYTE, SHORT, LONG, RATIONAL = 1, 3, 4, 5
ORIENTATION = 0x0112
X_RESOLUTION = 0x011A
UPRIGHT = {1: (6, 9), 3: (6, 9), 5: (9, 6), 6: (9, 6), 8: (9, 6)}
"""Height and width of an image of 9 × 6 once it is turned, by orientation."""

Entry = tuple[int, int, int, int]
"""Tag, type, number of values, and the value or where it lies."""


def tiff(entries: Sequence[Entry], rest: bytes = b"", order: str = "<") -> bytes:
    """A TIFF of one directory, and what stands behind it."""
    start = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}L", 8)
    directory = struct.pack(f"{order}H", len(entries))
    for tag, kind, count, value in entries:
        if kind == SHORT and count == 1:
            directory += struct.pack(f"{order}HHLHH", tag, kind, count, value, 0)
        else:
            directory += struct.pack(f"{order}HHLL", tag, kind, count, value)
    return start + directory + b"\0" * 4 + rest


def big_tiff(entries: Sequence[Entry], rest: bytes = b"") -> bytes:
    """The same in the form with numbers of 64 bits."""
    directory = struct.pack("<Q", len(entries))
    for entry in entries:
        directory += struct.pack("<HHQQ", *entry)
    return b"II+\0" + struct.pack("<HHQ", 8, 0, 16) + directory + b"\0" * 8 + rest


def grey(width: int, height: int, strips: int = 1, place: int = 8) -> list[Entry]:
    """Tags of a grey image whose strips, one behind the other, all have the same pixels."""
    # The bytes of each strip: a number, or for several the place of their numbers.
    bytes_of_strips = place
    if strips == 1:
        bytes_of_strips = width * height
    return [
        (256, LONG, 1, width),
        (257, LONG, 1, height),
        (258, SHORT, 1, 8),
        (259, SHORT, 1, 1),
        (262, SHORT, 1, 1),
        (273, LONG, strips, place),
        (277, SHORT, 1, 1),
        (278, LONG, 1, max(1, height // strips)),
        (279, LONG, strips, bytes_of_strips),
    ]


def small_image(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((6, 9, 3), np.uint8)).save(buffer, kind)
    return buffer.getvalue()


def with_exif(kind: str, exif: bytes) -> bytes:
    """A small image with EXIF data of any size, in pieces if the format needs them."""
    if kind == "text of a PNG":
        digits = f"\nexif\n{len(exif):8}\n{exif.hex()}\n".encode()
        plain = small_image("PNG")
        return plain[:33] + chunk(b"tEXt", b"Raw profile type exif\0" + digits) + plain[33:]
    plain = small_image(kind)
    if kind == "PNG":
        return plain[:33] + chunk(b"eXIf", exif) + plain[33:]
    segments = b""
    for start in range(0, len(exif), 60_000):
        part = b"Exif\0\0" + exif[start : start + 60_000]
        segments += b"\xff\xe1" + struct.pack(">H", len(part) + 2) + part
    return plain[:2] + segments + plain[2:]


def chunk(kind: bytes, data: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + checksum


def gif_with_comment(blocks: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((6, 9), np.uint8)).save(buffer, "GIF")
    plain = buffer.getvalue()
    palette = 3 * 2 ** ((plain[10] & 7) + 1) if plain[10] & 0x80 else 0
    comment = b"!\xfe" + (b"\xff" + b"x" * 255) * blocks + b"\0"
    return plain[: 13 + palette] + comment + plain[13 + palette :]


@pytest.mark.parametrize("form", [tiff, big_tiff])
def test_tags_that_all_have_the_whole_file_as_their_value_are_refused(form) -> None:
    shared = [(40_000 + number, BYTE, 500_000, 8) for number in range(100)]
    with pytest.raises(ImageError, match="the values of its tags are larger than its"):
        decode(form(grey(9, 6) + shared, bytes(500_000)))


@pytest.mark.parametrize("tag", [258, 273, 322, 40_000])
@pytest.mark.parametrize("kind", [SHORT, LONG, RATIONAL])
def test_a_tiff_has_no_tag_of_countless_numbers(tag: int, kind: int) -> None:
    tags = [entry for entry in grey(9, 6) if entry[0] != tag]
    with pytest.raises(ImageError, match="more than 200,000 numbers"):
        decode(tiff([*tags, (tag, kind, 300_000, 8)], bytes(3_000_000)))


def test_directories_for_exif_within_a_tiff_count_too_and_may_lead_to_themselves() -> None:
    tags = grey(9, 6)
    place = 8 + 2 + 12 * (len(tags) + 1) + 4
    within = tiff([(40_000, LONG, 300_000, 8), (34_665, LONG, 1, place)])[8:]
    with pytest.raises(ImageError, match="more than 200,000 numbers"):
        decode(tiff([*tags, (34_665, LONG, 1, place)], within + bytes(2_000_000)))


def test_the_size_of_tiles_is_not_stated_twice() -> None:
    twice = [(322, LONG, 1, 16), (322, LONG, 1, 60_000), (323, LONG, 1, 16)]
    with pytest.raises(ImageError, match="the size of its tiles twice"):
        decode(tiff(grey(9, 6) + twice, bytes(100)))


def test_an_image_of_many_strips_is_decoded() -> None:
    strips = 20_000
    place = 8 + 2 + 12 * 9 + 4
    entries = grey(2, strips, strips, place)
    assert decode(tiff(entries, struct.pack("<L", 2) * strips)).shape == (strips, 2, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_exif_data_of_megabytes_are_not_read(kind: str) -> None:
    numbers = np.arange(1, 400_001, dtype="<u4").tobytes()
    entries = [(ORIENTATION, RATIONAL, 200_000, 38), (X_RESOLUTION, RATIONAL, 200_000, 38)]
    image = with_exif(kind, tiff(entries, numbers))
    if kind == "JPEG":
        with pytest.raises(ImageError, match="more than 1,000,000"):
            decode(image)
    else:
        # It says nothing of the pixels, and Pillow does not read it by itself.
        assert decode(image).shape == (6, 9, 3)


def test_tags_of_exif_that_share_their_values_are_refused() -> None:
    shared = [(40_000 + number, BYTE, 25_000, 8) for number in range(2_000)]
    with pytest.raises(ImageError, match="the values of its tags are larger than its"):
        decode(with_exif("JPEG", tiff(shared, bytes(25_000))))


@pytest.mark.parametrize("shared", [(SHORT, 30_000), (BYTE, 60_000), (RATIONAL, 7_000)])
def test_a_list_of_pictures_in_a_jpeg_is_small(shared: tuple[int, int]) -> None:
    kind, count = shared
    tags = [(40_000 + number, kind, count, 8) for number in range(4_000)]
    listed = tiff(tags, bytes(15_000))
    segment = b"\xff\xe2" + struct.pack(">H", len(listed) + 6) + b"MPF\0" + listed
    plain = small_image("JPEG")
    with pytest.raises(ImageError, match="its tags"):
        decode(plain[:2] + segment + plain[2:])


def test_a_photograph_of_two_pictures_gives_the_first() -> None:
    first, second = Image.new("RGB", (9, 6), "red"), Image.new("RGB", (4, 4), "blue")
    buffer = io.BytesIO()
    first.save(buffer, "MPO", save_all=True, append_images=[second])
    assert decode(buffer.getvalue()).shape == (6, 9, 3)


def test_exif_data_in_a_text_are_as_small_as_elsewhere() -> None:
    turned = (ORIENTATION, SHORT, 1, 6)
    shared = [(40_000 + number, BYTE, 100_000, 8) for number in range(2_000)]
    assert decode(with_exif("text of a PNG", tiff([turned, *shared[:1]]))).shape[:2] == (9, 6)
    # Data of gigabytes are not read, so the image is not turned.
    much = tiff([turned, *shared], bytes(100_000))
    assert decode(with_exif("text of a PNG", much)).shape[:2] == (6, 9)
    long = tiff([turned], bytes(2_000_000))
    assert decode(with_exif("text of a PNG", long)).shape[:2] == (6, 9)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "text of a PNG"])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_images_are_turned_upright(kind: str, order: str, orientation: int) -> None:
    exif = tiff([(ORIENTATION, SHORT, 1, orientation)], order=order)
    assert decode(with_exif(kind, exif)).shape[:2] == UPRIGHT[orientation]


@pytest.mark.parametrize(
    "exif",
    [
        b"",
        b"II*",
        b"no directory at all",
        tiff([(ORIENTATION, SHORT, 1, 6)])[:15],
        tiff([(ORIENTATION, SHORT, 1, 77)]),
        # Corrupt values as in photographs of ImageNet: far beyond the end, or longer than all.
        tiff([(X_RESOLUTION, RATIONAL, 131_072, 4_000_000_000)]),
        tiff([(X_RESOLUTION, RATIONAL, 4_294_967_295, 8)] * 20),
        tiff([(34_665, LONG, 1, 8), (34_853, LONG, 1, 9)]),
    ],
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "text of a PNG"])
def test_damaged_exif_says_nothing_against_the_pixels(kind: str, exif: bytes) -> None:
    assert decode(with_exif(kind, exif)).shape == (6, 9, 3)


def test_a_gif_has_a_comment_but_no_endless_one() -> None:
    assert decode(gif_with_comment(20)).shape == (6, 9, 3)
    with pytest.raises(ImageError, match="bytes before its first frame"):
        decode(gif_with_comment(5_000))
