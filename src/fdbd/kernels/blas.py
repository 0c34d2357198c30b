"""Large matrices: products by whichever library does them faster on this processor, and memory that is there sooner."""

from __future__ import annotations

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

from . import team

_MOST_THREADS = 8
"""Threads that share products out among them: each has buffers of its own."""
_ROWS_A_THREAD = 64
"""Fewer rows are multiplied before a second thread has woken up."""


def product(rows: Tensor, points: Tensor, out: Tensor) -> Tensor:
    """rows @ points.T into `out`, CPU tensors of one dtype without gradients."""
    if multiplies_with_numpy():
        np.matmul(rows.detach().numpy(), points.detach().numpy().T, out=out.numpy())
        return out
    return torch.mm(rows, points.T, out=out)


def multiplies_with_numpy() -> bool:
    """Whether `product` does: numpy does not know how many threads torch was given, so it is not asked for one."""
    return torch.get_num_threads() > 1 and numpy_is_faster()


def share_products(rows: int, work: Callable[[int, int], Any]) -> None:
    """Call work(start, stop), which multiplies with numpy, on ranges that cover all rows, each in a thread of its own
    where OpenBLAS takes a single one for each product: it keeps threads waiting for each other in products of a few
    thousand rows, and leaves them idle between two."""
    library = _openblas()
    if library is None or not 1 < team.size() <= _MOST_THREADS or rows < _ROWS_A_THREAD * team.size():
        work(0, rows)
        return
    with library.one_thread_each():
        team.over_rows(rows, work)


def roomy(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty CPU tensor. Unlike torch, numpy asks for huge pages: large arrays are first written in half the time."""
    numbers = {torch.float32: np.float32, torch.float64: np.float64}
    if dtype not in numbers:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(np.empty(shape, numbers[dtype]))


@cache
def numpy_is_faster() -> bool:
    """Whether torch has MKL on a processor of AMD's, and numpy has OpenBLAS, which is a quarter faster there."""
    if not torch.backends.mkl.is_available():
        return False
    return _numpy_has_openblas() and "AuthenticAMD" in _processor()


def _numpy_has_openblas() -> bool:
    config: Any = np.show_config(mode="dicts")
    return "openblas" in str(config.get("Build Dependencies", {}).get("blas", {}).get("name", "")).lower()


def _processor() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()


class _OpenBlas:
    """numpy's library, whose number of threads is one for the whole process."""

    def __init__(self, controller: Any) -> None:
        self.controller = controller
        self.lock = Lock()
        self.users = 0
        self.limiter: Any = None

    @contextmanager
    def one_thread_each(self) -> Iterator[None]:
        """Each product takes the thread that asks for it, until the last user has left."""
        with self.lock:
            self.users += 1
            if self.users == 1:
                self.limiter = self.controller.limit(limits=1)
        try:
            yield
        finally:
            with self.lock:
                self.users -= 1
                if not self.users:
                    self.limiter.restore_original_limits()


@cache
def _openblas() -> _OpenBlas | None:
    from threadpoolctl import ThreadpoolController  # takes milliseconds: only where something large is multiplied

    controller = ThreadpoolController().select(internal_api="openblas")
    return _OpenBlas(controller) if _numpy_has_openblas() and controller.lib_controllers else None
