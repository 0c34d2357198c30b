"""Large matrices: products by whichever library does them faster on this processor, and memory that is there sooner."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


def product(rows: Tensor, points: Tensor, out: Tensor) -> Tensor:
    """rows @ points.T into `out`, CPU tensors of one dtype without gradients."""
    if torch.get_num_threads() > 1 and numpy_is_faster():  # numpy does not know how many threads torch was given
        np.matmul(rows.detach().numpy(), points.detach().numpy().T, out=out.numpy())
        return out
    return torch.mm(rows, points.T, out=out)


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
    config: Any = np.show_config(mode="dicts")
    blas = config.get("Build Dependencies", {}).get("blas", {}).get("name", "")
    return "openblas" in str(blas).lower() and "AuthenticAMD" in _processor()


def _processor() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
