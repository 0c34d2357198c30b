"""One deadline per request, from its first byte to its answer."""

from __future__ import annotations

import asyncio
import sys
import time
from types import TracebackType

FIRST_BYTE = "fdbd.first_byte"
"""Key of an ASGI scope: when the first byte of the request arrived, on the monotonic clock."""


class Deadline:
    """Cancels the task that entered it when the time has come.

    The task catches the CancelledError and asks `has_passed` whether it was the deadline. Unlike
    `asyncio.timeout`, which Python 3.10 lacks, the deadline can be moved closer from outside.
    """

    def __init__(self, at: float) -> None:
        self.at = at
        self.has_passed = False
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def remaining(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self.at - time.monotonic())

    def move_closer(self, at: float) -> None:
        """End earlier than was planned."""
        if at < self.at and self._timer is not None:
            self.at = at
            self._timer.cancel()
            self._arm()

    def disarm(self) -> None:
        """The answer is on its way; the server bounds how long a client may take to read it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __enter__(self) -> Deadline:
        self._task = asyncio.current_task()
        self._arm()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.disarm()

    def acknowledge(self) -> None:
        """Take the cancellation back after it was caught."""
        if sys.version_info >= (3, 11) and self._task is not None:
            self._task.uncancel()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.remaining, self._expire)

    def _expire(self) -> None:
        self.has_passed = True
        if self._task is not None:
            self._task.cancel()
