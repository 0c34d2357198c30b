"""Where decisions go: parts that appear whole one by one, and then one file. What was finished
survives a kill.

Parts of ``scores.parquet`` lie in ``scores.parquet.parts`` until all are there; with a folder as
the output they stay there, and any Parquet reader takes the folder for one table. The columns are
those of `fdbd.decision.rows`, then ``guard`` (string), the guard's id, and on request ``discovery``
(bool), not in parts: OOD at the false discovery rate; null if the row could not be read.
"""

from __future__ import annotations

import contextlib
import csv
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fdbd.data.images import Names
from fdbd.decision.answers import check_rate, discovery_cutoff
from fdbd.decision.rows import FILE_COLUMNS, TYPES, Decided
from fdbd.jobs.formats import Csv, Facts, Format, Parquet
from fdbd.util.files import beside, check_place, lock, read_json, remove_drafts, write_json

PATIENCE_SECONDS = 10.0
"""How long a run waits for another to release the output: the workers of a killed run take a moment
to notice."""
_FINISHED = {"finished": True}
"""Stands in place of the parts' description while they are removed, when their output is there
already."""


@dataclass
class Totals:
    """What the rows of an output are."""

    rows: int = 0
    ood: int = 0
    unreadable: int = 0
    """Rows with an error."""
    discoveries: int | None = None
    """Rows that are OOD at the false discovery rate, if one was asked for."""

    def add(self, facts: Facts) -> None:
        """Count the rows of one part."""
        self.rows += len(facts.is_ood)
        self.ood += int(facts.is_ood.sum())
        self.unreadable += int(facts.has_error.sum())


class Output:
    """One output, in parts: a ``.parquet`` or ``.csv`` file, or without an ending a folder.

    Args:
        out: the file or folder.
        names: of the rows; they decide the first column.
        restart: discard the parts of another guard or dataset; without it they are an error.
        nearest: whether there is a column ``nearest``.
        fdr: the false discovery rate for a column ``discovery``; None: no such column.
        keep: columns of the input that follow the first one, with their Arrow types.
    """

    def __init__(
        self,
        out: Path,
        names: Names,
        restart: bool = False,
        *,
        nearest: bool = False,
        fdr: float | None = None,
        keep: Mapping[str, str] | None = None,
    ) -> None:
        suffix = out.suffix.lower()
        if suffix not in ("", ".parquet", ".csv"):
            raise ValueError(
                f"--out is {str(out)!r}, expected a .parquet or .csv file, or a folder"
            )
        self.out = out
        self.is_folder = not suffix
        self._restart = restart
        self._fdr = fdr
        if fdr is not None:
            _check_fdr(fdr, self.is_folder)
        if self.is_folder:
            _check_folder(out)
            self.folder = out
        else:
            check_place(out)
            self.folder = out.with_name(f"{out.name}.parts")
        keep = keep or {}
        for name in keep:
            if name in TYPES:
                raise ValueError(
                    f"--keep names {name!r}, which is a column of the scores: rename it in the "
                    "input"
                )
        first = "row" if isinstance(names, range) else "path"
        self.columns = [first, *keep, *FILE_COLUMNS]
        if nearest:
            self.columns.insert(self.columns.index("class") + 1, "nearest")
        self._format: Format
        if suffix == ".csv":
            self._format = Csv()
        else:
            self._format = Parquet({**TYPES, **keep})

    def add_ood_share(self) -> None:
        """Have a column ``ood_share``, which guards of maps fill."""
        self.columns.insert(self.columns.index("p_value") + 1, "ood_share")

    @contextlib.contextmanager
    def hold(self, identity: dict[str, Any]) -> Iterator[None]:
        """Keep other runs away from the parts. `identity` holds JSON values that say which guard
        scores which data, in which parts: a later run with the same values continues."""
        with self._locked() as is_locked:
            try:
                if is_locked:
                    self._remove_drafts()
                self._open(identity)
                yield
            finally:
                self._remove_lock()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the lock of the parts. Yields False if the file system has no locks; the run then
        goes on without. RuntimeError: another run has held it for `PATIENCE_SECONDS`."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with lock(self._lock_path, wait=False) as is_held:
                if is_held is not False:
                    yield is_held is True
                    return
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"another run is writing {str(self.out)!r}; wait for it or choose another --out"
                )
            time.sleep(0.2)

    @property
    def _lock_path(self) -> Path:
        return self.folder / "_lock"

    def _remove_lock(self) -> None:
        """Remove the lock's file, and the folder of parts if it is empty."""
        self._lock_path.unlink(missing_ok=True)
        if not self.is_folder:
            # Parts of an unfinished run keep their folder.
            with contextlib.suppress(OSError):
                self.folder.rmdir()

    def _remove_drafts(self) -> None:
        """Remove what killed runs left half-written. Only under the lock: without it another run
        may be writing its draft now."""
        for draft in self.folder.glob(".*.part-*"):
            draft.unlink()
        remove_drafts(self.out, older_than=0)

    def _open(self, identity: dict[str, Any]) -> None:
        """Take over the parts of an earlier run of the same job, or begin anew."""
        # Readers of a Parquet folder skip names that start with an underscore.
        path = self.folder / "_about.json"
        found = read_json(path)
        if not self._restart and found == identity:
            return
        may_discard = self._restart or found == _FINISHED
        for part in self.folder.glob("part-*"):
            if not may_discard:
                raise ValueError(
                    f"{str(self.folder)!r} holds scores of another guard, of other data or of an "
                    "earlier version of fdbd: remove it, choose another --out, or give --restart"
                )
            part.unlink()
        write_json(path, identity)

    def path(self, number: int) -> Path:
        """Where a part is."""
        return self.folder / f"part-{number:06d}{self._format.ending}"

    def has(self, number: int, rows: range) -> bool:
        """Whether a part is there, with as many rows as it should have."""
        try:
            table = self._format.read(self.path(number))
            facts = self._format.facts(table, self.columns)
        except (OSError, ValueError, TypeError, LookupError, csv.Error):
            # Arrow's errors are among these.
            return False
        return len(facts.is_ood) == len(rows)

    def write(self, number: int, tables: Sequence[Decided]) -> None:
        """Add a part, which these tables make up."""
        with beside(self.path(number)) as draft:
            self._format.write(draft, map(self._format.table, tables), self.columns)

    def finish(self, total: int, count: int) -> Totals:
        """Join `count` parts, in order, into the output, which fails unless they hold `total`
        rows."""
        paths = [self.path(number) for number in range(count)]
        totals = Totals()
        if self.is_folder:
            # The parts are the output. They are only counted.
            for path in paths:
                totals.add(self._format.facts(self._format.read(path), self.columns))
            _check_total(totals, total)
            return totals
        columns = self.columns
        cutoff = None
        if self._fdr is not None:
            cutoff = self._find_cutoff(paths, self._fdr)
            columns = [*columns, "discovery"]
            totals.discoveries = 0
        with beside(self.out) as draft:
            self._format.write(draft, self._joined(paths, cutoff, totals), columns)
            _check_total(totals, total)
        self._remove_parts()
        return totals

    def _find_cutoff(self, paths: Sequence[Path], fdr: float) -> float:
        """The largest p-value that is a discovery, over all parts. It keeps the number of rows with
        each distinct p-value, so that memory does not grow with the rows."""
        values = np.zeros(0)
        counts = np.zeros(0, np.int64)
        for path in paths:
            p_values = self._format.facts(self._format.read(path), self.columns).p_values
            known = p_values[~np.isnan(p_values)]
            new_values, new_counts = np.unique(known, return_counts=True)
            values, places = np.unique(np.concatenate([values, new_values]), return_inverse=True)
            weights = np.concatenate([counts, new_counts])
            counts = np.bincount(places, weights, len(values)).astype(np.int64)
        return discovery_cutoff(values, counts, fdr)

    def _joined(self, paths: Sequence[Path], cutoff: float | None, totals: Totals) -> Iterator[Any]:
        """The tables of all parts, with their discoveries if there is a cutoff. Each table that is
        given is added to `totals`."""
        discoveries = 0
        for path in paths:
            table = self._format.read(path)
            facts = self._format.facts(table, self.columns)
            totals.add(facts)
            if cutoff is not None:
                is_discovery = facts.p_values <= cutoff
                discoveries += int(is_discovery.sum())
                totals.discoveries = discoveries
                flags = np.ma.array(is_discovery, mask=np.isnan(facts.p_values))
                table = self._format.with_discoveries(table, flags)
            yield table

    def _remove_parts(self) -> None:
        """Remove the parts of an output that is complete. The description is replaced first: if a
        kill leaves some parts, it tells the next run that they may be discarded."""
        about = self.folder / "_about.json"
        write_json(about, _FINISHED)
        for part in self.folder.glob("part-*"):
            part.unlink()
        about.unlink()


def _check_total(totals: Totals, expected: int) -> None:
    """RuntimeError unless the parts have as many rows as the input."""
    if totals.rows != expected:
        raise RuntimeError(
            f"the output has {totals.rows} rows for {expected} of the input: score again with "
            "--restart"
        )


def _check_fdr(fdr: float, is_folder: bool) -> None:
    """ValueError unless discoveries at this rate can be written."""
    check_rate(fdr)
    if is_folder:
        raise ValueError(
            "--fdr looks at all rows at once: give --out as a .parquet or .csv file, not a folder"
        )


def _check_folder(out: Path) -> None:
    """One sentence if `out` cannot be a folder of parts."""
    if not out.absolute().parent.is_dir():
        raise FileNotFoundError(f"the folder {str(out.parent)!r} does not exist; create it first")
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(
            f"--out is {str(out)!r}, a file; expected a folder, or a name with an ending"
        )
