"""Scored rows: what `fdbd score` wrote, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdbd.data.records import is_records, read_records
from fdbd.util.extras import require
from fdbd.util.spreadsheet import unguarded
from fdbd.util.terminal import one_line

NEEDED = ("label", "score", "p_value", "is_ood", "error")
_TEXTS = ("path", "class", "nearest", "error", "guard")


@dataclass(frozen=True)
class ScoredRows:
    """N rows of decisions, in the order of the input."""

    source: str
    names: list[str]
    """The path of each, or its row number."""
    labels: NDArray[np.int64]
    """Predicted classes; −1 if a row could not be read."""
    classes: list[str | None]
    """Names of the predicted classes, if they are known."""
    scores: NDArray[np.float64]
    """NaN if a row could not be read, −inf if a number was not finite."""
    p_values: NDArray[np.float64]
    is_ood: NDArray[np.bool_]
    errors: list[str | None]
    guard: str | None = None
    """The id of the guard that scored them, if the file says so."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def is_scored(self) -> NDArray[np.bool_]:
        """Which rows have a finite score."""
        return np.isfinite(self.scores)

    def places(self) -> dict[str, int]:
        """Where the row of each name is."""
        return {name: place for place, name in enumerate(self.names)}


def holds_scores(path: Path) -> bool:
    """Whether a file or folder is one of `fdbd score`, by its columns."""
    if is_records(path):
        return True
    try:
        names = _column_names(path)
    except (OSError, ValueError):
        return False
    return set(NEEDED) <= set(names)


def read_scored(path: Path) -> ScoredRows:
    """The rows of a ``.parquet`` or ``.csv`` file of `fdbd score`, of its folder of parts, or of
    the records of `fdbd serve --decisions`."""
    if not path.exists():
        raise FileNotFoundError(f"no scores at {str(path)!r}: no such file")
    if is_records(path):
        return _of_records(path)
    try:
        table = read_table(path)
    except Exception as error:
        # pyarrow has no common class for what a damaged file raises.
        raise ValueError(
            f"{str(path)!r} is not a readable file of scores: {one_line(error)[:200]}"
        ) from None
    for name in NEEDED:
        if name not in table.column_names:
            raise ValueError(f"{str(path)!r} has no column {name!r}: give what fdbd score wrote")
    guards = {None}
    if "guard" in table.column_names:
        guards = set(table["guard"].unique().to_pylist())
    if len(guards) > 1:
        raise ValueError(f"{str(path)!r} has rows of {len(guards)} guards, expected those of one")
    is_csv = path.suffix.lower() == ".csv"
    classes: list[str | None] = [None] * len(table)
    if "class" in table.column_names:
        classes = _texts(table, "class", is_csv)
    # A file without rows names no guard.
    guard = next(iter(guards), None)
    return ScoredRows(
        source=str(path),
        names=_names(table, is_csv),
        labels=table["label"].fill_null(-1).to_numpy(),
        classes=classes,
        scores=table["score"].fill_null(np.nan).to_numpy(),
        p_values=table["p_value"].fill_null(np.nan).to_numpy(),
        is_ood=table["is_ood"].to_numpy(),
        errors=_texts(table, "error", is_csv),
        guard=guard,
    )


def _of_records(path: Path) -> ScoredRows:
    """The decisions that a service has recorded, those with the lowest scores."""
    records = read_records(path)
    guards = {record["guard"] for record in records}
    if len(guards) > 1:
        raise ValueError(f"{str(path)!r} has rows of {len(guards)} guards, expected those of one")
    scores = []
    for record in records:
        score = record["score"]
        # A score that was not finite is null in a record.
        scores.append(-np.inf if score is None else score)
    return ScoredRows(
        source=str(path),
        names=[record["name"] for record in records],
        labels=np.array([record["label"] for record in records], np.int64),
        classes=[record["class"] for record in records],
        scores=np.array(scores, np.float64),
        p_values=np.array([record["p_value"] for record in records], np.float64),
        is_ood=np.array([record["is_ood"] for record in records], np.bool_),
        errors=[None] * len(records),
        guard=guards.pop(),
    )


def _names(table: Any, is_csv: bool) -> list[str]:
    """The path or number of each row."""
    if "path" in table.column_names:
        return [str(path) for path in _texts(table, "path", is_csv)]
    if "row" in table.column_names:
        return [str(row) for row in table["row"].to_pylist()]
    return [str(row) for row in range(len(table))]


def _texts(table: Any, column: str, is_csv: bool) -> list[str | None]:
    """The texts of a column; those of CSV without the apostrophes against formulas."""
    texts: list[str | None] = table[column].to_pylist()
    if not is_csv:
        return texts
    return [None if text is None else unguarded(text) for text in texts]


def read_table(path: Path) -> Any:
    """The Arrow table in a file or folder of scores, with all its columns."""
    if path.suffix.lower() != ".csv":
        return require("pyarrow.parquet", "report").read_table(path, partitioning=None)
    arrow = require("pyarrow", "report")
    csv = require("pyarrow.csv", "report")
    types = {
        "row": arrow.int64(),
        "label": arrow.int64(),
        "score": arrow.float64(),
        "p_value": arrow.float64(),
        "is_ood": arrow.bool_(),
    }
    for name in _TEXTS:
        types[name] = arrow.string()
    convert = csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True)
    parse = csv.ParseOptions(newlines_in_values=True)
    return csv.read_csv(path, parse_options=parse, convert_options=convert)


def _column_names(path: Path) -> Sequence[str]:
    """The columns of a file, of which the rows are not read."""
    if path.suffix.lower() == ".csv":
        with open(path, encoding="utf-8") as file:
            return file.readline().strip().split(",")
    if path.is_dir():
        parts = sorted(path.glob("part-*.parquet"))
        if not parts:
            return []
        path = parts[0]
    if path.suffix.lower() != ".parquet":
        return []
    names: Sequence[str] = require("pyarrow.parquet", "report").read_schema(path).names
    return names
