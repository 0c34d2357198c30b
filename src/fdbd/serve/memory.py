"""One memory budget per process: what clients make the service hold is taken from it before it is
allocated, and refused with 503 when it is used up."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from starlette.exceptions import HTTPException

DEFAULT_TOTAL = 2 * 1024**3
"""Bytes of a process, as in deployment/kubernetes.yaml."""
LEAST_FOR_REQUESTS = 128 * 1024**2
"""A service with less than this for its requests does not start."""
_LARGE = 4 * 1024**2
"""Bytes that are taken until what the process really uses is looked at again."""
_SPARE_FRACTION = 0.2
"""Part of the total that is left alone: fragmentation, threads and what the interpreter keeps."""


class OutOfMemory(HTTPException):
    """The budget is used up: the request is refused and may be repeated."""

    def __init__(self) -> None:
        super().__init__(
            503,
            "the service holds as much of other requests as its memory allows; come again later",
            {"retry-after": "1"},
        )


class TooLargeForMemory(HTTPException):
    """The request alone needs more than the whole budget: to repeat it is of no use."""

    def __init__(self, amount: int, total: int) -> None:
        super().__init__(
            413,
            f"the request needs {_megabytes(amount)} MB of memory, and the service has "
            f"{_megabytes(total)} MB for all requests (--memory)",
        )


def _megabytes(amount: int) -> str:
    return f"{amount / 1e6:,.0f}"


class MemoryBudget:
    """Bytes that requests may hold together. Used by the event loop and by decoding threads.

    Args:
        total: of all requests.
        ceiling: what the process must not reach. Memory that was given back may still be held by
            the allocator, so what the process really uses is looked at, too, whenever some
            megabytes more have been taken.
    """

    def __init__(self, total: int, ceiling: int | None = None) -> None:
        self.total = total
        self._ceiling = ceiling
        self.used = 0
        self.most_used = 0
        self._taken_unseen = 0
        self._lock = threading.Lock()

    def take(self, amount: int) -> None:
        """Take bytes, or raise `OutOfMemory` or `TooLargeForMemory` and take none."""
        if amount > self.total:
            raise TooLargeForMemory(amount, self.total)
        if self._is_due(amount) and not self._is_below_ceiling(amount):
            raise OutOfMemory
        with self._lock:
            if self.used + amount > self.total:
                raise OutOfMemory
            self.used += amount
            self.most_used = max(self.most_used, self.used)

    def _is_due(self, amount: int) -> bool:
        """Whether some megabytes have been taken since the process's memory was looked at."""
        with self._lock:
            self._taken_unseen += amount
            if self._taken_unseen < _LARGE:
                return False
            self._taken_unseen = 0
            return True

    def _is_below_ceiling(self, amount: int) -> bool:
        if self._ceiling is None or resident_memory() + amount <= self._ceiling:
            return True
        give_free_memory_back()
        return resident_memory() + amount <= self._ceiling

    def give(self, amount: int) -> None:
        """Give bytes back."""
        with self._lock:
            self.used -= amount

    @contextmanager
    def taken(self, amount: int) -> Iterator[None]:
        """Bytes that are held while the block runs."""
        self.take(amount)
        try:
            yield
        finally:
            self.give(amount)

    def share(self) -> MemoryShare:
        """An account of one request."""
        return MemoryShare(self)


class MemoryShare:
    """What one request holds. It goes back to the budget when the last holder lets go: the request
    itself, or a thread that still works on the body of a request that was given up."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._amount = 0
        self._holders = 1
        self._lock = threading.Lock()

    def take(self, amount: int) -> None:
        """Take more bytes for this request, or raise `OutOfMemory` or `TooLargeForMemory`."""
        if self._amount + amount > self._budget.total:
            raise TooLargeForMemory(self._amount + amount, self._budget.total)
        self._budget.take(amount)
        with self._lock:
            self._amount += amount

    def hold(self) -> None:
        """One more holder, which calls `let_go` when it is done."""
        with self._lock:
            self._holders += 1

    def let_go(self) -> None:
        """One holder less; the last one gives everything back."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            amount = self._amount
            self._amount = 0
        self._budget.give(amount)


def budget_of_process(total: int | None) -> MemoryBudget:
    """What is left of the total for requests, once the guards are loaded and have decided a full
    batch.

    Without a stated total it is 2 GiB, or more if the guards need so much that nothing would be
    left. ValueError if a stated total leaves too little.
    """
    used = peak_memory()
    stated_or_default = DEFAULT_TOTAL if total is None else total
    left = int(stated_or_default * (1 - _SPARE_FRACTION)) - used
    if left >= LEAST_FOR_REQUESTS:
        ceiling = int(stated_or_default * (1 - _SPARE_FRACTION / 2))
        return MemoryBudget(left, ceiling)
    if total is None:
        return MemoryBudget(4 * LEAST_FOR_REQUESTS)
    needed = int((used + LEAST_FOR_REQUESTS) / (1 - _SPARE_FRACTION)) // 1_000_000 + 1
    raise ValueError(
        f"the guard alone takes {used // 1_000_000:,} MB, so --memory {total // 1_000_000} leaves "
        f"too little for requests; give at least {needed}"
    )


def peak_memory() -> int:
    """The most memory, in bytes, that this process has used so far."""
    if sys.platform == "win32":
        # Not known without further packages: what torch and a small guard take.
        return 512 * 1024**2
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most) if sys.platform == "darwin" else int(most) * 1024


def resident_memory(process: int | None = None) -> int:
    """The memory, in bytes, that a process uses now; 0 if the system does not say."""
    try:
        pages = Path(f"/proc/{process or os.getpid()}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def give_free_memory_back() -> None:
    """Have the allocator give the system back what it holds and nobody uses, if it can."""
    if sys.platform != "linux":
        return
    import ctypes

    # Another C library has no such call.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def limit_arenas() -> None:
    """Keep glibc from holding freed memory in one arena per thread. Elsewhere nothing happens.

    Large blocks stay under its own rule, which learns the sizes that a network uses: if each block
    went back to the system when it is freed, every batch would pay for new pages."""
    if sys.platform != "linux":
        return
    import ctypes

    arena_max = -8
    # Another C library has no such call.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(arena_max, 2)
