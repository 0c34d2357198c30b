"""The log never makes the service wait."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

from fdbd.serve.log_lines import LINES, LineHandler


def logger_of(handler: logging.Handler) -> logging.Logger:
    logger = logging.Logger("of this test")
    logger.addHandler(handler)
    return logger


def fill(logger: logging.Logger) -> None:
    for _ in range(5 * LINES):
        logger.info("x" * 200)


def test_lines_are_written_in_their_order(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        handler = LineHandler(file.fileno())
        logger = logger_of(handler)
        for number in range(100):
            logger.info("line %d", number)
        handler.flush()
    written = (tmp_path / "log").read_text().splitlines()
    assert written == [f"line {number}" for number in range(100)]


def test_a_log_that_nobody_reads_stops_nobody_and_what_is_lost_is_counted() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as read, os.fdopen(writing, "w"):
        logger = logger_of(LineHandler(writing))
        logged = threading.Thread(target=fill, args=(logger,), daemon=True)
        logged.start()
        logged.join(timeout=60)
        assert not logged.is_alive()
        for line in read:
            if "were dropped" in line:
                assert int(line.split()[0]) > 0
                break


def test_the_end_of_the_process_does_not_wait_for_a_reader() -> None:
    reading, writing = os.pipe()
    handler = LineHandler(writing)
    fill(logger_of(handler))
    start = time.monotonic()
    handler.flush()
    assert time.monotonic() - start < 30
    os.close(reading)
    handler.flush()


def test_a_closed_pipe_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    handler = LineHandler(writing)
    logger = logger_of(handler)
    for _ in range(3):
        logger.info("a line")
        handler.flush()
    assert any(thread.name == "fdbd-log" for thread in threading.enumerate())
