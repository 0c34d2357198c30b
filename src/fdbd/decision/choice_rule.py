"""The rule of ``"auto"``: which detectors take part, what weight each has, and which are kept.

Everything here is a function of numbers: of how well each detector tells pseudo-OOD samples from
held-out in-distribution ones, and of what it costs. docs/choosing.md has the study that fixed
it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fdbd.detectors import KNN, Detector, NNGuide, create

Floats = NDArray[np.float64]

BETA = 0.3
"""How fast a weight grows with the AUROC, per percentage point."""
MOST_IN_BANK = 5000
"""Training samples that a nearest-neighbour member keeps at most, as in the study."""
LEAST_SHARE = 0.02
"""Members with a smaller share of the weights are left out."""
EQUAL_POOL = ("fdbd", "react(95)+energy", "lts(95)+energy", "gen", "vim", "knn")
"""Detectors with equal weights, for data of which no pseudo-OOD samples can be made."""
POOL = (
    "fdbd",
    "nci",
    "energy",
    "msp",
    "gen",
    "knn",
    "vim",
    "neco",
    "nnguide",
    "dice(70)",
    "react(95)+energy",
    "react(80)+fdbd",
    "vra+energy",
    "scale(85)+energy",
    "scale(85)+fdbd",
    "lts(95)+energy",
    "ash-b+energy",
    "optfs",
    "kpca",
    "react(90)+vim",
)
"""Detectors that need no labels. A number in brackets is a percentile, of a shaping or of DICE."""


class Cost(NamedTuple):
    """What a detector costs, beside the network.

    >>> Cost(microseconds=3.5, megabytes=0.2, has_bank=False).microseconds
    3.5
    """

    microseconds: float
    """Time per sample in batches of 32, on the machine where it was measured."""
    megabytes: float
    """Memory of what it keeps, without the head, which all members share."""
    has_bank: bool
    """Whether it keeps training samples."""


@dataclass(frozen=True)
class Budget:
    """What the chosen detectors may cost together; None: as much as they take.

    >>> Budget.parse("200us, 10MB, no bank")
    Budget(microseconds=200.0, megabytes=10.0, bank=False)
    """

    microseconds: float | None = None
    """Per sample in batches of 32."""
    megabytes: float | None = None
    bank: bool = True
    """Whether training samples may be kept."""

    def __post_init__(self) -> None:
        for name in ("microseconds", "megabytes"):
            limit = getattr(self, name)
            if limit is not None and not 0 <= limit < math.inf:
                raise ValueError(f"the budget has {name} {limit}, expected a number from 0")

    @classmethod
    def parse(cls, text: str) -> Budget:
        """A budget in words, separated by commas: a time such as 200us, a memory such as 10MB,
        "no bank"."""
        microseconds = None
        megabytes = None
        bank = True
        for part in text.split(","):
            word = part.strip().lower().replace(" ", "")
            if word in ("nobank", "no-bank"):
                bank = False
            elif word.endswith(("us", "µs")):
                microseconds = _number(word[:-2], part)
            elif word.endswith("mb"):
                megabytes = _number(word[:-2], part)
            else:
                raise ValueError(_not_a_budget(part))
        return cls(microseconds, megabytes, bank)

    def admits(self, costs: Sequence[Cost]) -> bool:
        """Whether these members together stay within it."""
        time = sum(cost.microseconds for cost in costs)
        memory = sum(cost.megabytes for cost in costs)
        if self.microseconds is not None and time > self.microseconds:
            return False
        if self.megabytes is not None and memory > self.megabytes:
            return False
        return self.bank or not any(cost.has_bank for cost in costs)


def _number(text: str, part: str) -> float:
    """The number before a unit, in one part of a budget."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(_not_a_budget(part)) from None


def _not_a_budget(part: str) -> str:
    return f"the budget has {part.strip()!r}, expected parts such as '200us', '10MB' and 'no bank'"


def make_member(spec: str, num_samples: int | None = None) -> Detector:
    """A detector as `POOL` spells it, such as ``scale(85)+fdbd``.

    A bank keeps `MOST_IN_BANK` of `num_samples` training samples, and its k is no more than there
    are; None: not known yet.
    """
    name = spec
    options: dict[str, object] = {}
    before, bracket, rest = spec.partition("(")
    if bracket:
        percentile, _, after = rest.partition(")")
        name = before + after
        try:
            options["percentile"] = float(percentile)
        except ValueError:
            raise ValueError(
                f"{spec!r} has {percentile!r} in brackets, expected a percentile such as "
                "react(95)+energy"
            ) from None
    detector = create(name, **options)
    if num_samples is None or not isinstance(detector, (KNN, NNGuide)):
        return detector
    alpha = min(1.0, MOST_IN_BANK / max(num_samples, 1))
    # The share that is kept is drawn by a hash, so that a small bank may be smaller than expected.
    k = max(1, min(detector.k, int(0.5 * alpha * num_samples)))
    return type(detector)(k=k, alpha=alpha)


def weigh(aurocs: Floats, beta: float = BETA) -> Floats:
    """(D,) weights that sum to 1, from AUROCs (K, D) of D detectors on K kinds:
    w ∝ exp(β · 100 · a) with a the `average_over_kinds`.

    >>> weigh(np.array([[0.9, 0.95], [0.8, 0.9], [0.7, 0.5]])).round(3)
    array([0.047, 0.953])
    """
    points = 100 * average_over_kinds(aurocs)
    weights = np.exp(beta * (points - points.max()))
    normalised: Floats = weights / weights.sum()
    return normalised


def average_over_kinds(aurocs: Floats) -> Floats:
    """(D,) means of AUROCs (K, D) over the kinds, of three or more without the highest and the
    lowest, so that no single kind decides."""
    ordered = np.sort(aurocs, axis=0)
    if len(ordered) >= 3:
        ordered = ordered[1:-1]
    means: Floats = ordered.mean(axis=0)
    return means


def keep(
    weights: Floats, costs: Sequence[Cost], budget: Budget, least: float = LEAST_SHARE
) -> list[int]:
    """Which members stay, in their order: those with at least a share of `least`, from the largest
    weight on as far as the budget admits them.

    If it admits none of these, the one with the largest weight that it admits stays alone; if it
    admits none at all, the first of the pool does, which is fDBD.
    """
    order = sorted(range(len(weights)), key=lambda member: -weights[member])
    kept: list[int] = []
    for member in order:
        if weights[member] < least:
            break
        if budget.admits([costs[place] for place in [*kept, member]]):
            kept.append(member)
    if kept:
        return sorted(kept)
    for member in order:
        if budget.admits([costs[member]]):
            return [member]
    return [0]
