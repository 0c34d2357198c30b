"""Which guard made a decision: an id that follows from everything a decision depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ID_LENGTH = 16
"""Hexadecimal digits of a guard's id: 64 bits, short enough for a header and a page."""


def guard_id(
    description: Mapping[str, Any], tensors: Mapping[str, Tensor], weights: str | None
) -> str:
    """The id of a guard.

    Args:
        description: what the guard's file says of its parts (`Guard.save`), without what does not
            change a decision.
        tensors: the fitted state of detector and threshold.
        weights: `weights_hash` of the model; None: the guard takes features.

    >>> len(guard_id({"detector": "fdbd"}, {"center": torch.zeros(2)}, None))
    16
    """
    text = json.dumps({**description, "weights": weights}, sort_keys=True)
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        values = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:ID_LENGTH]
