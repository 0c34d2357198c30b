"""One record per decision, in files that rotate, written by a thread of its own.

A record goes into a queue of bounded length; if the disk is too slow, records are dropped and
counted, and answers are not slowed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

from fdbd.util import files

log = logging.getLogger("fdbd.serve")

QUEUE = 5_000
"""Records that wait for the disk at most, with thumbnails about 20 MB."""
_FILE_BYTES = 64 * 1024**2
"""A file of this size is closed, and the next one begun."""
_FEWEST_FILES = 4
"""If a process may not keep this many such files, its files are smaller, so that no more than about
a quarter of the records is deleted at once."""
_WAIT_SECONDS = 0.5
"""How long a record may wait in memory before it is in the file."""

Record = dict[str, Any]


class DecisionLog:
    """Files ``decisions-PROCESS-NUMBER.jsonl`` in a folder, one JSON object per line.

    Args:
        folder: where the files are. Several processes may share it.
        most_bytes: of all files of one process; the oldest are deleted.
        dropped: called with the number of records that could not be kept.
    """

    def __init__(self, folder: Path, most_bytes: int, dropped: Callable[[int], object]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._most_bytes = most_bytes
        self._file_bytes = min(_FILE_BYTES, most_bytes // _FEWEST_FILES)
        self._dropped = dropped
        self._held = contextlib.ExitStack()
        self._process = self._claim()
        self._file: FileIO | None = None
        self._waiting: queue.Queue[Record | None] = queue.Queue(QUEUE)
        self._hurry = threading.Event()
        """Set if records must be written before their time."""
        self._writer = threading.Thread(target=self._write, name="fdbd-decisions", daemon=True)
        self._writer.start()

    def _claim(self) -> int:
        """The lowest number that no living process uses in this folder."""
        number = 0
        while True:
            lock = files.lock(self._folder / f"decisions-{number}.lock", wait=False)
            if self._held.enter_context(lock) is not False:
                return number
            number += 1

    def add(self, record: Record) -> None:
        """Note one decision. Never waits."""
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._dropped(1)
        if self._waiting.qsize() > QUEUE // 2:
            self._hurry.set()

    def stop(self) -> None:
        """Write what waits, and end."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=5)
        self._hurry.set()
        self._writer.join(timeout=10)

    def _write(self) -> None:
        """Write what comes, until `stop` puts None behind the last record."""
        has_ended = False
        while not has_ended:
            found = self._next_records()
            has_ended = None in found
            self._write_all([record for record in found if record is not None])
        self._close()
        self._held.close()

    def _write_all(self, records: list[Record]) -> None:
        """Write some records; those that cannot be written are counted as dropped."""
        lines = [_line(record) for record in records]
        try:
            self._leave_removed_file()
            while lines:
                written = self._write_some(lines)
                del lines[:written]
        except OSError as error:
            # A full disk, for instance.
            self._close()
            self._dropped(len(lines))
            log.warning("%d decisions could not be recorded: %s", len(lines), error)
            time.sleep(_WAIT_SECONDS)

    def _write_some(self, lines: list[bytes]) -> int:
        """Write as many lines as the file has room for, at least one, all of them or none. Returns
        how many."""
        if self._file is None or self._file.tell() + len(lines[0]) > self._file_bytes:
            self._close()
            # Without a buffer, so that what was written is in the file, and what was not is known.
            self._file = self._next_file(len(lines[0])).open("ab", buffering=0)
        start = self._file.tell()
        end = start
        fitting: list[bytes] = []
        for line in lines:
            if fitting and end + len(line) > self._file_bytes:
                break
            end += len(line)
            fitting.append(line)
        try:
            _write_whole(self._file, b"".join(fitting))
        except OSError:
            # The next record would continue a line that was cut off.
            with contextlib.suppress(OSError):
                self._file.truncate(start)
            raise
        return len(fitting)

    def _leave_removed_file(self) -> None:
        """Close a file that somebody has removed, or put another in the place of: what is written
        to it, nobody could read. Its lock has most likely gone with it."""
        if self._file is None or _is_at_its_place(self._file):
            return
        log.warning("the file of decisions %s was removed, and a new one is begun", self._file.name)
        self._close()
        if self._folder.is_dir():
            self._held.close()
            self._process = self._claim()

    def _close(self) -> None:
        if self._file is not None:
            # Some file systems say here alone that they are full.
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None

    def _next_records(self) -> list[Record | None]:
        """The records that have come within a moment, if any.

        This thread sleeps meanwhile. If each record woke it up, it would take the processor from
        the answer to the same request, and from the next request.
        """
        self._hurry.wait(_WAIT_SECONDS)
        self._hurry.clear()
        records: list[Record | None] = []
        while len(records) < QUEUE:
            try:
                records.append(self._waiting.get_nowait())
            except queue.Empty:
                break
        return records

    def _next_file(self, needed: int) -> Path:
        """The latest file if it has room for so many bytes, else a new one, after the oldest were
        deleted."""
        prefix = f"decisions-{self._process}-"
        mine = sorted(self._folder.glob(f"{prefix}*.jsonl"), key=_number)
        # One byte more than needed: a line that a killed process left unfinished may have to end.
        if mine and _size(mine[-1]) + needed < self._file_bytes:
            self._end_line(mine[-1])
            return mine[-1]
        number = _number(mine[-1]) + 1 if mine else 0
        sizes = [_size(path) for path in mine]
        kept = sum(sizes)
        for oldest, size in zip(mine, sizes):
            if kept + self._file_bytes <= self._most_bytes:
                break
            oldest.unlink(missing_ok=True)
            kept -= size
        return self._folder / f"{prefix}{number}.jsonl"

    def _end_line(self, path: Path) -> None:
        """End a line that a killed process left unfinished."""
        content_end = path.stat().st_size
        if not content_end:
            return
        with path.open("rb+") as file:
            file.seek(content_end - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _line(record: Record) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _write_whole(file: FileIO, content: bytes) -> None:
    """A nearly full disk takes a part only, before it raises an error."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def _is_at_its_place(file: FileIO) -> bool:
    """Whether an open file is still the one that its path leads to."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except OSError:
        return False


def _size(path: Path) -> int:
    """Bytes of a file; 0 if somebody has deleted it."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _number(path: Path) -> int:
    """The number of a file of decisions; -1 for a file that only looks like one."""
    last = path.stem.rpartition("-")[2]
    return int(last) if last.isdecimal() else -1
