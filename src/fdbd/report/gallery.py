"""The gallery: what `fdbd score` wrote as one page on which a person reviews samples, the most suspicious first."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from fdbd.data.images import ImageError, thumbnail
from fdbd.report.page import render
from fdbd.util.extras import require
from fdbd.util.files import write_text

EMBEDDED = 2000
"""Thumbnails inside the page, of the most suspicious samples: some 5 MB. The others are links to their files."""
_COLUMNS = ("label", "class", "score", "p_value", "is_ood", "error")


class Scored(NamedTuple):
    """One row of the scores."""

    name: str
    label: int | None
    class_name: str | None
    score: float | None
    p_value: float | None
    is_ood: bool
    error: str | None
    nearest: str | None
    """The class beyond the nearest decision boundary, where the scores have it."""


def write_gallery(
    scores: Path, out: Path, images: Path | None = None, *, embedded: int = EMBEDDED, title: str | None = None
) -> int:
    """Write the page of a file of scores, and return its number of rows.

    Args:
        scores: a .parquet or .csv file of `fdbd score`, or its folder of Parquet parts.
        out: the page, one self-contained .html file.
        images: the folder that was scored, for thumbnails; None: the page shows names alone.
        embedded: thumbnails inside the page, of the most suspicious samples.
        title: of the page; default: the file's name.
    """
    rows = sorted(read_scores(scores), key=_suspicion)
    thumbnails = _thumbnails(images, rows[:embedded]) if images is not None else []
    link = None if images is None else os.path.relpath(images, out.absolute().parent).replace(os.sep, "/")
    page = render(
        "gallery.html",
        resources.files("fdbd.report").joinpath("assets", "gallery.js").read_text(encoding="utf-8"),
        _payload(rows, thumbnails, link),
        images="; img-src data: 'self' file:",
        title=title or f"Scores of {scores.name}",
        rows=len(rows),
        ood=sum(row.is_ood for row in rows),
    )
    write_text(out, page)
    return len(rows)


def read_scores(path: Path) -> list[Scored]:
    """All rows of a file or folder that `fdbd score` wrote."""
    if not path.exists():
        raise FileNotFoundError(f"no scores at {str(path)!r}: no such file")
    if path.suffix.lower() == ".csv":
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            _check(reader.fieldnames or (), path)
            return [_row(record, index) for index, record in enumerate(reader)]
    parquet = require("pyarrow.parquet", "report")
    try:
        table = parquet.read_table(path)
    except Exception as error:  # pyarrow has no common class for what a damaged file raises
        raise ValueError(f"{str(path)!r} is no readable Parquet file: {' '.join(str(error).split())}") from None
    _check(table.column_names, path)
    return [_row(record, index) for index, record in enumerate(table.to_pylist())]


def _check(columns: Sequence[str], path: Path) -> None:
    if missing := [name for name in _COLUMNS if name not in columns]:
        raise ValueError(f"{str(path)!r} has no column {missing[0]!r}: give what fdbd score wrote")


def _row(record: dict[str, Any], index: int) -> Scored:
    """A record of Parquet, or of CSV, where everything is text."""

    def number(name: str) -> float | None:
        value = record.get(name)
        return None if value is None or value == "" else float(value)

    label = number("label")
    name = record.get("path")
    return Scored(
        name=_plain(str(name)) if name not in (None, "") else str(record.get("row", index)),
        label=None if label is None else int(label),
        class_name=record.get("class") or None,
        score=number("score"),
        p_value=number("p_value"),
        is_ood=str(record["is_ood"]).lower() == "true",
        error=record.get("error") or None,
        nearest=record.get("nearest") or None,
    )


def _plain(name: str) -> str:
    """A path without the apostrophe that keeps a spreadsheet from taking it for a formula."""
    return name[1:] if len(name) > 1 and name[0] == "'" and name[1] in "=+-@\t\r" else name


def _suspicion(row: Scored) -> tuple[bool, float]:
    """Unreadable samples first, then from the lowest score."""
    return row.error is None, -math.inf if row.score is None else row.score


def _thumbnails(folder: Path, rows: Iterable[Scored]) -> list[str | None]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda row: _thumbnail(folder / row.name), rows))


def _thumbnail(path: Path) -> str | None:
    """A small picture as a data address; None where the file is no image."""
    try:
        return thumbnail(path)
    except ImageError:
        return None


def _payload(rows: list[Scored], thumbnails: list[str | None], link: str | None) -> dict[str, Any]:
    """Columns, since 100,000 objects with seven names each would be mostly names."""
    classes: dict[str, int] = {}

    def code(name: str | None, label: int | None) -> int:
        text = name if name is not None else "unread" if label is None else f"class {label}"
        return classes.setdefault(text, len(classes))

    return {
        "names": [row.name for row in rows],
        "classes_of": [code(row.class_name, row.label) for row in rows],
        "nearest_of": [-1 if row.nearest is None else code(row.nearest, 0) for row in rows],
        "scores": [None if row.score is None or not math.isfinite(row.score) else row.score for row in rows],
        "p_values": [row.p_value for row in rows],
        "ood": [int(row.is_ood) for row in rows],
        "errors": {index: row.error for index, row in enumerate(rows) if row.error is not None},
        "classes": list(classes),
        "thumbnails": thumbnails,
        "folder": link,
    }
