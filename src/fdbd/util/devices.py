"""Where a network runs."""

import itertools

import torch
from torch import nn


def choose_device(name: str | torch.device | None = "auto") -> torch.device:
    """The device that a name stands for: a device as torch writes it, such as "cuda:1"; or, for
    "auto" and None, the first of cuda, mps and xpu that is available, else cpu. ValueError if the
    device is not available."""
    here = [kind for kind in ("cuda", "mps", "xpu") if _has(kind)]
    if name is None or name == "auto":
        return torch.device([*here, "cpu"][0])
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        # An unknown name, or a torch that was built without it.
        known = ", ".join(["cpu", *here])
        raise ValueError(
            f"the device {str(name)!r} is not available here, expected auto or one of: {known}"
        ) from None
    return device


def device_of(module: nn.Module) -> torch.device:
    """Where a module's first parameter or buffer is; the CPU if it has none."""
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def _has(kind: str) -> bool:
    backend = torch.backends.mps if kind == "mps" else getattr(torch, kind, None)
    return backend is not None and bool(backend.is_available())
