"""One progress bar for everything that takes more than two seconds; off a terminal, a line per
stage and minute."""

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

from typing_extensions import Self

from fdbd.util.terminal import printable

T = TypeVar("T")

QUIET_SECONDS = 2.0
"""Work that ends sooner shows no bar."""
FIRST_LINE_SECONDS = 10.0
"""Off a terminal: when a stage is first mentioned."""
LINE_SECONDS = 60.0
"""Off a terminal: how often it is mentioned from then on."""


class Bar:
    """A bar on standard error with count, rate and time left, that appears once the work has taken
    two seconds; off a terminal, as under cron or with ``2> log``, a line after ten seconds, one per
    minute, and one at the end."""

    def __init__(self, description: str, total: int | None = None, enabled: bool = True) -> None:
        self.description = printable(description)
        self.total = total
        self._enabled = enabled
        self._started = time.monotonic()
        self._done = 0
        # The count of the first update: what an earlier run had done, if this one goes on with it.
        # The rate counts from there.
        self._first_done: int | None = None
        self._first_time = self._started
        self._next_line = self._started + FIRST_LINE_SECONDS
        self._has_lines = False
        self._bar: Any = None

    def update(self, done: int) -> None:
        """So many items are done."""
        now = time.monotonic()
        self._done = done
        if self._first_done is None:
            self._first_done = done
            self._first_time = now
        if not self._enabled:
            return
        if self._bar is None and not sys.stderr.isatty():
            if now >= self._next_line:
                self._next_line = now + LINE_SECONDS
                self._has_lines = True
                self._line()
            return
        if self._bar is None and now - self._started >= QUIET_SECONDS:
            self._bar = _rich_bar()
            self._bar.start()
            # The bar's rate counts what is done beyond this.
            self._bar.add_task(self.description, total=self.total, completed=self._first_done)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, description=self.description)

    def seconds_left(self) -> float | None:
        """The time that the rest takes at the rate so far, without what an earlier run had done;
        None if that cannot be told yet."""
        if not self.total or self._first_done is None or self._done <= self._first_done:
            return None
        seconds = time.monotonic() - self._first_time
        return seconds / (self._done - self._first_done) * (self.total - self._done)

    def _line(self, is_last: bool = False) -> None:
        seconds = time.monotonic() - self._started
        total = f" of {self.total:,}" if self.total else ""
        if is_last:
            more = f"ended after {_duration(seconds)}"
        else:
            more = f"{_duration(seconds)} so far"
            left = self.seconds_left()
            if left is not None:
                more += f", about {_duration(left)} left"
        print(
            f"fdbd: {self.description}: {self._done:,}{total}, {more}", file=sys.stderr, flush=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._has_lines:
            self._line(is_last=True)


def track(
    items: Iterable[T], description: str, total: int | None = None, enabled: bool = True
) -> Iterator[T]:
    """The items, with a `Bar` that counts them.

    >>> list(track([1, 2, 3], "counting"))
    [1, 2, 3]
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    with Bar(description, total, enabled) as bar:
        for done, item in enumerate(items):
            bar.update(done)
            yield item
            bar.update(done + 1)


def _duration(seconds: float) -> str:
    """Seconds, or minutes from a minute and a half on.

    >>> _duration(42.4), _duration(150)
    ('42 s', '2.5 min')
    """
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


def _rich_bar() -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            if not task.speed:
                return Text("")
            if task.speed < 100:
                return Text(f"{task.speed:.3g}/s")
            return Text(f"{task.speed:,.0f}/s")

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TimeRemainingColumn(),
    )
    # What is printed meanwhile appears above the bar; if standard output is a file, it goes
    # there.
    return Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty()
    )
