"""The log of the service: one JSON object per line on standard error.

A thread of its own writes the lines. What reads them may stop to read, as a paused terminal or a
stuck collector does; a service that waited for it would answer nothing, not even health.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
import time
import warnings
from datetime import datetime, timezone
from typing import Any

LINES = 2_000
"""Lines that wait for a reader at most; further ones are dropped and counted."""
_COMPANY_SECONDS = 0.05
"""How long a line waits for others, so that a busy service is not interrupted for each."""
_LAST_SECONDS = 1.0
"""How long the end of the process waits for its last lines."""
_STANDARD_ERROR = 2
_LOGGERS = ("fdbd.serve", "uvicorn", "asyncio", "py.warnings")


def log_json() -> None:
    """Have everything that the service says go to standard error as JSON."""
    handler = LineHandler(_STANDARD_ERROR)
    handler.setFormatter(_Json())
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO)
    logging.captureWarnings(True)
    # Pillow warns of each odd tag in a client's image, thousands of times if the client likes.
    warnings.filterwarnings("ignore", module=r"PIL\.")


def flush_log() -> None:
    """Wait, not for long, until what was logged is written."""
    for handler in logging.getLogger(_LOGGERS[0]).handlers:
        handler.flush()


class LineHandler(logging.Handler):
    """Hands lines to a thread that writes them. Never waits for whoever reads.

    Args:
        descriptor: of the open file. Python's own objects for files have locks, which a write that
            does not come back would hold when the process ends.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._waiting: queue.Queue[str] = queue.Queue(LINES)
        self._dropped = 0
        threading.Thread(target=self._write, name="fdbd-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Note a line."""
        try:
            self._waiting.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1

    def flush(self) -> None:
        """Wait, not for long, until all lines are written."""
        deadline = time.monotonic() + _LAST_SECONDS
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.005)

    def _write(self) -> None:
        while True:
            lines = self._next_lines()
            count = len(lines)
            if self._dropped:
                lines.append(self._line_of_dropped())
            # A pipe may have been closed, a disk be full.
            with contextlib.suppress(OSError):
                _write_all(self._descriptor, "\n".join([*lines, ""]).encode())
            for _ in range(count):
                self._waiting.task_done()

    def _next_lines(self) -> list[str]:
        """The lines that have come within a moment, at least one."""
        lines = [self._waiting.get()]
        time.sleep(_COMPANY_SECONDS)
        while len(lines) < LINES:
            try:
                lines.append(self._waiting.get_nowait())
            except queue.Empty:
                break
        return lines

    def _line_of_dropped(self) -> str:
        message = f"{self._dropped} lines of the log were dropped, since nobody read them"
        self._dropped = 0
        return self.format(logging.makeLogRecord({"msg": message, "levelname": "WARNING"}))


def _write_all(descriptor: int, content: bytes) -> None:
    """A pipe may take a part only."""
    while content:
        written = os.write(descriptor, content)
        content = content[written:]


class _Json(logging.Formatter):
    """One JSON object per line; a message that is a dictionary becomes its fields."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, timezone.utc)
        text = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, Any] = {"time": text, "level": record.levelname.lower()}
        if isinstance(record.msg, dict):
            line.update(record.msg)
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
