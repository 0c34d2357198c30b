"""Where decisions go: parts that appear whole one by one, and then one file. What was finished
survives a kill.

Parts of ``scores.parquet`` lie in ``scores.parquet.parts`` until all are there; with a folder as
the output they stay there, and any Parquet reader takes the folder for one table. One row for each
row of the input:

- ``path`` (string), below the folder, with bytes that are no UTF-8 escaped; or ``row`` (int64), from 0, without files;
- ``label`` (int64), the predicted class, and ``class`` (string), its name where names are known; null if unread;
- ``nearest`` (string), where asked for: the class beyond the nearest decision boundary, by its name or else its number;
- ``score`` (double), −inf where a number was not finite, and ``p_value`` (double); null if unread;
- ``is_ood`` (bool), true for every row that could not be read, and ``error`` (string), why it could not, else null;
- ``discovery`` (bool), where asked for, and not in parts: OOD at the false discovery rate; null if unread.

In CSV, text that a spreadsheet would take for a formula has an apostrophe before it.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fdbd.data.features import RowBatch
from fdbd.data.images import Names
from fdbd.decision.answers import check_rate, discovery_cutoff
from fdbd.decision.guard import Guard
from fdbd.util.extras import require
from fdbd.util.files import beside, check_place, lock, read_json, remove_drafts, write_json

PATIENCE_SECONDS = 10.0
"""How long a run waits for another to release the output: the workers of a killed one take a moment
to notice."""
GROUP_ROWS = (
    65_536  # at least, in a row group of the final file: readers are slow on a thousand small ones
)
NOT_FINITE = "its features or logits hold NaN or infinity"
COLUMNS = ("label", "class", "score", "p_value", "is_ood", "error")
TYPES = {"row": "int64", "label": "int64", "score": "double", "p_value": "double"}
TYPES |= dict.fromkeys(("is_ood", "discovery"), "bool") | dict.fromkeys(
    ("path", "class", "nearest", "error"), "string"
)
_FORMULA = re.compile(r"'*[=+\-@\t\r]")

Decided = dict[str, Any]
"""Decisions on some rows, in order: arrays by column in the order of the output, masked where there
is no value."""
_Facts = tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]
"""p-values (NaN where a row could not be read), which rows are OOD, and which have an error."""


def to_arrow(decided: Decided) -> Any:
    """Decisions as a `pyarrow.Table`."""
    pa = require("pyarrow", "report")
    columns = [
        pa.array(
            np.ma.getdata(column), pa.type_for_alias(TYPES[name]), mask=np.ma.getmaskarray(column)
        )
        for name, column in decided.items()
    ]
    return pa.table(columns, names=list(decided))


def decide(
    guard: Guard, batch: RowBatch, class_names: Sequence[str] = (), nearest: bool = False
) -> Decided:
    """The guard's decision on every row of the batch, in order; it fails closed row by row. With
    `nearest`, also the class beyond the nearest decision boundary of each."""
    count, is_read = len(batch.names), np.ones(len(batch.names), bool)
    is_read[list(batch.errors)] = False
    labels, others = np.zeros(count, np.int64), np.full(count, -1, np.int64)
    scores, p_values, is_ood = np.full(count, np.nan), np.full(count, np.nan), np.ones(count, bool)
    if is_read.any():  # a model may not take a batch of no rows
        with torch.inference_mode():
            why = guard.explain(batch.inputs) if nearest else None
            decision = guard(batch.inputs) if why is None else why.decision
        if len(decision.labels) != is_read.sum():
            raise ValueError(
                f"{len(decision.labels)} decisions on {is_read.sum()} readable rows of {count}"
            )
        found = [decision.labels, decision.scores, decision.p_values, decision.is_ood]
        if why is not None:
            is_there = torch.isfinite(why.nearest_distance) & torch.isfinite(decision.scores)
            found.append(torch.where(is_there, why.nearest, -1))
        for column, values in zip((labels, scores, p_values, is_ood, others), found):
            column[is_read] = values.cpu().numpy()
    unknown = ~np.isfinite(scores)
    is_ood |= unknown
    errors = np.ma.array(np.empty(count, object), mask=True)
    for place in np.flatnonzero(unknown).tolist():
        errors[place] = _utf8(batch.errors.get(place, NOT_FINITE))

    def named(labels: NDArray[np.int64], absent: NDArray[np.bool_], names: Sequence[str]) -> Any:
        return np.ma.array(_texts(names)[np.where(absent, 0, labels)], mask=absent)

    numbers = list(map(str, range(others.max(initial=0) + 1)))
    return {
        **(
            {"row": np.array(batch.names)}
            if isinstance(batch.names, range)
            else {"path": _texts(batch.names)}
        ),
        "label": np.ma.array(labels, mask=unknown),
        "class": named(
            labels, unknown if class_names else ~np.zeros(count, bool), class_names or [""]
        ),
        **({"nearest": named(others, others < 0, class_names or numbers)} if nearest else {}),
        "score": np.ma.array(scores, mask=~is_read),
        "p_value": np.ma.array(p_values, mask=~is_read),
        "is_ood": is_ood,
        "error": errors,
    }


class Output:
    """One output, in parts: a ``.parquet`` or ``.csv`` file, or without an ending a folder. Names
    of the rows decide the first column, `nearest` and a false discovery rate `fdr` add theirs. With
    `restart`, parts of another run are thrown away; without it they are an error."""

    def __init__(
        self,
        out: Path,
        names: Names,
        restart: bool = False,
        *,
        nearest: bool = False,
        fdr: float | None = None,
    ) -> None:
        suffix = out.suffix.lower()
        if suffix not in ("", ".parquet", ".csv"):
            raise ValueError(
                f"--out is {str(out)!r}, expected a .parquet or .csv file, or a folder"
            )
        self.out, self._restart, self._fdr, self.is_folder = out, restart, fdr, not suffix
        if fdr is not None:
            check_rate(fdr)
            if self.is_folder:
                raise ValueError(
                    "--fdr looks at all rows at once: give --out as a .parquet or .csv file, not a folder"
                )
        if not self.is_folder:
            check_place(out)
        elif not out.absolute().parent.is_dir():
            raise FileNotFoundError(
                f"the folder {str(out.parent)!r} does not exist; create it first"
            )
        elif out.exists() and not out.is_dir():
            raise NotADirectoryError(
                f"--out is {str(out)!r}, a file; expected a folder, or a name with an ending"
            )
        self.folder = out if self.is_folder else out.with_name(f"{out.name}.parts")
        self.columns = ["row" if isinstance(names, range) else "path", *COLUMNS]
        self.columns[3:3] = ["nearest"] if nearest else []
        self._format: _Csv | _Parquet = _Csv() if suffix == ".csv" else _Parquet()

    @contextlib.contextmanager
    def hold(self, identity: dict[str, Any]) -> Iterator[None]:
        """Keep other runs away from the parts. `identity` are JSON values that say what is scored
        by what, in which parts: a later run with the same values continues."""
        path, deadline = self.folder / "_lock", time.monotonic() + PATIENCE_SECONDS
        while True:
            with lock(path, wait=False) as is_held:
                if is_held is not False:
                    try:
                        if is_held:  # without the lock another run may be writing what looks left by a killed one
                            for draft in self.folder.glob(".*.part-*"):
                                draft.unlink()
                            remove_drafts(self.out, older_than=0)
                        self._open(identity)
                        yield
                        return
                    finally:
                        path.unlink(missing_ok=True)
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"another run is writing {str(self.out)!r}; wait for it or choose another --out"
                )
            time.sleep(0.2)

    def _open(self, identity: dict[str, Any]) -> None:
        path = (
            self.folder / "_about.json"
        )  # readers of a Parquet folder skip names that start with an underscore
        if not self._restart and read_json(path) == identity:
            return
        for part in self.folder.glob("part-*"):
            if not self._restart:
                raise ValueError(
                    f"{str(self.folder)!r} holds scores of another guard, of other data or of an earlier version of "
                    "fdbd: remove it, choose another --out, or give --restart"
                )
            part.unlink()
        write_json(path, identity)

    def path(self, number: int) -> Path:
        return self.folder / f"part-{number:06d}{self._format.ending}"

    def has(self, number: int, rows: range) -> bool:
        """Whether a part is there, with as many rows as it should have."""
        try:
            return len(self._format.facts(self._format.read(self.path(number)))[0]) == len(rows)
        except (
            OSError,
            ValueError,
            TypeError,
            LookupError,
            csv.Error,
        ):  # Arrow's errors are among them
            return False

    def write(self, number: int, tables: Sequence[Decided]) -> None:
        """Add a part, which these tables make up."""
        with beside(self.path(number)) as draft:
            self._format.write(draft, map(self._format.table, tables), self.columns)

    def finish(self, total: int, count: int) -> tuple[int, int, int, int | None]:
        """Put all parts together, in order, into the output, which fails unless they hold `total`
        rows. Returns the numbers of rows, of OOD rows, of rows with an error, and of discoveries
        where they were asked for."""
        form, cutoff, counts = self._format, None, np.zeros(4, np.int64)
        paths = [self.path(number) for number in range(count)]
        if self._fdr is not None:  # counts of distinct p-values: memory does not grow with rows
            values, numbers = np.zeros(0), np.zeros(0, np.int64)
            for p_values, _, _ in map(form.facts, map(form.read, paths)):
                found, number = np.unique(p_values[~np.isnan(p_values)], return_counts=True)
                values, places = np.unique(np.concatenate([values, found]), return_inverse=True)
                numbers = np.bincount(
                    places, np.concatenate([numbers, number]), len(values)
                ).astype(np.int64)
            cutoff = discovery_cutoff(values, numbers, self._fdr)

        def counted() -> Iterator[Any]:
            """The rows of each part, with their discoveries where they were asked for."""
            for table in map(form.read, paths):
                p_values, is_ood, has_error = form.facts(table)
                discoveries = np.ma.array(p_values <= (cutoff or 0), mask=np.isnan(p_values))
                counts[:] += [
                    len(is_ood),
                    is_ood.sum(),
                    has_error.sum(),
                    discoveries.filled(False).sum(),
                ]
                yield table if cutoff is None else form.mark(table, discoveries)
            if counts[0] != total:
                raise RuntimeError(
                    f"the output has {counts[0]} rows for {total} of the input: score again with --restart"
                )

        if self.is_folder:
            collections.deque(counted(), maxlen=0)
        else:
            with beside(self.out) as draft:
                form.write(
                    draft,
                    counted(),
                    self.columns if cutoff is None else [*self.columns, "discovery"],
                )
            shutil.rmtree(self.folder)
        rows, ood, unreadable, discovered = counts.tolist()
        return rows, ood, unreadable, None if cutoff is None else discovered


class _Parquet:
    """Parts and output in Parquet, as Arrow tables."""

    ending = ".parquet"
    table = staticmethod(to_arrow)

    def __init__(self) -> None:
        self.arrow, self.file = require("pyarrow", "report"), require("pyarrow.parquet", "report")

    def read(self, path: Path) -> Any:
        return self.file.read_table(path, partitioning=None)

    def facts(self, table: Any) -> _Facts:
        p_values = table["p_value"].fill_null(np.nan).to_numpy()
        return p_values, table["is_ood"].to_numpy(), table["error"].is_valid().to_numpy()

    def mark(self, table: Any, discoveries: Any) -> Any:
        flags = self.arrow.array(discoveries.data, mask=np.ma.getmaskarray(discoveries))
        return table.append_column("discovery", flags)

    def write(self, path: Path, tables: Iterable[Any], columns: Sequence[str]) -> None:
        schema = self.arrow.schema(
            [(name, self.arrow.type_for_alias(TYPES[name])) for name in columns]
        )
        with self.file.ParquetWriter(path, schema) as writer:
            waiting = schema.empty_table()
            for table in tables:
                waiting = self.arrow.concat_tables([waiting, table])
                if len(waiting) >= GROUP_ROWS:
                    writer.write_table(waiting.combine_chunks())
                    waiting = schema.empty_table()
            if len(waiting):
                writer.write_table(waiting.combine_chunks())


class _Csv:
    """Parts and output in CSV, by Python alone, as lists of cells."""

    ending = ".csv"

    def table(self, decided: Decided) -> list[list[Any]]:
        return [
            list(map(_cell, row)) for row in zip(*(column.tolist() for column in decided.values()))
        ]

    def read(self, path: Path) -> list[list[Any]]:
        with open(path, newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file, strict=True)
        if any(len(row) != len(header) for row in rows):
            raise ValueError(f"{path} is damaged")
        return rows

    def facts(self, rows: list[list[Any]]) -> _Facts:
        p_values = np.array([float(row[-3] or "nan") for row in rows])
        return (
            p_values,
            np.array([row[-2] == "true" for row in rows], bool),
            np.array([row[-1] != "" for row in rows], bool),
        )

    def mark(self, rows: list[list[Any]], discoveries: Any) -> list[list[Any]]:
        return [[*row, _cell(flag)] for row, flag in zip(rows, discoveries.tolist())]

    def write(self, path: Path, tables: Iterable[list[list[Any]]], columns: Sequence[str]) -> None:
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            for rows in tables:
                writer.writerows(rows)


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def _texts(values: Sequence[Any]) -> Any:
    array = np.empty(len(values), object)
    array[:] = [_utf8(str(value)) for value in values]
    return array


def _utf8(text: str) -> str:
    """The text with what is no UTF-8 escaped: a file may have any bytes for a name."""
    return text.encode("utf-8", "backslashreplace").decode()
