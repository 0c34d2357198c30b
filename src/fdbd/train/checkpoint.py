"""Checkpoints that a kill cannot spoil: written beside, then renamed; tensors and plain values only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from fdbd.networks.checkpoint import load_plain
from fdbd.util.files import beside


def save(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write `state` so that `path` is at every moment the old file or the new one, never half of one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with beside(path) as temporary, open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what `save` wrote; never runs code from the file."""
    state: dict[str, Any] = load_plain(path)
    return state
