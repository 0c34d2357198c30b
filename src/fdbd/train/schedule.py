"""Learning rates as pure functions of training progress, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

SCHEDULES = ("constant", "multistep", "cosine", "triangle")


def learning_rate(
    kind: str, progress: float, peak: float, *, milestones: tuple[float, ...] = (), warmup: float = 0.0
) -> float:
    """The rate at `progress`, the fraction of training done, in [0, 1).

    multistep: ×0.1 at each milestone (fractions); cosine: to zero; triangle: linearly up for `warmup`, linearly down to
    zero (the one-cycle policy of Smith, 2018). `warmup` is a fraction of training, linear, for every kind.

    >>> learning_rate("multistep", 0.8, 0.1, milestones=(0.5, 0.75, 0.9))
    0.001
    """
    if kind not in SCHEDULES:
        raise ValueError(f"schedule {kind!r} is none of {', '.join(SCHEDULES)}")
    if progress < warmup:
        return peak * progress / warmup
    if kind == "multistep":
        return round(peak * 0.1 ** sum(progress >= m for m in milestones), 12)
    rest = (progress - warmup) / (1 - warmup)
    if kind == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * rest))
    if kind == "triangle":
        return peak * (1 - rest)
    return peak
