"""How many values each part of a Parquet file holds, read from its footer without pyarrow.

pyarrow ends the process if it is asked for the metadata of a column that a damaged or forged file
describes inconsistently (the C++ exception is not caught between C++ and Python). This module reads
the few numbers that are needed itself; whatever is wrong with them is a ValueError.

The footer is a struct in Thrift's compact protocol: fields with a number, a type and a value, up to
a stop byte. Integers are varints, seven bits to a byte; signed ones are zigzag-encoded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAX_FOOTER = 64_000_000
"""Bytes. Files of some thousand row groups have footers of a few megabytes."""
_DEEPEST = 32

# Types of the protocol.
_STOP = 0
_TRUE = 1
_FALSE = 2
_BYTE = 3
_INTEGERS = (4, 5, 6)
_DOUBLE = 7
_BINARY = 8
_LIST = 9
_SET = 10
_MAP = 11
_STRUCT = 12

# Numbers of the fields, in the definition of the format.
# Of the file:
_ROW_GROUPS = 4
# Of a row group:
_COLUMNS = 1
_NUM_ROWS = 3
# Of a column:
_META_DATA = 3
# Of a column's metadata:
_NUM_VALUES = 5


class RowGroup(NamedTuple):
    """One row group, as the footer describes it."""

    rows: int
    values: tuple[int, ...]
    """The number of values of each column at the leaves of the schema."""


def read_row_groups(path: str | os.PathLike[str]) -> list[RowGroup]:
    """The row groups of a file. ValueError if its footer is damaged."""
    data = _footer(Path(path))
    try:
        return _Reader(data).file()
    except (IndexError, OverflowError):
        raise ValueError("its footer is damaged: it ends in the middle of a number") from None


def _footer(path: Path) -> bytes:
    """The bytes of the footer, which stands before its length and the letters PAR1."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(max(0, size - 8))
        tail = file.read(8)
        if len(tail) < 8 or tail[4:] != b"PAR1":
            raise ValueError("it does not end as a Parquet file")
        length = int.from_bytes(tail[:4], "little")
        if length > min(size - 8, MAX_FOOTER):
            raise ValueError(
                f"its footer has {length:,} bytes, expected at most {min(size - 8, MAX_FOOTER):,}"
            )
        file.seek(size - 8 - length)
        return file.read(length)


class _Reader:
    """Reads the footer from its beginning to its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def file(self) -> list[RowGroup]:
        groups: list[RowGroup] = []
        for number, kind in self._fields():
            if number == _ROW_GROUPS and kind == _LIST:
                groups = []
                for _ in range(self._list_of(_STRUCT)):
                    groups.append(self._row_group())
            else:
                self._skip(kind, 0)
        return groups

    def _row_group(self) -> RowGroup:
        rows = -1
        values: list[int] = []
        for number, kind in self._fields():
            if number == _COLUMNS and kind == _LIST:
                values = []
                for _ in range(self._list_of(_STRUCT)):
                    values.append(self._column())
            elif number == _NUM_ROWS and kind in _INTEGERS:
                rows = self._integer()
            else:
                self._skip(kind, 0)
        if rows < 0:
            raise ValueError(f"its footer is damaged: a row group has {rows} rows")
        return RowGroup(rows, tuple(values))

    def _column(self) -> int:
        values = -1
        for number, kind in self._fields():
            if number == _META_DATA and kind == _STRUCT:
                values = self._column_metadata()
            else:
                self._skip(kind, 0)
        if values < 0:
            raise ValueError(f"its footer is damaged: a column has {values} values")
        return values

    def _column_metadata(self) -> int:
        values = -1
        for number, kind in self._fields():
            if number == _NUM_VALUES and kind in _INTEGERS:
                values = self._integer()
            else:
                self._skip(kind, 0)
        return values

    # ── the protocol

    def _fields(self) -> Iterator[tuple[int, int]]:
        """Number and type of each field of a struct, whose value is to be read, or passed over,
        before the next one is asked for."""
        number = 0
        while True:
            head = self._byte()
            kind = head & 15
            if kind == _STOP:
                return
            # The number of a field is that of the field before plus a step of 1 to 15. A step of 0
            # says that the number itself follows.
            step = head >> 4
            if step:
                number += step
            else:
                number = self._integer()
            yield number, kind

    def _list_of(self, expected: int) -> int:
        """The length of a list whose items have this type."""
        kind, count = self._list_head()
        if kind != expected:
            raise ValueError("its footer is damaged: a list holds something else than it should")
        return count

    def _list_head(self) -> tuple[int, int]:
        head = self._byte()
        count = head >> 4
        if count == 15:
            count = self._varint()
        # Every item takes a byte at least, so that no list is longer than what is left.
        if count > len(self._data) - self._at:
            raise ValueError("its footer is damaged: a list is longer than the footer")
        return head & 15, count

    def _skip(self, kind: int, depth: int) -> None:
        """Pass over the value of a field."""
        if depth > _DEEPEST:
            raise ValueError("its footer is damaged: it is nested too deeply")
        if kind in (_TRUE, _FALSE):
            # The type of the field is its value.
            return
        if kind in _INTEGERS:
            self._varint()
        elif kind == _BYTE:
            self._byte()
        elif kind == _DOUBLE:
            self._pass(8)
        elif kind == _BINARY:
            self._pass(self._varint())
        elif kind in (_LIST, _SET):
            item, count = self._list_head()
            for _ in range(count):
                self._skip_item(item, depth + 1)
        elif kind == _MAP:
            self._skip_map(depth + 1)
        elif kind == _STRUCT:
            for _, inner in self._fields():
                self._skip(inner, depth + 1)
        else:
            raise ValueError(f"its footer is damaged: there is no type {kind}")

    def _skip_item(self, kind: int, depth: int) -> None:
        """Pass over an item of a list or a map, in which a truth value takes a byte."""
        if kind in (_TRUE, _FALSE):
            self._byte()
        else:
            self._skip(kind, depth)

    def _skip_map(self, depth: int) -> None:
        count = self._varint()
        if count > len(self._data) - self._at:
            raise ValueError("its footer is damaged: a map is longer than the footer")
        if not count:
            return
        kinds = self._byte()
        for _ in range(count):
            self._skip_item(kinds >> 4, depth)
            self._skip_item(kinds & 15, depth)

    def _byte(self) -> int:
        value = self._data[self._at]
        self._at += 1
        return value

    def _varint(self) -> int:
        found = 0
        shift = 0
        while True:
            byte = self._byte()
            found |= (byte & 127) << shift
            if byte < 128:
                return found
            shift += 7
            if shift > 63:
                raise ValueError("its footer is damaged: a number is too long")

    def _integer(self) -> int:
        """A signed number: 0, −1, 1, −2, … are written as 0, 1, 2, 3, …"""
        found = self._varint()
        return (found >> 1) ^ -(found & 1)

    def _pass(self, count: int) -> None:
        if count > len(self._data) - self._at:
            raise ValueError("its footer is damaged: a text is longer than the footer")
        self._at += count
