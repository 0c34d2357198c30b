"""Parquet and CSV as formats of scores: how a part is written, read back, and joined to others.

In CSV, text that a spreadsheet would take for a formula has an apostrophe before it.
"""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fdbd.decision.rows import TYPES, Decided, to_arrow
from fdbd.util.extras import require
from fdbd.util.spreadsheet import guarded

GROUP_ROWS = 65_536
"""Rows of a row group in the final Parquet file, at least: readers are slow on thousands of small
ones."""


class Facts(NamedTuple):
    """What a summary needs to know of some rows."""

    p_values: NDArray[np.float64]
    """NaN if the row could not be read."""
    is_ood: NDArray[np.bool_]
    has_error: NDArray[np.bool_]


class Format(ABC):
    """A file format of scores. A "table" is some rows as the format keeps them."""

    ending: str

    @abstractmethod
    def table(self, decided: Decided) -> Any:
        """Decisions as a table."""

    @abstractmethod
    def read(self, path: Path) -> Any:
        """The table in a part; whatever is wrong with the part raises."""

    @abstractmethod
    def facts(self, table: Any, columns: Sequence[str]) -> Facts:
        """What a summary needs of a table with these columns."""

    @abstractmethod
    def with_discoveries(self, table: Any, discoveries: Any) -> Any:
        """The table with one more column, whose values are masked if a row could not be read."""

    @abstractmethod
    def write(self, path: Path, tables: Iterable[Any], columns: Sequence[str]) -> None:
        """Write tables with these columns one after the other into one file."""


class Parquet(Format):
    """Parts and output in Parquet, as Arrow tables."""

    ending = ".parquet"

    def __init__(self, types: Mapping[str, str] = TYPES) -> None:
        self._types = types
        self._arrow = require("pyarrow", "report")
        self._parquet = require("pyarrow.parquet", "report")

    def table(self, decided: Decided) -> Any:
        return to_arrow(decided, self._types)

    def read(self, path: Path) -> Any:
        return self._parquet.read_table(path, partitioning=None)

    def facts(self, table: Any, columns: Sequence[str]) -> Facts:
        p_values = table["p_value"].fill_null(np.nan).to_numpy()
        is_ood = table["is_ood"].to_numpy()
        has_error = table["error"].is_valid().to_numpy()
        return Facts(p_values, is_ood, has_error)

    def with_discoveries(self, table: Any, discoveries: Any) -> Any:
        flags = self._arrow.array(discoveries.data, mask=np.ma.getmaskarray(discoveries))
        return table.append_column("discovery", flags)

    def write(self, path: Path, tables: Iterable[Any], columns: Sequence[str]) -> None:
        fields = [(name, self._arrow.type_for_alias(self._types[name])) for name in columns]
        schema = self._arrow.schema(fields)
        with self._parquet.ParquetWriter(path, schema) as writer:
            waiting = schema.empty_table()
            for table in tables:
                waiting = self._arrow.concat_tables([waiting, table])
                if len(waiting) >= GROUP_ROWS:
                    writer.write_table(waiting.combine_chunks())
                    waiting = schema.empty_table()
            if len(waiting):
                writer.write_table(waiting.combine_chunks())


class Csv(Format):
    """Parts and output in CSV, as lists of cells, by Python alone."""

    ending = ".csv"

    def table(self, decided: Decided) -> list[list[Any]]:
        columns = [column.tolist() for column in decided.values()]
        rows = []
        for values in zip(*columns):
            rows.append([cell(value) for value in values])
        return rows

    def read(self, path: Path) -> list[list[Any]]:
        with open(path, newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file, strict=True)
        if any(len(row) != len(header) for row in rows):
            raise ValueError(f"{path} is damaged")
        return rows

    def facts(self, table: list[list[Any]], columns: Sequence[str]) -> Facts:
        p_value = columns.index("p_value")
        is_ood = columns.index("is_ood")
        error = columns.index("error")
        return Facts(
            np.array([float(row[p_value] or "nan") for row in table]),
            np.array([row[is_ood] == "true" for row in table], bool),
            np.array([row[error] != "" for row in table], bool),
        )

    def with_discoveries(self, table: list[list[Any]], discoveries: Any) -> list[list[Any]]:
        return [[*row, cell(flag)] for row, flag in zip(table, discoveries.tolist())]

    def write(self, path: Path, tables: Iterable[list[list[Any]]], columns: Sequence[str]) -> None:
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            for rows in tables:
                writer.writerows(rows)


def cell(value: Any) -> Any:
    """A value as it stands in CSV."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return guarded(value)
    return value
