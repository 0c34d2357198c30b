"""What reaches the terminal, and how Ctrl-C is answered."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from fdbd.util import progress
from fdbd.util.terminal import INTERRUPTED, printable

STUBBORN = """
import sys, time
from fdbd.util.terminal import answer_interrupts
with answer_interrupts("stopping"):
    is_told = False
    while True:
        try:
            if not is_told:
                is_told = True
                print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            pass  # as a kernel or a worker that cannot be interrupted
"""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, café, 图", "plain, café, 图"),
        ("red \x1b[31m", r"red \x1b[31m"),
        ("two\nlines", r"two\nlines"),
        ("over\u202eridden", r"over\u202eridden"),
        ("caf\udce9.png", r"caf\udce9.png"),
    ],
)
def test_text_cannot_command_the_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_is_answered_and_ends_even_what_does_not_listen(presses: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() + process.stderr.readline() == b"\nstopping\n"
        if presses == 2:
            time.sleep(0.4)
            process.send_signal(signal.SIGINT)
        # No signal, so no core.
        assert process.wait(timeout=30) == INTERRUPTED


def test_off_a_terminal_a_long_job_prints_lines(monkeypatch, capsys) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LINE_SECONDS", 1000.0)
    assert list(progress.track([1, 2, 3], "reading \x1b")) == [1, 2, 3]
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith(r"fdbd: reading \x1b: 0 of 3")
    assert last.startswith(r"fdbd: reading \x1b: 3 of 3, ended after")
    list(progress.track([1, 2, 3], "reading", enabled=False))
    assert not capsys.readouterr().err
