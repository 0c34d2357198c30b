"""Records of decisions, which `fdbd serve --decisions FOLDER` writes, as rows like those of
`fdbd score`."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_NEEDED = ("request", "row", "guard", "label", "score", "p_value", "is_ood")


def is_records(path: Path) -> bool:
    """Whether a path is a folder of records, or one of its files."""
    if path.is_dir():
        return any(path.glob("decisions-*.jsonl"))
    return path.name.startswith("decisions-") and path.suffix == ".jsonl"


def read_records(path: Path, most: int | None = None) -> list[dict[str, Any]]:
    """Decisions with the columns of `fdbd score`, and a ``name``: the id of the request, with the
    number of the row if the request had several.

    What a shadow guard decided is left out, and so is a line that a killed service left
    unfinished.

    Args:
        most: keep that many, those with the lowest scores; None: keep all, in their order.
    """
    kept: Iterable[dict[str, Any]] = _rows(path)
    if most is not None:
        kept = heapq.nsmallest(most, kept, key=_score)
    rows = list(kept)
    if not rows:
        raise ValueError(
            f"{str(path)!r} holds no records of decisions: give the folder of fdbd serve "
            "--decisions"
        )
    return rows


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("decisions-*.jsonl"))
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                record = _record(line)
                if record is not None and record.get("role") != "shadow":
                    yield _as_row(record)


def _record(line: str) -> dict[str, Any] | None:
    """The record in a line; None if the line is not a complete record."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not all(name in record for name in _NEEDED):
        return None
    return record


def _as_row(record: dict[str, Any]) -> dict[str, Any]:
    name = str(record["request"])
    if record["row"]:
        name = f"{name}#{record['row']}"
    return {
        "name": name,
        "label": record["label"],
        "class": record.get("class"),
        "score": record["score"],
        "p_value": record["p_value"],
        "is_ood": bool(record["is_ood"]),
        "error": None,
        "guard": record["guard"],
        "thumbnail": record.get("thumbnail"),
    }


def _score(row: dict[str, Any]) -> float:
    """A score that was not finite is null in a record, and the lowest of all."""
    score = row["score"]
    return -math.inf if score is None else float(score)
