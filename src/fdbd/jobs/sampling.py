"""A random draw of scored rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fdbd.data.records import is_records, read_records
from fdbd.jobs.formats import Csv, cell
from fdbd.jobs.scored import read_scored, read_table
from fdbd.util.extras import require
from fdbd.util.files import beside, check_place


class Sampled(NamedTuple):
    """What was drawn."""

    rows: int
    of: int
    ood: int


def write_sample(scores: Path, out: Path, count: int, seed: int) -> Sampled:
    """Draw `count` rows without replacement, each with the same chance, and write them in the order
    of the file with all their columns; of records of a service, with those of `fdbd score` and the
    thumbnails."""
    suffix = out.suffix.lower()
    if suffix not in (".parquet", ".csv"):
        raise ValueError(f"--out is {str(out)!r}, expected a .parquet or .csv file")
    check_place(out)
    rows = read_scored(scores)
    if count > len(rows):
        raise ValueError(f"{str(scores)!r} has {len(rows)} rows, and {count} were asked for")
    chosen = np.sort(np.random.default_rng(seed).choice(len(rows), count, replace=False))
    table = _table_of_records(scores) if is_records(scores) else read_table(scores)
    table = table.take(chosen)
    with beside(out) as draft:
        if suffix == ".csv":
            is_csv = scores.suffix.lower() == ".csv"
            Csv().write(draft, [_csv_rows(table, is_csv)], table.column_names)
        else:
            require("pyarrow.parquet", "report").write_table(table, draft)
    return Sampled(count, len(rows), int(rows.is_ood[chosen].sum()))


def _table_of_records(records: Path) -> Any:
    """What a service has recorded, as a table with the columns of `fdbd score`."""
    arrow = require("pyarrow", "report")
    types = {
        "path": arrow.string(),
        "label": arrow.int64(),
        "class": arrow.string(),
        "score": arrow.float64(),
        "p_value": arrow.float64(),
        "is_ood": arrow.bool_(),
        "error": arrow.string(),
        "guard": arrow.string(),
        "thumbnail": arrow.string(),
    }
    rows = []
    for record in read_records(records):
        # A score that was not finite is null in a record.
        score = -math.inf if record["score"] is None else record["score"]
        rows.append({**record, "path": record["name"], "score": score})
    return arrow.Table.from_pylist(rows, arrow.schema(list(types.items())))


def _csv_rows(table: Any, is_from_csv: bool) -> list[list[Any]]:
    """The rows of a table as cells. Texts that come from CSV have their apostrophes already."""
    rows = []
    for values in zip(*(column.to_pylist() for column in table.columns)):
        cells = []
        for value in values:
            if is_from_csv and isinstance(value, str):
                cells.append(value)
            else:
                cells.append(cell(value))
        rows.append(cells)
    return rows
