"""Fitting under torchrun: every process sums its shard, and all continue with the same total."""

from typing import Any

import torch.distributed


def is_active() -> bool:
    """Whether this process is one of several that fit together."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def combine(statistic: Any) -> Any:
    """The statistic merged over all processes, in the order of their ranks, so that every process gets the same."""
    shards: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(shards, statistic)
    total = shards[0]
    for shard in shards[1:]:
        total.merge(shard)
    return total
