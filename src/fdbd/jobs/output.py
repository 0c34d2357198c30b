"""Where scores go: parts that appear whole one by one, and then one file. What was finished survives a kill.

Parts of ``scores.parquet`` lie in ``scores.parquet.parts`` until all are there; with a folder as the output they stay
there, and any Parquet reader takes the folder for one table. Columns:

=========  =======  ====================================================================================
path, row  string,  the image's path below its folder, with bytes that are no UTF-8 escaped; or, where rows
           int64    have no files, their number from 0
label      int64    predicted class; null where the row could not be read
class      string   its name, where names are known
score      double   higher is more in-distribution; −inf where a number was not finite; null if unread
p_value    double   share of calibration scores at or below; null if unread
is_ood     bool     true for every row that could not be read
error      string   why the row could not be read or scored, else null
=========  =======  ====================================================================================
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fdbd.core.batch import Batch
from fdbd.data.features import Names, RowBatch
from fdbd.decision.guard import Guard
from fdbd.util.extras import require
from fdbd.util.files import beside, lock, read_json, remove_drafts, write_json

PATIENCE_SECONDS = 10.0
"""How long a run waits for another to let go of the output: the workers of a killed one take a moment to notice."""
GROUP_ROWS = 65_536
"""Rows of a row group of the final file."""


class Counts(NamedTuple):
    """Of the whole output."""

    rows: int
    ood: int
    unreadable: int


class Parts:
    """The parts of one output.

    Args:
        out: a ``.parquet`` or ``.csv`` file; anything without an ending is a folder.
        identity: JSON values that say what is scored by what. A later run with the same identity goes on where the
            first one ended.
        schema: of the rows, as in `rows.schema`.
        settings: JSON values that a later run takes over from the first, such as the rows of a part.
        restart: throw parts of another identity away; without it they are an error.
    """

    def __init__(
        self, out: Path, identity: Mapping[str, Any], schema: Any, settings: Mapping[str, Any], restart: bool = False
    ) -> None:
        suffix = out.suffix.lower()
        if suffix not in ("", ".parquet", ".csv"):
            raise ValueError(f"--out is {str(out)!r}, expected a .parquet or .csv file, or a folder")
        if not out.absolute().parent.is_dir():
            raise FileNotFoundError(f"the folder {str(out.parent)!r} does not exist; create it first")
        self.out, self.schema = out, schema
        self.is_folder = not suffix
        self.folder = out if self.is_folder else out.with_name(f"{out.name}.parts")
        self._identity, self._new_settings, self._restart = dict(identity), dict(settings), restart
        self.settings: dict[str, Any] = {}

    @property
    def _about(self) -> Path:
        return self.folder / "_about.json"  # readers of a Parquet folder pass names with an underscore over

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Opens the parts, and keeps other runs away from them."""
        path = self.folder / "_lock"
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with lock(path, wait=False) as is_held:
                if is_held is not False:
                    try:
                        if is_held:
                            self._clean()
                        self._open()
                        yield
                        return
                    finally:
                        path.unlink(missing_ok=True)
            if time.monotonic() > deadline:
                raise RuntimeError(f"another run is writing {str(self.out)!r}; wait for it or choose another --out")
            time.sleep(0.2)

    def _clean(self) -> None:
        """Removes what a killed run was writing. Not without the lock: another run may be writing it now."""
        for draft in self.folder.glob(".*.part-*.parquet"):
            draft.unlink()
        remove_drafts(self.out, older_than=0)

    def _open(self) -> None:
        about = read_json(self._about)
        if self._restart or about is None or about.get("identity") != self._identity:
            parts = list(self.folder.glob("part-*.parquet"))
            if parts and not self._restart:
                raise ValueError(
                    f"{str(self.folder)!r} holds scores of another guard or of other data: remove it, choose another "
                    "--out, or give --restart"
                )
            for part in parts:
                part.unlink()
            about = {"identity": self._identity, "settings": self._new_settings}
            write_json(self._about, about)
        self.settings = about["settings"]

    def path(self, number: int) -> Path:
        return self.folder / f"part-{number:06d}.parquet"

    def has(self, number: int, rows: range) -> bool:
        """Whether a part is there, with as many rows as it should have."""
        parquet = require("pyarrow.parquet", "report")
        try:
            return bool(parquet.read_metadata(self.path(number)).num_rows == len(rows))
        except (OSError, ValueError):  # ArrowInvalid is a ValueError
            return False

    def write(self, number: int, table: Any) -> None:
        """Adds a part."""
        with beside(self.path(number)) as temporary:
            require("pyarrow.parquet", "report").write_table(table, temporary)

    def finish(self, total: int, count: int) -> Counts:
        """Puts all parts together, in order, into the output, and counts. Fails unless they hold `total` rows."""
        tables = self._tables(count)
        if self.is_folder:
            return _checked(_count(tables), total)
        with beside(self.out) as temporary:
            with self._writer(temporary) as writer:
                counts = _count(_regrouped(tables), writer)
            _checked(counts, total)
        shutil.rmtree(self.folder)
        return counts

    def _tables(self, count: int) -> Iterator[Any]:
        parquet = require("pyarrow.parquet", "report")
        for number in range(count):
            yield parquet.read_table(self.path(number), schema=self.schema)

    def _writer(self, path: Path) -> Any:
        if self.out.suffix.lower() == ".csv":
            return require("pyarrow.csv", "report").CSVWriter(path, self.schema)
        return require("pyarrow.parquet", "report").ParquetWriter(path, self.schema)


def _count(tables: Iterator[Any], writer: Any = None) -> Counts:
    compute = require("pyarrow.compute", "report")
    counts = Counts(0, 0, 0)
    for table in tables:
        if writer is not None:
            writer.write_table(table)
        own = (len(table), compute.sum(table["is_ood"]).as_py() or 0, len(table) - table["error"].null_count)
        counts = Counts(*(before + more for before, more in zip(counts, own)))
    return counts


def _checked(counts: Counts, total: int) -> Counts:
    if counts.rows != total:
        raise RuntimeError(f"the output has {counts.rows} rows for {total} of the input; give --restart to score anew")
    return counts


def _regrouped(tables: Iterator[Any]) -> Iterator[Any]:
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


NOT_FINITE = "its features or logits hold NaN or infinity"


def schema(names: Names) -> Any:
    """The `pyarrow.Schema` of the output: it depends on whether rows have paths or numbers."""
    pa = require("pyarrow", "report")
    key = ("row", pa.int64()) if isinstance(names, range) else ("path", pa.string())
    fields = [("label", pa.int64()), ("class", pa.string()), ("score", pa.float64()), ("p_value", pa.float64())]
    return pa.schema([key, *fields, ("is_ood", pa.bool_()), ("error", pa.string())])


def decide_rows(guard: Guard, batch: RowBatch, class_names: Sequence[str] = ()) -> Any:
    """The guard's decision on every row of the batch as a `pyarrow.Table`, in order; it fails closed row by row."""
    pa = require("pyarrow", "report")
    names, count = batch.names, len(batch.names)
    read = np.ones(count, bool)
    read[list(batch.errors)] = False
    labels, scores, p_values, is_ood = _decide(guard, batch.inputs)
    if len(labels) != read.sum():
        raise ValueError(f"{len(labels)} decisions on {read.sum()} readable rows of {count}")
    is_finite = np.isfinite(scores)
    known = read.copy()
    known[read] = is_finite
    errors: list[str | None] = [None] * count
    for position in np.flatnonzero(read & ~known).tolist():
        errors[position] = NOT_FINITE
    for position, reason in batch.errors.items():
        errors[position] = reason

    def column(values: Any, where: Any, kind: Any) -> Any:
        spread = np.zeros(count, values.dtype)
        spread[read] = values
        return pa.array(spread, kind, mask=None if where.all() else ~where)

    label = column(labels, known, pa.int64())
    classes = _texts(class_names).take(label) if class_names else pa.nulls(count, pa.string())
    decisions = column(is_ood, np.ones(count, bool), pa.bool_())
    if not read.all():
        decisions = pa.array(decisions.to_numpy(zero_copy_only=False) | ~read)
    return pa.Table.from_arrays(
        [
            pa.array(np.arange(names.start, names.stop), pa.int64()) if isinstance(names, range) else _texts(names),
            label,
            classes,
            column(scores, read, pa.float64()),
            column(p_values, read, pa.float64()),
            decisions,
            _texts(errors),
        ],
        schema=schema(names),
    )


def _texts(values: Sequence[str | None]) -> Any:
    """Strings for Arrow, which takes only UTF-8: a file may have any bytes for a name, and those are escaped."""
    pa = require("pyarrow", "report")
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        escaped = [text and text.encode("utf-8", "backslashreplace").decode() for text in values]
        return pa.array(escaped, pa.string())


def _decide(guard: Guard, inputs: Tensor | Batch) -> tuple[Any, ...]:
    """Labels, scores, p-values and decisions as arrays; none for no rows, without asking the model."""
    if not len(inputs.features if isinstance(inputs, Batch) else inputs):
        return np.zeros(0, np.int64), np.zeros(0), np.zeros(0), np.zeros(0, bool)
    with torch.inference_mode():
        decision = guard(inputs)
    return tuple(part.cpu().numpy() for part in (decision.labels, decision.scores, decision.p_values, decision.is_ood))
