"""Learning rates as pure functions of training progress, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

SCHEDULES = ("constant", "multistep", "cosine", "triangle")


def learning_rate(
    kind: str,
    progress: float,
    peak: float,
    *,
    milestones: tuple[float, ...] = (),
    warmup: float = 0.0,
    restart: tuple[float, float] | None = None,
) -> float:
    """The rate at `progress`, the fraction of training done, in [0, 1).

    multistep: ×0.1 at each milestone (fractions); cosine: to zero; triangle: linearly up for `warmup`, linearly down to
    zero (the one-cycle policy of Smith, 2018). `warmup` is a fraction of training, linear, for every kind. restart:
    (when, scale) runs the whole schedule until `when` and once more after it with `scale` times the peak (a warm
    restart: Loshchilov and Hutter, 2017).

    >>> learning_rate("multistep", 0.8, 0.1, milestones=(0.5, 0.75, 0.9))
    0.001
    """
    if kind not in SCHEDULES:
        raise ValueError(f"schedule {kind!r} is none of {', '.join(SCHEDULES)}")
    if restart is not None:
        when, scale = restart
        if not 0 < when < 1 or not scale > 0:
            raise ValueError(f"restart is {restart}, expected a fraction of training and a positive scale of the peak")
        if progress < when:
            progress /= when
        else:
            progress, peak = (progress - when) / (1 - when), peak * scale
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
