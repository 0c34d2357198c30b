"""Exponentials of logits, as several detectors need them.

No exponential underflows, since subnormal numbers take processors ten times as long; and rows of few classes lie in
memory by class, so that sums run over many samples at once.
"""

import math

import torch
from torch import Tensor

from fdbd.util.torch_compat import tracing

_NORMAL = {dtype: math.log(torch.finfo(dtype).tiny) + 1 for dtype in (torch.float32, torch.float64)}
"""Exponents from here on give a normal number with room to spare; e^−86 or e^−707 changes no sum that holds a 1."""
_FEW_CLASSES = 16


def gaps(logits: Tensor) -> Tensor:
    """(N, C) logits less the largest of their row, a new tensor."""
    if logits.shape[1] <= _FEW_CLASSES:
        logits = logits.t().contiguous().t()
    return logits - logits.amax(dim=1, keepdim=True)


def bound_(exponents: Tensor) -> Tensor:
    """The same exponents, those raised in place whose exponential would underflow."""
    return exponents.clamp_min_(_NORMAL[exponents.dtype])


def logsumexp(logits: Tensor) -> Tensor:
    """(N,) log Σ_c exp(logits_c)."""
    if not tracing():
        return logits.logsumexp(dim=1)
    # Spelt out for exported graphs: no runtime then needs an operation of its own for it.
    return bound_(gaps(logits)).exp_().sum(dim=1).log_() + logits.amax(dim=1)


def largest_probability(logits: Tensor) -> Tensor:
    """(N,) max_c softmax(logits)_c. The largest logit's own term of the sum is e⁰."""
    return bound_(gaps(logits)).exp_().sum(dim=1).reciprocal()
