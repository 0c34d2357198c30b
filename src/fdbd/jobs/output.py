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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Union

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fdbd.core.batch import Batch
from fdbd.data.decoding import Names
from fdbd.data.features import RowBatch
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
_FORMULA = re.compile(r"'*[=+\-@\t\r]")


class Decided(NamedTuple):
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
    nearest: NDArray[np.int64] | None = None
    """The class beyond the nearest decision boundary, −1 where there is none; None: not asked for."""

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def concat(cls, tables: Sequence[Decided]) -> Decided:
        """Tables that follow each other, at least one, as one."""
        first, starts = tables[0], np.cumsum([0, *map(len, tables)]).tolist()
        errors = {start + place: why for start, table in zip(starts, tables) for place, why in table.errors.items()}
        names: Names = [str(name) for table in tables for name in table.names]
        if isinstance(first.names, range):
            names = range(first.names.start, first.names.start + starts[-1])
        labels, scores, p_values, is_ood, is_read = (np.concatenate(c) for c in zip(*(table[1:6] for table in tables)))
        nearest = None
        if first.nearest is not None:
            nearest = np.concatenate([table.nearest for table in tables if table.nearest is not None])
        return cls(names, labels, scores, p_values, is_ood, is_read, errors, first.class_names, nearest)

    @property
    def _has_label(self) -> NDArray[np.bool_]:
        return self.is_read & np.isfinite(self.scores)

    def to_arrow(self) -> Any:
        """As a `pyarrow.Table` of `schema`."""
        pa = require("pyarrow", "report")
        names = self.names
        label = pa.array(self.labels, pa.int64(), mask=~self._has_label)
        classes = _texts(self.class_names).take(label) if self.class_names else pa.nulls(len(names), pa.string())
        columns = [
            pa.array(np.arange(names.start, names.stop), pa.int64()) if isinstance(names, range) else _texts(names),
            label,
            classes,
            *([] if self.nearest is None else [_texts(list(self._nearest_names()))]),
            pa.array(self.scores, pa.float64(), mask=~self.is_read),
            pa.array(self.p_values, pa.float64(), mask=~self.is_read),
            pa.array(self.is_ood, pa.bool_()),
            _texts(list(map(self.errors.get, range(len(names))))) if self.errors else pa.nulls(len(names), pa.string()),
        ]
        return pa.Table.from_arrays(columns, schema=schema(names, self.nearest is not None))

    def _nearest_names(self) -> Iterator[str | None]:
        assert self.nearest is not None
        for label in self.nearest.tolist():
            yield None if label < 0 else self.class_names[label] if self.class_names else str(label)

    def to_rows(self) -> Iterator[list[Any]]:
        """Row by row, for CSV."""
        known = self._has_label.tolist()
        values = zip(self.labels.tolist(), self.scores.tolist(), self.p_values.tolist(), self.is_ood.tolist())
        nearest = [] if self.nearest is None else list(self._nearest_names())
        for place, (label, score, p_value, is_ood) in enumerate(values):
            is_read = self.is_read[place]
            name = self.class_names[label] if known[place] and self.class_names else None
            numbers = [score, p_value] if is_read else [None, None]
            names = [name, *nearest[place : place + 1]]
            yield [self.names[place], label if known[place] else None, *names, *numbers, is_ood, self.errors.get(place)]


Table = Union[Decided, Any]
"""Decisions, or a `pyarrow.Table` of them that comes from another process."""


def decide(guard: Guard, batch: RowBatch, class_names: Sequence[str] = (), nearest: bool = False) -> Decided:
    """The guard's decision on every row of the batch, in order; it fails closed row by row. With `nearest`, also the
    class beyond the nearest decision boundary of each."""
    count = len(batch.names)
    is_read = np.ones(count, bool)
    is_read[list(batch.errors)] = False
    found = _ask(guard, batch.inputs, nearest)
    if len(found[0]) != is_read.sum():
        raise ValueError(f"{len(found[0])} decisions on {is_read.sum()} readable rows of {count}")
    labels, scores, p_values, is_ood = np.zeros(count, np.int64), np.zeros(count), np.zeros(count), np.ones(count, bool)
    others = np.full(count, -1, np.int64)
    for column, values in zip((labels, scores, p_values, is_ood, others), found):
        column[is_read] = values
    errors = dict.fromkeys(np.flatnonzero(is_read & ~np.isfinite(scores)).tolist(), NOT_FINITE) | dict(batch.errors)
    is_ood[list(errors)] = True
    return Decided(
        batch.names, labels, scores, p_values, is_ood, is_read, errors, class_names, others if nearest else None
    )


def schema(names: Names, nearest: bool = False) -> Any:
    """The `pyarrow.Schema` of parts: it depends on whether rows have paths or numbers."""
    pa = require("pyarrow", "report")
    kinds = {"label": pa.int64(), "score": pa.float64(), "p_value": pa.float64(), "is_ood": pa.bool_()}
    return pa.schema([(name, kinds.get(name, pa.string())) for name in _columns(names, nearest)[1:]]).insert(
        0, pa.field("row", pa.int64()) if isinstance(names, range) else pa.field("path", pa.string())
    )


def _columns(names: Names, nearest: bool) -> list[str]:
    label, name, *others = COLUMNS
    key = "row" if isinstance(names, range) else "path"
    return [key, label, name, *(["nearest"] if nearest else []), *others]


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
        self.out, self._restart, self._fdr = out, restart, fdr
        self.is_folder = not suffix
        if fdr is not None:
            check_rate(fdr)
            if self.is_folder:
                raise ValueError(
                    "--fdr looks at all rows together: give --out as a .parquet or .csv file, not a folder"
                )
        if not self.is_folder:
            check_place(out)
        elif not out.absolute().parent.is_dir():
            raise FileNotFoundError(f"the folder {str(out.parent)!r} does not exist; create it first")
        elif out.exists() and not out.is_dir():
            raise NotADirectoryError(f"--out is {str(out)!r}, a file; expected a folder, or a name with an ending")
        self.folder = out if self.is_folder else out.with_name(f"{out.name}.parts")
        self._format = _Csv(names, nearest) if suffix == ".csv" else _Parquet(names, nearest)
        self.settings: dict[str, Any] = {}

    @property
    def _about(self) -> Path:
        return self.folder / "_about.json"  # readers of a Parquet folder pass names with an underscore over

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
                        if is_held:
                            self._clean()
                        self._open(dict(identity), dict(settings))
                        yield
                        return
                    finally:
                        path.unlink(missing_ok=True)
            if time.monotonic() > deadline:
                raise RuntimeError(f"another run is writing {str(self.out)!r}; wait for it or choose another --out")
            time.sleep(0.2)

    def _clean(self) -> None:
        """Remove what a killed run was writing. Not without the lock: another run may be writing it now."""
        for draft in self.folder.glob(".*.part-*"):
            draft.unlink()
        remove_drafts(self.out, older_than=0)

    def _open(self, identity: dict[str, Any], settings: dict[str, Any]) -> None:
        about = read_json(self._about)
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
            write_json(self._about, about)
        self.settings = about["settings"]

    def path(self, number: int) -> Path:
        return self.folder / f"part-{number:06d}{self._format.ending}"

    def has(self, number: int, rows: range) -> bool:
        """Whether a part is there, with as many rows as it should have."""
        return self._format.count(self.path(number)) == len(rows)

    def write(self, number: int, tables: Sequence[Table]) -> None:
        """Add a part, which these tables make up."""
        with beside(self.path(number)) as draft:
            self._format.write(draft, tables)

    def finish(self, total: int, count: int) -> Counts:
        """Put all parts together, in order, into the output, and count. Fails unless they hold `total` rows."""
        parts = [self.path(number) for number in range(count)]
        if self.is_folder:
            return _checked(self._format.join(parts, None), total)
        cutoff = None if self._fdr is None else self._cutoff(parts, self._fdr)
        with beside(self.out) as draft:
            counts = _checked(self._format.join(parts, draft, cutoff), total)
        shutil.rmtree(self.folder)
        return counts

    def _cutoff(self, parts: Sequence[Path], fdr: float) -> float:
        """The p-value up to which rows are discoveries. Counts of distinct values: memory does not grow with rows."""
        values, counts = np.zeros(0), np.zeros(0, np.int64)
        for part in parts:
            found, number = np.unique(self._format.p_values(part), return_counts=True)
            values, places = np.unique(np.concatenate([values, found]), return_inverse=True)
            counts = np.bincount(places, np.concatenate([counts, number]), len(values)).astype(np.int64)
        return discovery_cutoff(values, counts, fdr)


class _Parquet:
    """Parts and output in Parquet."""

    ending = ".parquet"

    def __init__(self, names: Names, nearest: bool) -> None:
        self.schema = schema(names, nearest)

    def count(self, part: Path) -> int | None:
        try:
            return int(require("pyarrow.parquet", "report").read_metadata(part).num_rows)
        except (OSError, ValueError):  # ArrowInvalid is a ValueError
            return None

    def write(self, path: Path, tables: Sequence[Table]) -> None:
        arrow = [table.to_arrow() if isinstance(table, Decided) else table for table in tables]
        require("pyarrow.parquet", "report").write_table(require("pyarrow", "report").concat_tables(arrow), path)

    def p_values(self, part: Path) -> NDArray[np.float64]:
        """Those of the rows that were read."""
        table = require("pyarrow.parquet", "report").read_table(part, columns=["p_value"])
        found: NDArray[np.float64] = table["p_value"].drop_null().to_numpy()
        return found

    def join(self, parts: Sequence[Path], out: Path | None, cutoff: float | None = None) -> Counts:
        parquet, compute = require("pyarrow.parquet", "report"), require("pyarrow.compute", "report")
        pa = require("pyarrow", "report")
        whole = self.schema if cutoff is None else self.schema.append(pa.field("discovery", pa.bool_()))
        counts, discoveries = Counts(0, 0, 0), 0
        tables = (parquet.read_table(part, schema=self.schema) for part in parts)
        with contextlib.nullcontext() if out is None else parquet.ParquetWriter(out, whole) as writer:
            for table in tables if writer is None else _regrouped(tables):
                if cutoff is not None:
                    named = compute.less_equal(table["p_value"], cutoff)
                    table = table.append_column("discovery", named)
                    discoveries += compute.sum(named).as_py() or 0
                if writer is not None:
                    writer.write_table(table)
                ood, unreadable = compute.sum(table["is_ood"]).as_py() or 0, len(table) - table["error"].null_count
                counts = Counts(counts.rows + len(table), counts.ood + ood, counts.unreadable + unreadable)
        return counts if cutoff is None else counts._replace(discoveries=discoveries)


class _Csv:
    """Parts and output in CSV, by Python alone. Parts have no header."""

    ending = ".csv"

    def __init__(self, names: Names, nearest: bool) -> None:
        self.header = _columns(names, nearest)

    def count(self, part: Path) -> int | None:
        try:
            return self.join([part], None).rows
        except (OSError, ValueError, csv.Error):
            return None

    def write(self, path: Path, tables: Sequence[Table]) -> None:
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            for table in tables:
                rows = table.to_rows() if isinstance(table, Decided) else map(dict.values, table.to_pylist())
                writer.writerows([_cell(value) for value in row] for row in rows)

    def p_values(self, part: Path) -> NDArray[np.float64]:
        """Those of the rows that were read."""
        return np.array([float(row[-3]) for row in self._rows(part) if row[-3]])

    def _rows(self, part: Path) -> Iterator[list[str]]:
        with open(part, newline="", encoding="utf-8") as file:
            for row in csv.reader(file, strict=True):
                if len(row) != len(self.header):
                    raise ValueError(f"{part} is damaged")
                yield row

    def join(self, parts: Sequence[Path], out: Path | None, cutoff: float | None = None) -> Counts:
        ood = unreadable = count = discoveries = 0
        with contextlib.ExitStack() as stack:
            target = None
            if out is not None:
                target = csv.writer(stack.enter_context(open(out, "w", newline="", encoding="utf-8")))
                target.writerow([*self.header, *([] if cutoff is None else ["discovery"])])
            for row in (row for part in parts for row in self._rows(part)):
                count, ood, unreadable = count + 1, ood + (row[-2] == "true"), unreadable + bool(row[-1])
                if cutoff is not None:
                    named = _cell(float(row[-3]) <= cutoff) if row[-3] else ""
                    discoveries += named == "true"
                    row.append(named)
                if target is not None:
                    target.writerow(row)
        return Counts(count, ood, unreadable, None if cutoff is None else discoveries)


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return value
    text = _utf8(value)
    return f"'{text}" if _FORMULA.match(text) else text


def _checked(counts: Counts, total: int) -> Counts:
    if counts.rows != total:
        raise RuntimeError(f"the output has {counts.rows} rows for {total} of the input; give --restart to score anew")
    return counts


def _regrouped(tables: Iterable[Any]) -> Iterator[Any]:
    """The same rows in tables of at least GROUP_ROWS, so that a reader does not meet a thousand small row groups."""
    concat = require("pyarrow", "report").concat_tables
    waiting: list[Any] = []
    for table in tables:
        waiting.append(table)
        if sum(map(len, waiting)) >= GROUP_ROWS:
            yield concat(waiting).combine_chunks()
            waiting = []
    if waiting:
        yield concat(waiting).combine_chunks()


def _texts(values: Sequence[str | None]) -> Any:
    """Strings for Arrow, which takes only UTF-8."""
    pa = require("pyarrow", "report")
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        return pa.array([text and _utf8(text) for text in values], pa.string())


def _utf8(text: str) -> str:
    """A file may have any bytes for a name: those that are no UTF-8 are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def _ask(guard: Guard, inputs: Tensor | Batch, nearest: bool) -> tuple[Any, ...]:
    """Labels, scores, p-values, decisions and, asked for, nearest classes as arrays; none for no rows, without asking
    the model."""
    if not len(inputs.features if isinstance(inputs, Batch) else inputs):
        return np.zeros(0, np.int64), np.zeros(0), np.zeros(0), np.zeros(0, bool), np.zeros(0, np.int64)
    others = []
    with torch.inference_mode():
        if nearest:
            why = guard.explain(inputs)
            decision = why.decision
            is_there = torch.isfinite(why.nearest_distance) & torch.isfinite(decision.scores)
            others = [torch.where(is_there, why.nearest, -1)]
        else:
            decision = guard(inputs)
    parts = (decision.labels, decision.scores, decision.p_values, decision.is_ood, *others)
    return tuple(part.cpu().numpy() for part in parts)
