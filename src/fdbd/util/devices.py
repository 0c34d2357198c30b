"""Where a network runs."""

import itertools

import torch
from torch import nn


def choose_device(name: str | torch.device | None = "auto") -> torch.device:
    """The device that a name stands for: "auto" or None, the first of cuda, mps and xpu that is
    here, else cpu; or a device as torch writes it, such as "cuda:1", which a ValueError says is not
    here."""
    here = [kind for kind in ("cuda", "mps", "xpu") if _has(kind)]
    if name is None or name == "auto":
        return torch.device([*here, "cpu"][0])
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (
        RuntimeError,
        AssertionError,
        NotImplementedError,
    ):  # an unknown name, or a torch built without it
        known = ", ".join(["cpu", *here])
        raise ValueError(
            f"there is no device {str(name)!r} here, expected auto or one of: {known}"
        ) from None
    return device


def device_of(module: nn.Module) -> torch.device:
    """Where a module's first parameter or buffer is; the CPU if it has none."""
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def _has(kind: str) -> bool:
    backend = torch.backends.mps if kind == "mps" else getattr(torch, kind, None)
    return backend is not None and bool(backend.is_available())
