"""Where a network runs."""

import itertools

import torch
from torch import nn


def choose_device(name: str | torch.device | None = "auto") -> torch.device:
    """The device that a name stands for.

    Args:
        name: "auto" or None: the first of cuda, mps and xpu that this machine has, else cpu; or a device as torch
            writes it, such as "cuda:1".

    Raises:
        ValueError: there is no such device here.

    >>> choose_device("cpu")
    device(type='cpu')
    """
    if name is None or name == "auto":
        return next((torch.device(kind) for kind in ("cuda", "mps", "xpu") if _has(kind)), torch.device("cpu"))
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):  # an unknown name, or a torch built without it
        here = ", ".join(["cpu", *(kind for kind in ("cuda", "mps", "xpu") if _has(kind))])
        raise ValueError(f"there is no device {str(name)!r} here, expected auto or one of: {here}") from None
    return device


def device_of(module: nn.Module) -> torch.device:
    """Where a module's first parameter or buffer is; the CPU where it has none. (Of a model that is spread over several
    devices the head may be elsewhere.)

    >>> device_of(nn.Linear(2, 2))
    device(type='cpu')
    """
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def _has(kind: str) -> bool:
    backend = torch.backends.mps if kind == "mps" else getattr(torch, kind, None)
    return backend is not None and bool(backend.is_available())
