"""One progress bar for everything that takes more than two seconds, on the terminal and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

from typing_extensions import Self

T = TypeVar("T")

QUIET_SECONDS = 2.0
"""Work that ends sooner shows no bar."""


class Bar:
    """A bar on standard error with count, rate and time left, that appears once the work has taken two seconds."""

    def __init__(self, description: str, total: int | None = None) -> None:
        self.description = description
        self.total = total
        self._started = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def update(self, done: int) -> None:
        """So many items are done."""
        if self._bar is None:
            if time.monotonic() - self._started < QUIET_SECONDS:
                return
            self._bar = _rich_bar()
            self._bar.start()
            self._task = self._bar.add_task(self.description, total=self.total)
        self._bar.update(self._task, completed=done)

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()


def track(items: Iterable[T], description: str, total: int | None = None, enabled: bool = True) -> Iterator[T]:
    """The items, with a `Bar` that counts them.

    >>> list(track([1, 2, 3], "counting"))
    [1, 2, 3]
    """
    if not enabled:
        yield from items
        return
    if total is None and isinstance(items, Sized):
        total = len(items)
    with Bar(description, total) as bar:
        for done, item in enumerate(items):
            bar.update(done)
            yield item


def _rich_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text("" if not task.speed else f"{task.speed:.3g}/s" if task.speed < 100 else f"{task.speed:,.0f}/s")

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
