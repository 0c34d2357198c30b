"""Softmax's sums, written so that no exponential underflows: CPU libraries take ten times as long for those that do."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_NORMAL = {dtype: math.log(torch.finfo(dtype).tiny) + 1 for dtype in (torch.float32, torch.float64)}
"""Exponents from here on give a normal number with room to spare; e^−86 or e^−707 changes no sum that holds a 1."""


def exponential(values: Tensor) -> Tensor:
    """exp(values), none smaller than the smallest normal number."""
    return values.clamp_min(_NORMAL[values.dtype]).exp_()


def shifted(logits: Tensor) -> Tensor:
    """(N, C) logits less the largest of their row, none so small that its exponential underflows."""
    return (logits - logits.amax(dim=1, keepdim=True)).clamp_min_(_NORMAL[logits.dtype])


def logsumexp(logits: Tensor) -> Tensor:
    """(N,) log Σ_c exp(logits_c)."""
    largest = logits.amax(dim=1)
    return shifted(logits).exp_().sum(dim=1).log_() + largest
