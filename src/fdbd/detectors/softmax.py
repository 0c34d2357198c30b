"""Exponentials of logits, as several detectors need them.

No exponential underflows, since subnormal numbers take processors ten times as long; and rows of
few classes lie in memory by class, so that sums run over many samples at once.
"""

import math

import numpy as np
import torch
from torch import Tensor

from fdbd.util.torch_compat import is_plain, tracing

_NORMAL = {dtype: math.log(torch.finfo(dtype).tiny) + 1 for dtype in (torch.float32, torch.float64)}
"""Exponents from here on give a normal number with room to spare; e^−86 or e^−707 changes no sum
that holds a 1."""


def by_class(logits: Tensor) -> Tensor:
    """The same (N, C) logits; if classes are few, in memory by class. numpy turns them faster
    than torch."""
    if logits.shape[1] > 16 or not is_plain(logits):
        return logits
    return torch.from_numpy(np.ascontiguousarray(logits.detach().numpy().T)).T


def gaps(logits: Tensor) -> Tensor:
    """(N, C) logits less the largest of their row, a new tensor."""
    logits = by_class(logits)
    return logits - logits.amax(dim=1, keepdim=True)


def bound_(exponents: Tensor) -> Tensor:
    """The same exponents, those raised in place whose exponential would underflow."""
    return exponents.clamp_min_(_NORMAL[exponents.dtype])


def logsumexp(logits: Tensor) -> Tensor:
    """(N,) log Σ_c exp(logits_c)."""
    if not tracing():
        return logits.logsumexp(dim=1)
    # Spelt out for exported graphs, so that a runtime needs no special operation for it.
    return bound_(gaps(logits)).exp_().sum(dim=1).log_() + logits.amax(dim=1)


def largest_probability(logits: Tensor) -> Tensor:
    """(N,) max_c softmax(logits)_c. The largest logit's own term of the sum is e⁰."""
    return bound_(gaps(logits)).exp_().sum(dim=1).reciprocal()
