"""Arithmetic that autocast and a default device leave alone: mixed precision is for the network."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fdbd.util.torch_compat import tracing

_KINDS = ("cpu", "cuda")
"""Devices that autocast is known for."""


def autocasts() -> bool:
    """Whether autocast chooses the precision of operations now; a graph under construction has no autocast."""
    return any(map(torch.is_autocast_enabled, _KINDS)) and not tracing()


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Operations keep the dtype of their arguments, whatever autocast surrounds them."""
    with contextlib.ExitStack() as without:
        if autocasts():
            for kind in filter(torch.is_autocast_enabled, _KINDS):
                without.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """The arithmetic of a fit: no autocast, and new tensors in the CPU's memory whatever the default device is."""
    with full_precision(), contextlib.ExitStack() as at_home:
        if torch.get_default_device().type != "cpu":
            at_home.enter_context(torch.device("cpu"))
        yield
