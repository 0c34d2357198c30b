"""What an image file says before its pixels, checked before Pillow reads it.

Pillow turns the tags of a TIFF, and of EXIF data, which have the same form, into Python objects, a
hundred bytes for each number. A file of a megabyte can name its own bytes as the value of thousands
of tags, so reading its header alone would take gigabytes or minutes. Nothing here depends on how a
version of Pillow handles such files.

`check_header` refuses files that are made so. Files that are only damaged are left to Pillow.
"""

from __future__ import annotations

import collections
import io
import struct
from collections.abc import Iterator
from typing import IO, NamedTuple

MOST_EXIF = 1_000_000
"""Bytes of EXIF data. A segment of a JPEG holds 64 KiB, and cameras write one."""
MOST_NUMBERS = 200_000
"""Numbers in all tags of a TIFF. It has two for each of its strips or tiles."""
MOST_OVERLAP = 16_000_000
"""Bytes by which the values of all tags may be larger than the file, since some share theirs."""
MOST_COMMENT = 1_000_000
"""Bytes of extensions before the first frame of a GIF."""
_TILE_TAGS = (322, 323)
_LEADS_TO_DIRECTORY = (34665, 34853, 40965)
"""Tags that say where the directories of EXIF, of its places and of its interoperability lie."""
_EXIF = 0xE1
_PICTURES = 0xE2
_SCAN = 0xDA
_FRAMES = (*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0))
_PROGRESSIVE_FRAMES = (0xC2, 0xC6, 0xCA, 0xCE)
"""Markers of a JPEG."""
_MOST_DIRECTORIES = 8
_MOST_ENTRIES = 65_536
_NUMBER_SIZES = {3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
"""Bytes of each type of number in a tag."""
_BYTE_TYPES = (1, 2, 6, 7)
"""Types that Pillow keeps as bytes or text."""


class HeaderError(ValueError):
    """A header that takes far more memory or time than an image needs."""


class _Tag(NamedTuple):
    number: int
    kind: int
    values: int
    """The number of its values."""
    value: int
    """The value itself, or its place in the file if it is longer than this field."""


class _Form(NamedTuple):
    """A TIFF is written in one of two byte orders, with numbers of 32 or 64 bits."""

    first: int
    """Where the first directory lies."""
    offset: struct.Struct
    length: struct.Struct
    """How many entries a directory has, before the first of them."""
    entry: struct.Struct


def check_header(file: IO[bytes]) -> None:
    """HeaderError if reading the header of an image would take too much. The file is left at its
    start."""
    file.seek(0)
    start = file.read(8)
    if start[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        _check_tiff(file)
    elif start[:3] == b"\xff\xd8\xff":
        _check_jpeg(file)
    elif start[:3] == b"GIF":
        _check_gif(file)
    file.seek(0)


def _size_of(file: IO[bytes]) -> int:
    return file.seek(0, 2)


# ── TIFF and EXIF


def _check_tiff(file: IO[bytes]) -> None:
    size = _size_of(file)
    tile_tags = []
    for tag in _tags_of_few_numbers(file, size):
        if tag.number in _TILE_TAGS:
            tile_tags.append(tag.number)
    if len(set(tile_tags)) < len(tile_tags):
        # Readers differ in which of the two they take.
        raise HeaderError("it states the size of its tiles twice")


def check_exif(content: bytes) -> None:
    """HeaderError if reading EXIF data would take too much."""
    if len(content) > MOST_EXIF:
        raise HeaderError(f"its EXIF data have {len(content):,} bytes, more than {MOST_EXIF:,}")
    content = content.removeprefix(b"Exif\0\0")
    _read_to_the_end(_tags(io.BytesIO(content), len(content)))


def check_exif_text(profile: str) -> None:
    """As `check_exif`, for EXIF data that ImageMagick wrote into a text of a PNG: three lines, then
    hexadecimal digits."""
    if len(profile) > 3 * MOST_EXIF:
        raise HeaderError(f"its EXIF data have {len(profile):,} characters")
    digits = "".join(profile.split("\n")[3:])
    check_exif(bytes.fromhex(digits))


def _tags_of_few_numbers(file: IO[bytes], size: int) -> Iterator[_Tag]:
    """The tags of a directory that is read whole. HeaderError if they hold too many numbers."""
    numbers = 0
    for tag in _tags(file, size):
        if tag.kind in _NUMBER_SIZES:
            numbers += min(tag.values, size // _NUMBER_SIZES[tag.kind])
        if numbers > MOST_NUMBERS:
            raise HeaderError(f"its tags hold more than {MOST_NUMBERS:,} numbers")
        yield tag


def _read_to_the_end(tags: Iterator[_Tag]) -> None:
    """Read all tags, since their values are known to be small enough only at the end."""
    collections.deque(tags, maxlen=0)


def _tags(file: IO[bytes], size: int) -> Iterator[_Tag]:
    """The tags of the first directory of a TIFF, and of the directories that it leads to for EXIF.
    HeaderError if the values together are much larger than the file."""
    form = _form_of(file)
    if form is None:
        return
    total = 0
    waiting = [form.first]
    known: set[int] = set()
    while waiting:
        directory = waiting.pop()
        if directory in known or len(known) == _MOST_DIRECTORIES:
            continue
        known.add(directory)
        for tag in _entries(file, directory, form):
            length = tag.values * _width(tag.kind)
            if length > form.offset.size:
                # If a value goes on beyond the end of the file, the part before it may still be
                # read.
                total += min(length, max(0, size - tag.value))
            if total > size + MOST_OVERLAP:
                raise HeaderError(f"the values of its tags are larger than its {size:,} bytes")
            if tag.number in _LEADS_TO_DIRECTORY:
                waiting.append(tag.value)
            yield tag


def _width(kind: int) -> int:
    """Bytes of one value of a type; 0 for an unknown type."""
    if kind in _BYTE_TYPES:
        return 1
    return _NUMBER_SIZES.get(kind, 0)


def _form_of(file: IO[bytes]) -> _Form | None:
    """How a TIFF is written, from its first bytes; None if it is cut short."""
    file.seek(0)
    head = file.read(16)
    order = "<" if head[:2] == b"II" else ">"
    is_big = b"+" in head[2:4]
    letter = "Q" if is_big else "L"
    form_of_offset = struct.Struct(order + letter)
    place = 8 if is_big else 4
    if len(head) < place + form_of_offset.size:
        return None
    (first,) = form_of_offset.unpack_from(head, place)
    length = struct.Struct(order + ("Q" if is_big else "H"))
    return _Form(first, form_of_offset, length, struct.Struct(f"{order}HH{letter}{letter}"))


def _entries(file: IO[bytes], directory: int, form: _Form) -> Iterator[_Tag]:
    file.seek(min(directory, _size_of(file)))
    stated = file.read(form.length.size)
    if len(stated) < form.length.size:
        return
    (count,) = form.length.unpack(stated)
    content = file.read(min(count, _MOST_ENTRIES) * form.entry.size)
    for place in range(0, len(content) - form.entry.size + 1, form.entry.size):
        yield _Tag(*form.entry.unpack_from(content, place))


# ── JPEG


def _check_jpeg(file: IO[bytes]) -> None:
    exif = b""
    pictures = b""
    for marker, content in _segments(file):
        if marker == _PICTURES and content.startswith(b"MPF\0"):
            # A list of further pictures in the file, of which the last one counts.
            pictures = content[4:]
        if marker == _EXIF and content.startswith(b"Exif\0\0"):
            exif += content if not exif else content[6:]
            if len(exif) > MOST_EXIF:
                break
    if exif:
        check_exif(exif)
    if pictures:
        _read_to_the_end(_tags_of_few_numbers(io.BytesIO(pictures), len(pictures)))


def decoder_holds_all(content: bytes) -> bool:
    """Whether the decoder of a JPEG holds the coefficients of the whole image, at whatever size it
    is decoded: it is progressive, or has a scan for each colour."""
    colours = 0
    for marker, segment in _segments(io.BytesIO(content)):
        if marker in _FRAMES and len(segment) > 5:
            if marker in _PROGRESSIVE_FRAMES:
                return True
            colours = segment[5]
        elif marker == _SCAN and segment:
            return segment[0] < colours
    return False


def _segments(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Markers of a JPEG with what follows them, up to its first scan, whose header is the last.
    What stands between segments is skipped, as Pillow does."""
    file.seek(2)
    while byte := file.read(1):
        if byte != b"\xff":
            continue
        marker = file.read(1)
        while marker == b"\xff":
            marker = file.read(1)
        if not marker:
            return
        number = marker[0]
        # A zero, restarts, start and end of an image stand alone.
        if number == 0 or 0xD0 <= number <= 0xD9:
            continue
        (length,) = struct.unpack(">H", file.read(2).rjust(2, b"\0"))
        yield number, file.read(max(0, length - 2))
        if number == _SCAN:
            return


# ── GIF


def _check_gif(file: IO[bytes]) -> None:
    file.seek(10)
    flags = file.read(1)
    palette = 0
    if flags and flags[0] & 0x80:
        palette = 3 * 2 ** ((flags[0] & 7) + 1)
    file.seek(13 + palette)
    total = 0
    while file.read(1) == b"!":
        file.read(1)
        while length := file.read(1):
            if length == b"\0":
                break
            file.seek(length[0], 1)
            total += length[0]
            if total > MOST_COMMENT:
                raise HeaderError(f"it has more than {MOST_COMMENT:,} bytes before its first frame")
