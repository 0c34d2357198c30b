"""Several processes as one: which rows of the joint batch are mine, and a gather that gradients flow through."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world() -> tuple[int, int]:
    """(rank, number of processes); (0, 1) outside `torchrun`."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join the group that `torchrun` describes in the environment, if there is one; leave it at the end."""
    own = int(os.environ.get("WORLD_SIZE", "1")) > 1 and dist.is_available() and not dist.is_initialized()
    if own:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        if own:
            dist.destroy_process_group()


def rows_of(rank: int, size: int, batch: int) -> slice:
    """This process's rows of a joint batch, which must divide evenly so that a mean of means is the mean."""
    if batch % size:
        raise ValueError(f"a batch of {batch} does not divide among {size} processes")
    part = batch // size
    return slice(rank * part, (rank + 1) * part)


class _Gather(torch.autograd.Function):
    """Concatenate a tensor over processes; the gradient of the joint loss comes back to each one's own rows.

    Every process computes the same joint loss, so its own rows already hold the whole gradient; the factor undoes the
    averaging that DistributedDataParallel does over processes afterwards.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        rank, size = world()
        ctx.rows, ctx.size = slice(rank * len(tensor), (rank + 1) * len(tensor)), size
        parts = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        own: Tensor = gradient[ctx.rows] * ctx.size
        return own


def gather(tensor: Tensor) -> Tensor:
    """(n, …) on each process to (n · processes, …) on all, with gradient; the tensor itself in one process."""
    if world()[1] == 1:
        return tensor
    gathered: Tensor = _Gather.apply(tensor)
    return gathered


def mean_over_processes(tensor: Tensor) -> Tensor:
    """The mean of a value over processes, for logs."""
    size = world()[1]
    if size > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        tensor /= size
    return tensor
