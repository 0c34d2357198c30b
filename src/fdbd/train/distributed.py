"""Several processes as one: which rows of the joint batch are mine, and a gather that gradients
flow through."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

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
    """Join the group that `torchrun` describes in the environment, if there is one; leave it at the
    end."""
    asked_for = int(os.environ.get("WORLD_SIZE", "1")) > 1
    # A group that the caller has made stays the caller's.
    own = asked_for and dist.is_available() and not dist.is_initialized()
    if own:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend)
    try:
        yield
    finally:
        if own:
            dist.destroy_process_group()


def rows_of(rank: int, size: int, batch: int) -> slice:
    """This process's rows of a joint batch, which must divide evenly so that a mean of means is the
    mean."""
    if batch % size:
        raise ValueError(f"a batch of {batch} does not divide among {size} processes")
    part = batch // size
    return slice(rank * part, (rank + 1) * part)


def gather(tensor: Tensor) -> Tensor:
    """(n, …) on each process to (n · processes, …) on all; the tensor itself in one process.

    Every process computes the same joint loss. The backward pass sums its gradient over processes,
    and the averaging of DistributedDataParallel afterwards undoes that."""
    _, size = world()
    if size == 1:
        return tensor
    from torch.distributed.nn.functional import all_gather

    return torch.cat(all_gather(tensor))


def mean_over_processes(tensor: Tensor) -> Tensor:
    """The mean of a value over processes, for logs; the tensor is changed."""
    _, size = world()
    if size > 1:
        dist.all_reduce(tensor)
    return tensor / size
