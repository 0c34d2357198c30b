"""Where decisions go: parts that appear whole one by one, and then one file. What was finished survives a kill.

Parts of ``scores.parquet`` lie in ``scores.parquet.parts`` until all are there; with a folder as the output they stay
there, and any Parquet reader takes the folder for one table. One row for each row of the input:

=========  =======  ====================================================================================
path, row  string,  the image's path below its folder, with bytes that are no UTF-8 escaped; or, where rows
           int64    have no files, their number from 0
label      int64    predicted class; null where the row could not be read
class      string   its name, where names are known
nearest    string   the class beyond the nearest decision boundary, by its name or else its number; null where there is
                    none. Only where asked for
score      double   higher is more in-distribution; −inf where a number was not finite; null if unread
p_value    double   share of calibration scores at or below; null if unread
is_ood     bool     true for every row that could not be read
error      string   why the row could not be read or scored, else null
discovery  bool     whether the row is OOD at the false discovery rate that was asked for; null if unread. Only where
                    asked for, and not in parts
=========  =======  ====================================================================================

In CSV, text that a spreadsheet would take for a formula has an apostrophe before it.
"""

from __future__ import annotations

import contextlib
import csv
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fdbd.core.batch import Batch
from fdbd.data.features import RowBatch
from fdbd.data.images import Names
from fdbd.decision.answers import check_rate, discovery_cutoff
from fdbd.decision.guard import Guard
from fdbd.util.extras import require
from fdbd.util.files import beside, check_place, lock, read_json, remove_drafts, write_json

PATIENCE_SECONDS = 10.0
"""How long a run waits for another to let go of the output: the workers of a killed one take a moment to notice."""
GROUP_ROWS = 65_536
"""Rows of a row group of the final file."""
NOT_FINITE = "its features or logits hold NaN or infinity"
COLUMNS = ("label", "class", "score", "p_value", "is_ood", "error")
_TYPES = {"row": "int64", "label": "int64", "score": "double", "p_value": "double", "is_ood": "bool"}
_FORMULA = re.compile(r"'*[=+\-@\t\r]")


@dataclass(frozen=True)
class Decided:
    """A guard's decision on some rows, in order."""

    names: Names
    labels: NDArray[np.int64]
    scores: NDArray[np.float64]
    p_values: NDArray[np.float64]
    is_ood: NDArray[np.bool_]
    is_read: NDArray[np.bool_]
    """Whether score and p-value are there; the label is where the score is finite, too."""
    errors: Mapping[int, str]
    """By place."""
    class_names: Sequence[str]
    nearest: NDArray[np.int64] | None
    """The class beyond the nearest decision boundary, −1 where there is none; None: not asked for."""

    def __len__(self) -> int:
        return len(self.is_read)

    def columns(self) -> dict[str, Any]:
        """Arrays by name, in the order of the output, masked where there is nothing to say."""
        unread, names = ~self.is_read, self.names
        unknown = unread | ~np.isfinite(self.scores)
        known_names = [_utf8(name) for name in self.class_names]

        def texts(labels: NDArray[np.int64], absent: NDArray[np.bool_]) -> Any:
            all_names = known_names or list(map(str, range(labels.max(initial=0) + 1)))
            return np.ma.array(_objects(all_names)[np.where(absent, 0, labels)], mask=absent)

        nothing = np.ma.array(np.empty(len(self), object), mask=True)
        errors = nothing.copy()
        for place, reason in self.errors.items():
            errors[place] = _utf8(reason)
        numbered = isinstance(names, range)
        return {
            "row" if numbered else "path": np.array(names) if numbered else _objects([_utf8(str(n)) for n in names]),
            "label": np.ma.array(self.labels, mask=unknown),
            "class": texts(self.labels, unknown) if known_names else nothing,
            **({} if self.nearest is None else {"nearest": texts(self.nearest, self.nearest < 0)}),
            "score": np.ma.array(self.scores, mask=unread),
            "p_value": np.ma.array(self.p_values, mask=unread),
            "is_ood": self.is_ood,
            "error": errors,
        }

    def to_arrow(self) -> Any:
        """As a `pyarrow.Table`."""
        pa = require("pyarrow", "report")
        return pa.table(
            {
                name: pa.array(np.ma.getdata(column), _type_of(name), mask=np.ma.getmaskarray(column))
                for name, column in self.columns().items()
            }
        )


def decide(guard: Guard, batch: RowBatch, class_names: Sequence[str] = (), nearest: bool = False) -> Decided:
    """The guard's decision on every row of the batch, in order; it fails closed row by row. With `nearest`, also the
    class beyond the nearest decision boundary of each."""
    count, inputs = len(batch.names), batch.inputs
    is_read = np.ones(count, bool)
    is_read[list(batch.errors)] = False
    labels, scores, p_values, is_ood = np.zeros(count, np.int64), np.zeros(count), np.zeros(count), np.ones(count, bool)
    others = np.full(count, -1, np.int64)
    if len(inputs.features if isinstance(inputs, Batch) else inputs):  # a model need not know what no rows are
        with torch.inference_mode():
            why = guard.explain(inputs) if nearest else None
            decision = guard(inputs) if why is None else why.decision
        if len(decision.labels) != is_read.sum():
            raise ValueError(f"{len(decision.labels)} decisions on {is_read.sum()} readable rows of {count}")
        found = [decision.labels, decision.scores, decision.p_values, decision.is_ood]
        if why is not None:
            is_there = torch.isfinite(why.nearest_distance) & torch.isfinite(decision.scores)
            found.append(torch.where(is_there, why.nearest, -1))
        for column, values in zip((labels, scores, p_values, is_ood, others), found):
            column[is_read] = values.cpu().numpy()
    errors = dict.fromkeys(np.flatnonzero(is_read & ~np.isfinite(scores)).tolist(), NOT_FINITE) | dict(batch.errors)
    is_ood[list(errors)] = True
    return Decided(
        batch.names, labels, scores, p_values, is_ood, is_read, errors, class_names, others if nearest else None
    )


class Counts(NamedTuple):
    """Of the whole output."""

    rows: int
    ood: int
    unreadable: int
    discoveries: int | None = None
    """Rows that are OOD at the false discovery rate; None: not asked for."""


class Output:
    """One output, in parts.

    Args:
        out: a ``.parquet`` or ``.csv`` file; anything without an ending is a folder.
        names: of the rows; they decide the first column.
        restart: throw parts of another run away; without it they are an error.
        nearest: tables have the column `nearest`.
        fdr: a false discovery rate, for the column `discovery`.
    """

    def __init__(
        self, out: Path, names: Names, restart: bool = False, *, nearest: bool = False, fdr: float | None = None
    ) -> None:
        suffix = out.suffix.lower()
        if suffix not in ("", ".parquet", ".csv"):
            raise ValueError(f"--out is {str(out)!r}, expected a .parquet or .csv file, or a folder")
        self.out, self._restart, self._fdr, self.is_folder = out, restart, fdr, not suffix
        if fdr is not None:
            check_rate(fdr)
        if fdr is not None and self.is_folder:
            raise ValueError("--fdr looks at all rows together: give --out as a .parquet or .csv file, not a folder")
        if not self.is_folder:
            check_place(out)
        elif not out.absolute().parent.is_dir():
            raise FileNotFoundError(f"the folder {str(out.parent)!r} does not exist; create it first")
        elif out.exists() and not out.is_dir():
            raise NotADirectoryError(f"--out is {str(out)!r}, a file; expected a folder, or a name with an ending")
        self.folder = out if self.is_folder else out.with_name(f"{out.name}.parts")
        columns = ["row" if isinstance(names, range) else "path", *COLUMNS]
        columns[3:3] = ["nearest"] if nearest else []
        self._format = _Csv(columns) if suffix == ".csv" else _Parquet(columns)
        self.settings: dict[str, Any] = {}

    @contextlib.contextmanager
    def hold(self, identity: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[None]:
        """Open the parts, and keep other runs away from them.

        Args:
            identity: JSON values that say what is scored by what. A later run with the same identity goes on where the
                first one ended.
            settings: JSON values that a later run takes over from the first, such as the rows of a part.
        """
        path = self.folder / "_lock"
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with lock(path, wait=False) as is_held:
                if is_held is not False:
                    try:
                        if is_held:  # without the lock another run may be writing what looks left by a killed one
                            for draft in self.folder.glob(".*.part-*"):
                                draft.unlink()
                            remove_drafts(self.out, older_than=0)
                        self._open(dict(identity), dict(settings))
                        yield
                        return
                    finally:
                        path.unlink(missing_ok=True)
            if time.monotonic() > deadline:
                raise RuntimeError(f"another run is writing {str(self.out)!r}; wait for it or choose another --out")
            time.sleep(0.2)

    def _open(self, identity: dict[str, Any], settings: dict[str, Any]) -> None:
        path = self.folder / "_about.json"  # readers of a Parquet folder pass names with an underscore over
        about = read_json(path)
        if self._restart or about is None or about.get("identity") != identity:
            parts = list(self.folder.glob("part-*"))
            if parts and not self._restart:
                raise ValueError(
                    f"{str(self.folder)!r} holds scores of another guard or of other data: remove it, choose another "
                    "--out, or give --restart"
                )
            for part in parts:
                part.unlink()
            about = {"identity": identity, "settings": settings}
            write_json(path, about)
        self.settings = about["settings"]

    def path(self, number: int) -> Path:
        return self.folder / f"part-{number:06d}{self._format.ending}"

    def has(self, number: int, rows: range) -> bool:
        """Whether a part is there, with as many rows as it should have."""
        try:
            return len(self._format.read(self.path(number)).is_ood) == len(rows)
        except (OSError, ValueError, TypeError, csv.Error):  # Arrow's errors are among them
            return False

    def write(self, number: int, tables: Sequence[Decided]) -> None:
        """Add a part, which these tables make up."""
        with beside(self.path(number)) as draft:
            self._format.write(draft, tables)

    def finish(self, total: int, count: int) -> Counts:
        """Put all parts together, in order, into the output, and count. Fails unless they hold `total` rows."""
        parts = [self.path(number) for number in range(count)]
        cutoff = None if self._fdr is None else self._cutoff(parts, self._fdr)
        counts = np.zeros(4, np.int64)
        with contextlib.ExitStack() as stack:
            join: Callable[[Any, Any], None] = lambda rows, named: None  # noqa: E731
            if not self.is_folder:
                draft = stack.enter_context(beside(self.out))
                join = stack.enter_context(self._format.joined(draft, has_discoveries=cutoff is not None))
            for part in map(self._format.read, parts):
                named = np.ma.array(part.p_values <= (cutoff or 0), mask=np.isnan(part.p_values))
                counts += [len(part.is_ood), part.is_ood.sum(), part.has_error.sum(), named.filled(False).sum()]
                join(part.rows, None if cutoff is None else named)
            rows, ood, unreadable, discoveries = counts.tolist()
            if rows != total:
                raise RuntimeError(f"the output has {rows} rows for {total} of the input; give --restart to score anew")
        if not self.is_folder:
            shutil.rmtree(self.folder)
        return Counts(rows, ood, unreadable, None if cutoff is None else discoveries)

    def _cutoff(self, parts: Sequence[Path], fdr: float) -> float:
        """The p-value up to which rows are discoveries. Counts of distinct values: memory does not grow with rows."""
        values, counts = np.zeros(0), np.zeros(0, np.int64)
        for part in parts:
            p_values = self._format.read(part).p_values
            found, number = np.unique(p_values[~np.isnan(p_values)], return_counts=True)
            values, places = np.unique(np.concatenate([values, found]), return_inverse=True)
            counts = np.bincount(places, np.concatenate([counts, number]), len(values)).astype(np.int64)
        return discovery_cutoff(values, counts, fdr)


class _Part(NamedTuple):
    """A part of the output, read back."""

    rows: Any
    """As its format joins them."""
    p_values: NDArray[np.float64]
    """NaN where a row could not be read."""
    is_ood: NDArray[np.bool_]
    has_error: NDArray[np.bool_]


class _Parquet:
    """Parts and output in Parquet."""

    ending = ".parquet"

    def __init__(self, columns: Sequence[str]) -> None:
        pa = require("pyarrow", "report")
        self.file = require("pyarrow.parquet", "report")
        self.schema = pa.schema([(name, _type_of(name)) for name in columns])
        self.concat = pa.concat_tables

    def write(self, path: Path, tables: Sequence[Decided]) -> None:
        self.file.write_table(self.concat([table.to_arrow() for table in tables]), path)

    def read(self, part: Path) -> _Part:
        table = self.file.read_table(part, schema=self.schema)
        p_values = table["p_value"].fill_null(np.nan).to_numpy()
        return _Part(table, p_values, table["is_ood"].to_numpy(), table["error"].is_valid().to_numpy())

    @contextlib.contextmanager
    def joined(self, out: Path, has_discoveries: bool) -> Iterator[Callable[[Any, Any], None]]:
        """A function that adds rows, in tables of at least GROUP_ROWS: a reader does not meet a thousand small row
        groups."""
        pa = require("pyarrow", "report")
        schema = self.schema.append(pa.field("discovery", pa.bool_())) if has_discoveries else self.schema
        waiting: list[Any] = []

        def add(table: Any, named: Any) -> None:
            if named is not None:
                table = table.append_column("discovery", pa.array(named.data, mask=np.ma.getmaskarray(named)))
            waiting.append(table)
            if sum(map(len, waiting)) >= GROUP_ROWS:
                flush()

        def flush() -> None:
            if waiting:
                writer.write_table(self.concat(waiting).combine_chunks())
            waiting.clear()

        with self.file.ParquetWriter(out, schema) as writer:
            yield add
            flush()


class _Csv:
    """Parts and output in CSV, by Python alone. Parts have no header."""

    ending = ".csv"

    def __init__(self, columns: Sequence[str]) -> None:
        self.header = columns

    def write(self, path: Path, tables: Sequence[Decided]) -> None:
        with open(path, "w", newline="", encoding="utf-8") as file:
            for table in tables:
                rows = zip(*(column.tolist() for column in table.columns().values()))
                csv.writer(file).writerows([_cell(value) for value in row] for row in rows)

    def read(self, part: Path) -> _Part:
        with open(part, newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file, strict=True))
        if any(len(row) != len(self.header) for row in rows):
            raise ValueError(f"{part} is damaged")
        p_values = np.array([float(row[-3] or "nan") for row in rows], float)
        is_ood, has_error = (
            np.array(values, bool) for values in ([r[-2] == "true" for r in rows], [r[-1] for r in rows])
        )
        return _Part(rows, p_values, is_ood, has_error)

    @contextlib.contextmanager
    def joined(self, out: Path, has_discoveries: bool) -> Iterator[Callable[[Any, Any], None]]:
        with open(out, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*self.header, *(["discovery"] if has_discoveries else [])])

            def add(rows: list[list[str]], named: Any) -> None:
                if named is not None:
                    rows = [[*row, _cell(flag)] for row, flag in zip(rows, named.tolist())]
                writer.writerows(rows)

            yield add


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return value
    return f"'{value}" if _FORMULA.match(value) else value


def _type_of(column: str) -> Any:
    return require("pyarrow", "report").type_for_alias(_TYPES.get(column, "string"))


def _objects(values: Sequence[Any]) -> Any:
    """An array of these very values."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _utf8(text: str) -> str:
    """A file may have any bytes for a name: those that are no UTF-8 are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()
