"""How the work of a kernel is shared over threads: torch's own OpenMP team where there is one, plain threads elsewhere.

After an operation torch's idle threads keep their cores busy for milliseconds, waiting for the next operation. Threads
of ours would have to wait for those cores; the same team, entered through the same library, starts at once.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

_alone = False  # in a forked child, which has none of its parent's threads


class Kernel:
    """A C function ``void f(void *block)`` that takes pieces of work off a counter in its block until none is left, so
    that one thread or several may run it on the same block. It must not touch Python objects."""

    def __init__(self, code: Any) -> None:
        self.code = code  # what owns the machine code: it goes when this goes
        self.address: int = code.address
        self.run: Callable[[int], None] = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address)


def share(kernel: Kernel, block: int, threads: int) -> None:
    """Run a kernel on the block at this address with up to so many threads; returns when all work is done."""
    if threads <= 1 or _alone:
        kernel.run(block)
    elif (parallel := openmp()) is not None:
        parallel(kernel.address, block, threads, 0)
    else:
        # The caller works too, and waits only for those helpers that got hold of a core meanwhile.
        helpers = [_pool().submit(kernel.run, block) for _ in range(threads - 1)]
        kernel.run(block)
        for helper in helpers:
            if not helper.cancel():
                helper.result()


def over_rows(rows: int, work: Callable[[int, int], Any]) -> None:
    """Call work(start, stop), which releases the GIL and does not come back here, on ranges that cover all rows, each
    in a plain thread. Returns, or raises the first error, when none is at work any more."""
    threads = max(1, min(size(), rows))
    bounds = [rows * i // threads for i in range(threads + 1)]
    mine, helpers = [(0, bounds[1])], []
    for span in pairwise(bounds[1:]):
        try:
            helpers.append(_pool().submit(work, *span))
        except RuntimeError:  # Python is about to end, and starts no more threads
            mine.append(span)
    try:
        for span in mine:
            work(*span)
    finally:
        wait(helpers)
    for helper in helpers:
        helper.result()


def size() -> int:
    """How many threads may share some work: as many as torch was given."""
    return 1 if _alone else torch.get_num_threads()


@cache
def openmp() -> Callable[[int, int, int, int], None] | None:
    """``GOMP_parallel(function, data, threads, flags)`` of the very OpenMP library that torch runs on, or None.

    Looked up through torch's own library, so that of several OpenMP libraries in the process the right one answers.
    GNU's and Intel's have this entry point; where torch is built without them (Windows), there is none.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        entry = library.GOMP_parallel
    except (OSError, AttributeError):
        return None
    entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    entry.restype = None
    return entry


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="fdbd")


def _after_fork() -> None:
    global _alone
    _alone = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
