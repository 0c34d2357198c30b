"""Rows with named columns in CSV, JSON Lines and Parquet files, read in order, in parts: texts,
features in CSV, and columns that are carried through."""

from __future__ import annotations

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdbd.data.images import cut
from fdbd.util.extras import require
from fdbd.util.files import check_unchanged, readable, stamp, stamp_key

ENDINGS = (".csv", ".jsonl", ".ndjson", ".parquet")
MAX_LINE = 1 << 24
"""Characters of a line of JSON, at most."""
CHUNK_ROWS = 8192


class ColumnFile(ABC):
    """A file of N rows with named columns.

    Attributes:
        source: its path.
        key: changes when the file does.
        columns: the names, in order.
    """

    def __init__(self, path: str) -> None:
        self.source = path
        self.key = stamp_key(path)
        self.columns: list[str] = []
        self._stamp = stamp(path)
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def require(self, names: Sequence[str], option: str) -> None:
        """An error unless the file has all these columns; `option` is what asked for them."""
        for name in names:
            if name not in self.columns:
                raise ValueError(
                    f"{self.source} has no column {name!r}, which {option} names; it has "
                    f"{', '.join(self.columns)}"
                )

    def read(self, rows: range, names: Sequence[str]) -> list[list[Any]]:
        """The values of these columns in these rows: a list for each column, None if a value is
        missing. Raises if the file is no longer the one that was opened."""
        check_unchanged(self.source, self._stamp)
        found = self._read(rows, names)
        check_unchanged(self.source, self._stamp)
        return found

    @abstractmethod
    def _read(self, rows: range, names: Sequence[str]) -> list[list[Any]]:
        """As `read`, of a file that is what it was."""

    def spans(self, size: int) -> list[range]:
        """All rows in runs of about `size` that are cheap to read apart."""
        return cut(range(len(self)), size)

    def kind(self, name: str) -> str:
        """The Arrow type of a column in an output."""
        return "string"


class _Lines(ColumnFile):
    """A text file, which is read from its beginning. A span that follows the last one continues
    there."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._place = 0
        self._rows: Iterator[dict[str, Any]] | None = None
        with readable(path, "file of rows"):
            for _ in self._open():
                self._len += 1

    @abstractmethod
    def _open(self) -> Iterator[dict[str, Any]]:
        """All rows from the first, as values by column."""

    def _read(self, rows: range, names: Sequence[str]) -> list[list[Any]]:
        found: list[list[Any]] = [[] for _ in names]
        with readable(self.source, "file of rows"):
            if self._rows is None or self._place != rows.start:
                self._rows = self._open()
                for _ in range(rows.start):
                    next(self._rows)
            for _ in rows:
                row = next(self._rows)
                for column, name in zip(found, names):
                    column.append(row.get(name))
        self._place = rows.stop
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Another process reads from the beginning."""
        return {**self.__dict__, "_rows": None}


class CsvFile(_Lines):
    """A CSV file in UTF-8 whose first line names the columns. An empty cell is a missing value."""

    def _open(self) -> Iterator[dict[str, Any]]:
        with open(self.source, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise ValueError(f"{self.source} has two columns of one name")
            self.columns = header
            for cells in reader:
                if len(cells) != len(header):
                    raise ValueError(
                        f"{self.source}, line {reader.line_num}: it has {len(cells)} cells, "
                        f"expected {len(header)}"
                    )
                yield {name: cell or None for name, cell in zip(header, cells)}


class JsonLines(_Lines):
    """A file with one JSON object per line; the columns are those of the first."""

    def _open(self) -> Iterator[dict[str, Any]]:
        with open(self.source, encoding="utf-8-sig") as file:
            number = 0
            while True:
                line = file.readline(MAX_LINE)
                if not line:
                    return
                number += 1
                if not line.strip():
                    continue
                row = self._parse(line, number)
                if not self.columns:
                    self.columns = list(row)
                yield row

    def _parse(self, line: str, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError(f"{self.source}, line {number} is not JSON") from None
        if not isinstance(row, dict):
            raise ValueError(f"{self.source}, line {number} is not a JSON object")
        return row


class ParquetColumns(ColumnFile):
    """A Parquet file; its row groups are read in parts."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        with readable(path, "Parquet file"):
            file = self._open()
            self.columns = list(file.schema_arrow.names)
            self._schema = file.schema_arrow
            groups = range(file.metadata.num_row_groups)
            counts = [file.metadata.row_group(number).num_rows for number in groups]
        self._starts = np.cumsum([0, *counts]).tolist()
        self._len = self._starts[-1]

    def _open(self) -> Any:
        return require("pyarrow.parquet", "report").ParquetFile(self.source, pre_buffer=False)

    def kind(self, name: str) -> str:
        types = require("pyarrow", "report").types
        kind = self._schema.field(name).type
        if types.is_boolean(kind):
            return "bool"
        if types.is_integer(kind) and not types.is_uint64(kind):
            return "int64"
        if types.is_floating(kind):
            return "double"
        return "string"

    def _read(self, rows: range, names: Sequence[str]) -> list[list[Any]]:
        found: list[list[Any]] = [[] for _ in names]
        groups = []
        for number in range(len(self._starts) - 1):
            if self._starts[number] < rows.stop and rows.start < self._starts[number + 1]:
                groups.append(number)
        if not groups:
            return found
        start = self._starts[groups[0]]
        with readable(self.source, "Parquet file"):
            batches = self._open().iter_batches(
                CHUNK_ROWS, groups, list(dict.fromkeys(names)), use_threads=False
            )
            for batch in batches:
                stop = start + len(batch)
                # The rows that are asked for, of those from `start` to `stop`.
                first = max(rows.start, start)
                last = min(rows.stop, stop)
                if first < last:
                    part = batch.slice(first - start, last - first)
                    for column, name in zip(found, names):
                        column += part.column(name).to_pylist()
                start = stop
                if start >= rows.stop:
                    break
        return found

    def spans(self, size: int) -> list[range]:
        spans = []
        for start, stop in zip(self._starts, self._starts[1:]):
            spans += cut(range(start, stop), size)
        return spans


def open_columns(path: str) -> ColumnFile:
    """The rows of a ``.csv``, ``.jsonl`` or ``.parquet`` file."""
    suffix = Path(path).suffix.lower()
    if suffix == ".csv":
        return CsvFile(path)
    if suffix in (".jsonl", ".ndjson"):
        return JsonLines(path)
    if suffix == ".parquet":
        return ParquetColumns(path)
    raise ValueError(f"{path!r} has no columns: expected a file that ends in {', '.join(ENDINGS)}")


class TextRows:
    """The texts in a column of a file, in order, perhaps with labels in another.

    Attributes:
        source, key: those of the file.
        labels: (N,) positions in `classes`; None if no column of labels was named.
        classes: the distinct labels, as numbers if all are, else as text.
        names: row numbers.
    """

    def __init__(self, file: ColumnFile, text: str, label: str | None = None) -> None:
        file.require([text], "--text")
        self.file = file
        self.text = text
        self.source = file.source
        self.key = f"{file.key} {text}"
        self.names = range(len(file))
        self.labels: NDArray[np.int64] | None = None
        self.classes: tuple[str, ...] = ()
        if label is not None:
            file.require([label], "--label")
            self._read_labels(label)

    def __len__(self) -> int:
        return len(self.file)

    def _read_labels(self, column: str) -> None:
        from fdbd.data.labels import class_order

        values: list[str] = []
        for span in self.file.spans(CHUNK_ROWS):
            [part] = self.file.read(span, [column])
            for row, value in zip(span, part):
                if value is None:
                    raise ValueError(f"{self.source}, row {row}: its {column} is missing")
                values.append(str(value))
        self.classes = tuple(class_order(values))
        index = {name: number for number, name in enumerate(self.classes)}
        self.labels = np.array([index[value] for value in values], np.int64)

    def read(self, rows: range) -> tuple[list[str], dict[int, str]]:
        """The texts of the readable rows of a span, and what is wrong with the others by their
        place in it."""
        [values] = self.file.read(rows, [self.text])
        texts = []
        errors = {}
        for place, value in enumerate(values):
            if value is None or value == "":
                errors[place] = f"its {self.text} is missing"
            elif not isinstance(value, str):
                errors[place] = f"its {self.text} is a {type(value).__name__}, expected a text"
            else:
                texts.append(value)
        return texts, errors

    def spans(self, size: int) -> list[range]:
        """All rows in runs of about `size`."""
        return self.file.spans(size)
