"""Large matrices: products by whichever library does them faster on this processor, shared among threads; memory that
is there sooner."""

from __future__ import annotations

import ctypes
import importlib
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fdbd.kernels import team

_MOST_THREADS = 8
"""Threads that share products out among them: each has buffers of its own."""
_ROWS_A_THREAD = 64
"""Fewer rows are multiplied before a second thread has woken up."""
_PTHREADS = 1
"""What an OpenBLAS that has threads of its own calls itself; others take OpenMP's, which are torch's too."""


def product(rows: Tensor, points: Tensor, out: Tensor, by_numpy: bool) -> Tensor:
    """rows @ points.T into `out`, CPU tensors of one dtype without gradients."""
    if by_numpy:
        np.matmul(rows.detach().numpy(), points.detach().numpy().T, out=out.numpy())
        return out
    return torch.mm(rows, points.T, out=out)


def multiplies_with_numpy() -> bool:
    """Whether products should be numpy's, which does not know how many threads torch was given: not where that is 1."""
    return torch.get_num_threads() > 1 and numpy_is_faster()


def share_products(rows: int, work: Callable[[int, int], Any], least: int = _ROWS_A_THREAD) -> None:
    """Call work(start, stop), which multiplies with numpy, on ranges that cover all rows, of at least so many each in a
    thread of its own, where OpenBLAS takes a single one for each product: it keeps threads waiting for each other in
    products of a few thousand rows, and leaves them idle between two."""

    def quietly(start: int, stop: int) -> None:
        with np.errstate(all="ignore"):  # as torch does: NaN and infinity are found in what comes out
            work(start, stop)

    library = _openblas()
    if library is None or not 1 < team.size() <= _MOST_THREADS or rows < least * team.size():
        quietly(0, rows)
        return
    with library.one_thread_each():
        team.over_rows(rows, quietly)


def roomy(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty CPU tensor, float32 or float64. Unlike torch, numpy asks for huge pages: large arrays are first written
    in half the time."""
    return torch.from_numpy(np.empty(shape, {torch.float32: np.float32, torch.float64: np.float64}[dtype]))


@cache
def numpy_is_faster() -> bool:
    """Whether torch has MKL on a processor of AMD's, and numpy has OpenBLAS, which is a quarter faster there."""
    return torch.backends.mkl.is_available() and "AuthenticAMD" in _processor() and _openblas() is not None


def _processor() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()


class OpenBlas:
    """numpy's library, whose number of threads is one for the whole process."""

    def __init__(self, get: Callable[[], int], set_: Callable[[int], None]) -> None:
        self.threads = get
        self._set = set_
        self._lock = Lock()
        self._users = 0
        self._before = 0

    @contextmanager
    def one_thread_each(self) -> Iterator[None]:
        """Each product takes the thread that asks for it, until the last user has left."""
        with self._lock:
            if not self._users:
                self._before = self.threads()
                self._set(1)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and self.threads() == 1:  # nobody else has set it since
                    self._set(self._before)


_first = Lock()


def _openblas() -> OpenBlas | None:
    with _first:  # two of them would not know of each other's users
        return _find_openblas()


@cache
def _find_openblas() -> OpenBlas | None:
    """Looked up through numpy's own extension, so that of several libraries in the process the right one answers; None
    where numpy has another, or where that library's threads are not its own."""
    try:
        try:
            extension = importlib.import_module("numpy._core._multiarray_umath")
        except ImportError:  # numpy 1
            extension = importlib.import_module("numpy.core._multiarray_umath")
        library = ctypes.CDLL(str(extension.__file__))
    except (ImportError, OSError):
        return None
    for prefix, suffix in (("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", "")):
        names = [f"{prefix}openblas_{what}{suffix}" for what in ("get_num_threads", "set_num_threads", "get_parallel")]
        if all(hasattr(library, name) for name in names):
            get, set_, kind = (getattr(library, name) for name in names)
            set_.argtypes, set_.restype = [ctypes.c_int], None
            return OpenBlas(get, set_) if kind() == _PTHREADS else None
    return None
