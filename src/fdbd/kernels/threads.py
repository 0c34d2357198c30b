"""Row ranges shared out over threads, and what becomes of threads after a fork."""

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import TypeVar

import torch

Span = tuple[int, int]
T = TypeVar("T")


def spans(rows: int, size: int) -> list[Span]:
    """Ranges (start, stop) of at most `size` rows that cover all of them."""
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def share(parts: Sequence[Span], work: Callable[[int, int], object]) -> None:
    """Call work(start, stop), which releases the GIL, for each part, in as many threads as torch
    was given. Returns when all parts are done, or raises the first error."""
    left = deque(parts)

    def run() -> None:
        while left:
            try:
                part = left.popleft()
            except IndexError:
                # Another thread took the last one.
                return
            work(*part)

    helpers = []
    # If Python is about to exit, it starts no more threads.
    with suppress(RuntimeError):
        for _ in range(min(torch.get_num_threads(), len(parts)) - 1):
            helpers.append(_pool().submit(run))
    try:
        run()
    finally:
        # After an error no thread starts another part.
        left.clear()
        for helper in helpers:
            if not helper.cancel():
                helper.result()


def run_apart(function: Callable[[], T]) -> T:
    """function() in a separate thread. The threads that OpenMP starts for it end with that thread:
    the process may fork afterwards, which it may not once its main thread has computed with several
    (see `survive_forks`)."""
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(function).result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="fdbd")


@cache
def survive_forks() -> None:
    """Give children that are forked from now on one torch thread each. Fitting and scoring call
    this.

    Once a process has computed with several threads, GNU's OpenMP library, on which torch runs on
    Linux, waits forever in a forked child for threads that the fork did not copy. With one thread
    it never asks for them; torch's own ``DataLoader`` does the same in its workers. A process that
    has computed nothing is left alone.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


if hasattr(os, "register_at_fork"):
    # The threads of the pool stay with the parent.
    os.register_at_fork(after_in_child=_pool.cache_clear)
