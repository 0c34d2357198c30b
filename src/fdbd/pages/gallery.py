"""The gallery: what `fdbd score` wrote as one page on which a person reviews samples, the most
suspicious first."""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fdbd.core.pixels import ImageError, thumbnail
from fdbd.util.extras import require
from fdbd.util.files import write_text
from fdbd.util.pages import asset, render

COLUMNS = {
    "path": "string",
    "label": "int64",
    "class": "string",
    "score": "float64",
    "p_value": "float64",
    "is_ood": "bool",
    "error": "string",
    "nearest": "string",
}
"""What the page shows; features have no path, and the nearest class is there where it was asked
for."""


def write_gallery(
    scores: Path,
    out: Path,
    images: Path | None = None,
    *,
    embedded: int = 2000,
    title: str | None = None,
) -> int:
    """Write the page of a file of scores, and return its number of rows.

    Args:
        scores: a .parquet or .csv file of `fdbd score`, or its folder of Parquet parts.
        out: the page, one self-contained .html file.
        images: the folder that was scored, for thumbnails; None: the page shows names alone.
        embedded: thumbnails inside the page, of the most suspicious samples: 2000 are some 5 MB.
            The others are links to their files.
        title: of the page; default: the file's name.
    """

    def suspicion(row: dict[str, Any]) -> tuple[bool, float]:
        return row["error"] is None, -math.inf if row["score"] is None else row["score"]

    def picture(row: dict[str, Any]) -> str | None:
        try:
            return None if images is None else thumbnail(images / row["name"])
        except ImageError:
            return None

    rows = sorted(read_scores(scores), key=suspicion)
    with ThreadPoolExecutor(4) as pool:
        thumbnails = list(pool.map(picture, rows[:embedded])) if images else []
    link = images and os.path.relpath(images, out.absolute().parent).replace(os.sep, "/")
    page = render(
        "gallery.html",
        asset("gallery.js"),
        {**_columns(rows), "thumbnails": thumbnails, "folder": link},
        images="; img-src data: 'self' file:",
        title=title or f"Scores of {scores.name}",
        rows=len(rows),
        ood=sum(row["is_ood"] for row in rows),
    )
    write_text(out, page)
    return len(rows)


def read_scores(path: Path) -> list[dict[str, Any]]:
    """All rows of a file or folder that `fdbd score` wrote, each with a `name`: its path, or its
    number."""
    if not path.exists():
        raise FileNotFoundError(f"no scores at {str(path)!r}: no such file")
    pyarrow = require("pyarrow", "report")
    try:
        if path.suffix.lower() == ".csv":
            csv = require("pyarrow.csv", "report")
            types = {name: pyarrow.type_for_alias(kind) for name, kind in COLUMNS.items()}
            convert = csv.ConvertOptions(
                column_types=types, null_values=[""], strings_can_be_null=True
            )
            parse = csv.ParseOptions(newlines_in_values=True)
            table = csv.read_csv(path, parse_options=parse, convert_options=convert)
        else:
            table = require("pyarrow.parquet", "report").read_table(path)
    except Exception as error:  # pyarrow has no common class for what a damaged file raises
        raise ValueError(
            f"{str(path)!r} is no readable file of scores: {' '.join(str(error).split())}"
        ) from None
    if missing := [
        name for name in COLUMNS if name not in (*table.column_names, "path", "nearest")
    ]:
        raise ValueError(f"{str(path)!r} has no column {missing[0]!r}: give what fdbd score wrote")
    rows: list[dict[str, Any]] = table.to_pylist()
    for index, row in enumerate(rows):
        name = str(row.get("path") or row.get("row", index))
        # A path without the apostrophe that keeps a spreadsheet from taking it for a formula.
        row["name"] = name[1:] if name[0] == "'" and name[1:2] in tuple("=+-@\t\r") else name
    return rows


def _columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Columns, since 100,000 objects with seven names each would be mostly names."""
    classes: dict[str, int] = {}

    def code(name: str) -> int:
        return classes.setdefault(name, len(classes))

    def class_of(row: dict[str, Any]) -> str:
        return row["class"] or ("unread" if row["label"] is None else f"class {row['label']}")

    return {
        "names": [row["name"] for row in rows],
        "classes_of": [code(class_of(row)) for row in rows],
        "nearest_of": [code(row["nearest"]) if row.get("nearest") else -1 for row in rows],
        "scores": [row["score"] if math.isfinite(row["score"] or 0) else None for row in rows],
        "p_values": [row["p_value"] for row in rows],
        "ood": [int(row["is_ood"]) for row in rows],
        "errors": {
            index: row["error"] for index, row in enumerate(rows) if row["error"] is not None
        },
        "classes": list(classes),
    }
