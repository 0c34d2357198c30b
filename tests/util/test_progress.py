"""The progress bar: what it says of a run that goes on where another ended."""

from __future__ import annotations

import pytest

from fdbd.util import progress
from fdbd.util.progress import Bar


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progress.time, "monotonic", found)
    return found


def test_the_time_left_of_a_resumed_run_counts_only_what_this_run_did(clock: Clock, capsys) -> None:
    """900 of 1,000 were there. Ten seconds for ten more: ninety seconds for the rest, not one."""
    with Bar("scoring", 1000) as bar:
        bar.update(900)
        clock.now += 10
        bar.update(910)
        assert bar.seconds_left() == pytest.approx(90)
    assert "910 of 1,000, 10 s so far, about 1.5 min left" in capsys.readouterr().err


def test_a_run_from_the_start_is_told_as_before(clock: Clock) -> None:
    bar = Bar("scoring", 100)
    bar.update(0)
    clock.now += 10
    bar.update(25)
    assert bar.seconds_left() == pytest.approx(30)


def test_before_anything_is_done_no_time_is_promised(clock: Clock) -> None:
    bar = Bar("scoring", 100)
    assert bar.seconds_left() is None
    bar.update(40)
    clock.now += 5
    assert bar.seconds_left() is None
    assert Bar("without a total").seconds_left() is None


def test_the_bar_on_a_terminal_starts_where_the_work_stood(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    bar = Bar("scoring", 1000)
    bar.update(900)
    clock.now += 3
    bar.update(903)
    task = bar._bar.tasks[0]
    assert task.completed == 903
    with bar:
        pass
