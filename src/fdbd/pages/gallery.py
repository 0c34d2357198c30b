"""The gallery: what `fdbd score` wrote as one page on which a person reviews samples, the most
suspicious first."""

import hashlib
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fdbd.core.pixels import ImageError, decode, thumbnail
from fdbd.data.label_maps import mask_path, overlaid, read_mask
from fdbd.data.records import is_records, read_records
from fdbd.util.extras import require
from fdbd.util.files import write_text
from fdbd.util.pages import asset, render
from fdbd.util.spreadsheet import unguarded
from fdbd.util.terminal import one_line

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
"""What the page shows."""
MAX_CHARACTERS = 600
"""Characters of a text that a card shows."""
MOST_RECORDS = 20_000
"""Recorded decisions that the page shows, those with the lowest scores: a service can have written
millions."""
# Features have no path, and the nearest class is there if it was asked for.
OPTIONAL_COLUMNS = ("path", "nearest")

MASKED_SIDE = 192
"""Pixels of the longer side of a thumbnail with a mask, whose regions are to be told apart."""


def write_gallery(
    scores: Path,
    out: Path,
    images: Path | None = None,
    masks: Path | None = None,
    *,
    embedded: int = 2000,
    text: str | None = None,
    title: str | None = None,
) -> int:
    """Write the page of a file of scores, and return its number of rows.

    Args:
        scores: a .parquet or .csv file of `fdbd score`, its folder of Parquet parts, or a folder of
            records of `fdbd serve --decisions`.
        out: the page, one self-contained .html file.
        images: the folder that was scored, for thumbnails; None: the page shows names alone.
        masks: the folder of masks that a guard of maps wrote; their OOD pixels are tinted.
        embedded: thumbnails inside the page, of the most suspicious samples: 2000 are some 5 MB.
            The others are links to their files.
        text: the column of the texts that were scored, which `fdbd score --keep` has carried
            through; None: the page shows no texts.
        title: of the page; default: the file's name.
    """
    rows = sorted(read_scores(scores), key=_suspicion)
    texts = None if text is None else _texts(rows, text, scores)
    # Records of decisions may hold pictures of their own.
    thumbnails: list[str | None] = [row.get("thumbnail") for row in rows[:embedded]]
    folder = None
    if images is not None:
        thumbnails = _thumbnails(images, masks, rows[:embedded])
        folder = os.path.relpath(images, out.absolute().parent).replace(os.sep, "/")
    data = _columns(rows)
    data["thumbnails"] = thumbnails
    data["folder"] = folder
    data["texts"] = texts
    data["key"] = _key(rows)
    page = render(
        "gallery.html",
        '"use strict";\n' + asset("chart.js") + asset("theme.js") + asset("gallery.js"),
        data,
        images="; img-src data: 'self' file:",
        own_style=asset("gallery.css"),
        title=title or f"Scores of {scores.name}",
        rows=len(rows),
        ood=sum(row["is_ood"] for row in rows),
    )
    write_text(out, page)
    return len(rows)


def _texts(rows: list[dict[str, Any]], column: str, scores: Path) -> list[str]:
    """The beginning of each row's text."""
    texts = []
    for row in rows:
        if column not in row:
            raise ValueError(
                f"{str(scores)!r} has no column {column!r}, which --text names: carry it through "
                f"with fdbd score --keep {column}"
            )
        texts.append(_shortened(str(row[column] or "")))
    return texts


def _shortened(text: str) -> str:
    """The text, or its beginning and an ellipsis.

    >>> _shortened("short"), len(_shortened("long " * 1000))
    ('short', 601)
    """
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + "…"


def _suspicion(row: dict[str, Any]) -> tuple[bool, float]:
    """Sorts unreadable samples first, then the lowest scores."""
    score = -math.inf if row["score"] is None else row["score"]
    return row["error"] is None, score


def _thumbnails(images: Path, masks: Path | None, rows: list[dict[str, Any]]) -> list[str | None]:
    def picture(row: dict[str, Any]) -> str | None:
        try:
            if masks is None:
                return thumbnail(images / row["name"])
            return _overlay(images, masks, row["name"])
        except ImageError:
            return None

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(picture, rows))


def _overlay(images: Path, masks: Path, name: str) -> str:
    """The thumbnail of an image whose OOD pixels are tinted; as it is if it has no mask."""
    pixels = decode(images / name)
    path = mask_path(masks, name)
    if not path.is_file():
        return thumbnail(pixels, MASKED_SIDE)
    try:
        return thumbnail(overlaid(pixels, read_mask(path)), MASKED_SIDE)
    except ValueError as error:
        # The image was replaced since it was scored.
        raise ImageError(str(error)) from None


def _key(rows: list[dict[str, Any]]) -> str:
    """A text that differs between pages over different samples, so that each page keeps its own
    review; if the same samples are scored again, their review stays."""
    names = "\0".join(sorted(row["name"] for row in rows))
    return hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest()[:16]


def read_scores(path: Path) -> list[dict[str, Any]]:
    """All rows of a file or folder that `fdbd score` wrote, each with a `name`: its path, or its
    number."""
    if not path.exists():
        raise FileNotFoundError(f"no scores at {str(path)!r}: no such file")
    if is_records(path):
        return read_records(path, MOST_RECORDS)
    pyarrow = require("pyarrow", "report")
    is_csv = path.suffix.lower() == ".csv"
    try:
        if is_csv:
            csv = require("pyarrow.csv", "report")
            types = {name: pyarrow.type_for_alias(kind) for name, kind in COLUMNS.items()}
            convert = csv.ConvertOptions(
                column_types=types, null_values=[""], strings_can_be_null=True
            )
            parse = csv.ParseOptions(newlines_in_values=True)
            table = csv.read_csv(path, parse_options=parse, convert_options=convert)
        else:
            table = require("pyarrow.parquet", "report").read_table(path)
    except Exception as error:
        # pyarrow has no common class for what a damaged file raises.
        raise ValueError(
            f"{str(path)!r} is not a readable file of scores: {one_line(error)[:200]}"
        ) from None
    for name in COLUMNS:
        if name not in (*table.column_names, *OPTIONAL_COLUMNS):
            raise ValueError(f"{str(path)!r} has no column {name!r}: give what fdbd score wrote")
    rows: list[dict[str, Any]] = table.to_pylist()
    for index, row in enumerate(rows):
        if is_csv:
            _unguard(row)
        row["name"] = str(row.get("path") or row.get("row", index))
    return rows


def _unguard(row: dict[str, Any]) -> None:
    """Take away the apostrophes that keep a spreadsheet from taking texts for formulas."""
    for column, value in row.items():
        if isinstance(value, str):
            row[column] = unguarded(value)


def _reason(error: str, name: str) -> str:
    """What is wrong with a sample, without its name, which stands on the card already.

    >>> _reason("a/b.png is not a readable image", "a/b.png")
    'is not a readable image'
    """
    for start in (name, Path(name).name):
        if start and error.startswith(start):
            rest = error[len(start) :].lstrip(":, ")
            return rest or error
    return error


def _columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows as one list per field: written as one JSON object per row, 100,000 rows would be
    mostly the names of their fields. Classes are numbers, their places in `classes`; -1: none."""
    classes: dict[str, int] = {}

    def code(name: str) -> int:
        return classes.setdefault(name, len(classes))

    def class_of(row: dict[str, Any]) -> str:
        if row["class"]:
            name: str = row["class"]
            return name
        if row["label"] is None:
            return "unread"
        return f"class {row['label']}"

    found: dict[str, Any] = {
        "names": [],
        "classes_of": [],
        "nearest_of": [],
        "scores": [],
        "p_values": [],
        "ood": [],
        "errors": {},
    }
    for index, row in enumerate(rows):
        found["names"].append(row["name"])
        found["classes_of"].append(code(class_of(row)))
        nearest = -1
        if row.get("nearest"):
            nearest = code(row["nearest"])
        found["nearest_of"].append(nearest)
        score = row["score"]
        # JSON has no numbers that are not finite.
        if score is not None and not math.isfinite(score):
            score = None
        found["scores"].append(score)
        found["p_values"].append(row["p_value"])
        found["ood"].append(int(row["is_ood"]))
        if row["error"] is not None:
            found["errors"][index] = _reason(row["error"], row["name"])
    found["classes"] = list(classes)
    return found
