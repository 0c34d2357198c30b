"""The state that torch computes in: whether it records, who may read its memory, which precision
and device it chooses.

The only module that touches private names of torch."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd import forward_ad


def tracing() -> bool:
    """Whether operations are recorded rather than computed, so that no number can be looked at:
    under ``compile``, ``export``, ``vmap``, ``jit.trace``, ``make_fx`` and any other mode that
    watches the operations."""
    if torch.compiler.is_compiling():
        return True
    c = torch._C
    return (
        c._len_torch_dispatch_stack() > 0
        or c._functorch.peek_interpreter_stack() is not None
        or c._get_tracing_state() is not None
    )


def is_out_of_sight(tensor: Tensor) -> bool:
    """Whether a number of this tensor cannot be looked at, since operations are recorded, or only
    by waiting for an accelerator to finish all that was asked of it."""
    return not tensor.is_cpu or tracing()


def is_plain(*tensors: Tensor) -> bool:
    """Whether the numbers of these tensors lie in CPU memory as float32 or float64, all in the same
    dtype, and no derivative is asked for: only then may other code than torch's read that
    memory."""
    dtype = tensors[0].dtype
    if dtype not in (torch.float32, torch.float64) or tracing() or forward_ad._current_level >= 0:
        return False
    recording = torch.is_grad_enabled()
    for tensor in tensors:
        if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
            # A subclass, such as fake and distributed tensors.
            return False
        if (
            tensor.dtype is not dtype
            or not tensor.is_cpu
            or tensor.is_neg()
            or (recording and tensor.requires_grad)
        ):
            return False
    return True


_AUTOCAST_DEVICES = ("cpu", "cuda")


def autocasts() -> bool:
    """Whether autocast chooses the precision of operations now; a graph under construction has no
    autocast."""
    is_on = any(torch.is_autocast_enabled(device) for device in _AUTOCAST_DEVICES)
    return is_on and not tracing()


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Operations keep the dtype of their arguments, whatever autocast surrounds them."""
    if not autocasts():
        yield
        return
    with contextlib.ExitStack() as without:
        for device in _AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                without.enter_context(torch.autocast(device, enabled=False))
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """The arithmetic of a fit: no autocast, and new tensors in the CPU's memory whatever the
    default device is."""
    if torch.get_default_device().type == "cpu" and not autocasts():
        # The usual case. A fit enters this several times, and entering the others takes longer.
        yield
        return
    with full_precision(), torch.device("cpu"):
        yield
