"""One progress bar for everything that takes more than two seconds; off a terminal, a line per
stage and minute."""

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

from typing_extensions import Self

from fdbd.util.terminal import printable

T = TypeVar("T")

QUIET_SECONDS = 2.0  # work that ends sooner shows no bar
FIRST_LINE_SECONDS = 10.0
LINE_SECONDS = 60.0  # off a terminal: when a stage is first mentioned, and then how often


class Bar:
    """A bar on standard error with count, rate and time left, that appears once the work has taken
    two seconds; off a terminal, as under cron or with ``2> log``, a line after ten seconds, one per
    minute, and one at the end."""

    def __init__(self, description: str, total: int | None = None, enabled: bool = True) -> None:
        self.description, self.total, self._enabled = printable(description), total, enabled
        self._started, self._done = time.monotonic(), 0
        self._next_line, self._has_lines = self._started + FIRST_LINE_SECONDS, False
        self._bar: Any = None

    def update(self, done: int) -> None:
        """So many items are done."""
        self._done = done
        if not self._enabled:
            return
        now = time.monotonic()
        if self._bar is None and not sys.stderr.isatty():
            if now >= self._next_line:
                self._next_line, self._has_lines = now + LINE_SECONDS, True
                self._line()
            return
        if self._bar is None and now - self._started >= QUIET_SECONDS:
            self._bar = _rich_bar()
            self._bar.start()
            self._bar.add_task(self.description, total=self.total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, description=self.description)

    def _line(self, is_last: bool = False) -> None:
        seconds = time.monotonic() - self._started
        total = f" of {self.total:,}" if self.total else ""
        more = f"ended after {_duration(seconds)}" if is_last else f"{_duration(seconds)} so far"
        if self.total and self._done and not is_last:
            more += f", about {_duration(seconds * (self.total / self._done - 1))} left"
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
    """
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
            return Text(
                ""
                if not task.speed
                else f"{task.speed:.3g}/s"
                if task.speed < 100
                else f"{task.speed:,.0f}/s"
            )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TimeRemainingColumn(),
    )
    # What is printed meanwhile appears above the bar; where standard output is a file, it goes
    # there.
    return Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty()
    )
