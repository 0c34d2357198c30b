"""One progress bar for everything that takes more than two seconds, on the terminal and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")

QUIET_SECONDS = 2.0
"""Work that ends sooner shows no bar."""


def track(items: Iterable[T], description: str, total: int | None = None, enabled: bool = True) -> Iterator[T]:
    """The items, with a bar on standard error (rate and time left) once the work has taken two seconds.

    >>> list(track([1, 2, 3], "counting"))
    [1, 2, 3]
    """
    if not enabled:
        yield from items
        return
    if total is None and isinstance(items, Sized):
        total = len(items)
    started = time.monotonic()
    bar, task = None, None
    try:
        for done, item in enumerate(items):
            if bar is None and time.monotonic() - started > QUIET_SECONDS:
                bar = _bar()
                bar.start()
                task = bar.add_task(description, total=total, completed=done)
            elif bar is not None and task is not None:
                bar.update(task, completed=done)
            yield item
    finally:
        if bar is not None:
            bar.stop()


def _bar():  # type: ignore[no-untyped-def]
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
