"""What torch offers no public name for: the only module that touches its private ones."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def tracing() -> bool:
    """Whether operations are recorded rather than computed, so that no number can be looked at: under ``compile``,
    ``export``, ``vmap``, ``jit.trace``, ``make_fx`` and any other mode that watches the operations."""
    if torch.compiler.is_compiling():
        return True
    c = torch._C
    return (
        c._len_torch_dispatch_stack() > 0
        or c._functorch.peek_interpreter_stack() is not None
        or c._get_tracing_state() is not None
    )


def is_plain(*tensors: Tensor) -> bool:
    """Whether the numbers of these tensors lie in CPU memory as float32 or float64, all in the same dtype, and no
    derivative is asked for: only then may other code than torch's read that memory."""
    dtype = tensors[0].dtype
    if dtype not in (torch.float32, torch.float64) or tracing() or forward_ad._current_level >= 0:
        return False
    recording = torch.is_grad_enabled()
    for tensor in tensors:
        if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
            return False  # subclasses: fake tensors, distributed tensors
        if tensor.dtype is not dtype or not tensor.is_cpu or tensor.is_neg() or (recording and tensor.requires_grad):
            return False
    return True
