"""Where scores go: parts that appear whole one by one, and then one file. What was finished survives a kill.

Parts of ``scores.parquet`` lie in ``scores.parquet.parts`` until all are there; with a folder as the output they stay
there, and any Parquet reader takes the folder for one table.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fdbd.util.extras import require
from fdbd.util.files import beside, is_beside
from fdbd.util.store import lock, read_json, write_json

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
        for path in self.out.absolute().parent.iterdir():
            if is_beside(path, self.out):
                path.unlink()

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
