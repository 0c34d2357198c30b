"""The choice of a detector without OOD data: a pool is fitted, weighed on pseudo-OOD samples that
are made of held-out in-distribution ones, pruned to a budget, and becomes one detector.

`choose_members` does this to a fitted pool, `Auto` holds the options, `Choice` says what was
found. How a `Guard` gets its held-out samples is in `choice_samples`, the rule's numbers are in
`choice_rule`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fdbd.core.batch import Batch, Head, Inputs
from fdbd.core.configuration import Passes, at_least_one
from fdbd.decision.choice_rule import (
    BETA,
    EQUAL_POOL,
    POOL,
    Budget,
    Cost,
    Floats,
    average_over_kinds,
    keep,
    make_member,
    weigh,
)
from fdbd.detectors import Detector, Ensemble
from fdbd.detectors.base import innermost
from fdbd.fitting.driver import side_by_side
from fdbd.metrics import evaluate
from fdbd.util.terminal import one_line

AUTO = "auto"
"""What takes the place of a detector's name where detectors are chosen and weighed."""
COST_ROWS = 32
"""Samples in a batch when a member's time is measured."""
FEWEST = 30
"""Held-out samples below which a weight would be mostly chance."""
Samples = Inputs | Batch
Kinds = Mapping[str, Samples] | Callable[[Samples], Mapping[str, Samples]]
"""Pseudo-OOD samples by kind, each what the model takes or a Batch of features; or a function that
makes them of held-out samples."""


@dataclass(frozen=True)
class Auto:
    """Options of ``Guard(model, "auto")``: the pool is fitted in one run of the network over the
    training data, and weighed in one run over held-out samples and pseudo-OOD samples made of them.

    Experimental: docs/choosing.md says on which networks it was tried, and what it reached there.

    Args:
        budget: what the chosen detectors may cost together: a `Budget`, or words such as
            "200us, 10MB, no bank". None: no limit.
        kinds: pseudo-OOD samples of your own, in place of those made of images: a function of the
            held-out samples (what the model takes, or a Batch of features) that returns samples by
            kind, or these samples themselves. For a model of texts: `fdbd.data.token_kinds`; for
            features of texts: those of `fdbd.data.text_kinds`; for audio: `fdbd.data.audio_kinds`.
        pool: names of detectors, such as "react(95)+energy"; a percentile, if the detector has
            one, stands in brackets. The first stays if the budget admits none. None: the pool of
            the study.
        beta: how fast a weight grows with the AUROC on the kinds, per percentage point.
        held_out: how many held-out samples are used at most; more are not better.
        per_kind: pseudo-OOD images of each kind.
        seed: of the pseudo-OOD images, and of which samples are held out.

    >>> Auto(budget="no bank").budget
    Budget(microseconds=None, megabytes=None, bank=False)
    """

    budget: Budget | str | None = None
    kinds: Kinds | None = None
    pool: Sequence[str] | None = None
    beta: float = BETA
    held_out: int = 300
    per_kind: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.budget, str):
            object.__setattr__(self, "budget", Budget.parse(self.budget))
        if self.budget is None:
            object.__setattr__(self, "budget", Budget())
        if not isinstance(self.budget, Budget):
            raise TypeError(f"budget is {self.budget!r}, expected words, an fdbd.Budget or None")
        says_how = callable(self.kinds) or isinstance(self.kinds, Mapping)
        if self.kinds is not None and not says_how:
            raise TypeError(
                f"kinds is {self.kinds!r}, expected a function of the held-out samples that "
                "returns samples by kind, or a dict of them"
            )
        if not 0 <= self.beta < float("inf"):
            raise ValueError(f"beta is {self.beta}, expected a number from 0")
        held_out = at_least_one("held_out", self.held_out, f"a number of samples from {FEWEST}")
        if held_out < FEWEST:
            raise ValueError(f"held_out is {held_out}, expected at least {FEWEST} samples")
        at_least_one("per_kind", self.per_kind, "at least 1")
        self._check_pool()

    def _check_pool(self) -> None:
        if self.pool is None:
            return
        if isinstance(self.pool, str):
            raise ValueError(f"pool is {self.pool!r}, expected a list of names of detectors")
        if len(self.pool) < 2:
            raise ValueError("the pool has fewer than two detectors: name the one as the detector")
        twice = [name for name in self.pool if list(self.pool).count(name) > 1]
        if twice:
            raise ValueError(f"the pool has {twice[0]!r} more than once: name each detector once")

    @property
    def limits(self) -> Budget:
        """The budget, which `__post_init__` has made of words."""
        assert isinstance(self.budget, Budget)
        return self.budget

    def can_weigh(self, model: object) -> bool:
        """Whether pseudo-OOD samples can be made for this model, or without one: of images, or of
        others if the user says how."""
        return isinstance(model, nn.Module) or self.kinds is not None

    def specs(self, can_be_weighed: bool) -> tuple[str, ...]:
        """Names of the pool; those of the equal ensemble if there are no pseudo-OOD samples."""
        if self.pool is not None:
            names = tuple(self.pool)
        elif can_be_weighed:
            names = POOL
        else:
            names = EQUAL_POOL
        if self.limits.bank:
            return names
        return tuple(name for name in names if not _has_bank(make_member(name)))

    def make_pool(self, can_be_weighed: bool = True, num_samples: int | None = None) -> Pool:
        """The pool as one detector, so that it is fitted in shared passes."""
        return Pool(self.specs(can_be_weighed), num_samples)


class Pool(Ensemble):
    """The detectors of the pool as one, which is fitted and never scores.

    A member that cannot be fitted to these data is left out: a single feature has no residual, and
    features that are all zero have no neighbours. Only the first has to be fitted."""

    def __init__(self, names: Sequence[str], num_samples: int | None = None) -> None:
        super().__init__([make_member(name, num_samples) for name in names], "fisher")
        self.names = tuple(names)
        self.num_samples = num_samples
        self.failures: dict[str, str] = {}
        """Why members could not be fitted, by name."""

    def passes(self, head: Head) -> Passes:
        self.failures = {}
        first, *others = self.members
        programs = [first.passes(head)]
        for name, member in zip(self.names[1:], others):
            programs.append(self._unless_it_fails(name, member.passes(head)))
        return side_by_side(programs)

    def _unless_it_fails(self, name: str, program: Passes) -> Passes:
        """The passes of a member; they end early if it cannot be fitted."""
        try:
            yield from program
        except (ValueError, RuntimeError) as error:
            self.failures[name] = one_line(error)

    def fitted_members(self) -> dict[str, Detector]:
        """The members that could be fitted, by name."""
        fitted = {}
        for name, member in zip(self.names, self.members):
            if name not in self.failures:
                fitted[name] = member
        return fitted


class Member(NamedTuple):
    """What was found of one detector of the pool.

    >>> cost = Cost(microseconds=3.5, megabytes=0.2, has_bank=False)
    >>> kinds = {"blur": (0.91, 0.88, 0.94), "noise": (0.95, 0.93, 0.97)}
    >>> member = Member("fdbd", weight=0.2, share=0.25, cost=cost, aurocs=kinds)
    >>> round(member.auroc, 2)
    0.93
    """

    name: str
    weight: float
    """Its share of all weights, before any was left out."""
    share: float
    """Its share among those that were kept; 0: left out."""
    cost: Cost
    aurocs: dict[str, tuple[float, float, float]]
    """AUROC by kind, held-out samples against pseudo-OOD samples, with its 95 % interval."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Member:
        """One entry of what `Choice.to_dict` has made."""
        aurocs = {str(kind): tuple(found) for kind, found in values["aurocs"].items()}
        return cls(
            name=str(values["name"]),
            weight=float(values["weight"]),
            share=float(values["share"]),
            cost=Cost(**values["cost"]),
            aurocs=aurocs,
        )

    @property
    def auroc(self) -> float | None:
        """The average over the kinds that the weight follows from; None without kinds."""
        if not self.aurocs:
            return None
        values = np.array([[found[0]] for found in self.aurocs.values()])
        return float(average_over_kinds(values)[0])


@dataclass(frozen=True)
class Choice:
    """What `choose_members` found, for people and for a guard's file.

    >>> cost = Cost(3.0, 0.5, False)
    >>> members = Member("fdbd", 0.6, 1.0, cost, {}), Member("knn", 0.4, 0.0, cost, {})
    >>> [member.name for member in Choice(members, 300).kept]
    ['fdbd']
    """

    members: tuple[Member, ...]
    num_held_out: int
    per_kind: dict[str, int] = field(default_factory=dict)
    """Pseudo-OOD samples by kind."""
    notes: tuple[str, ...] = ()
    """What to know before it is trusted, a sentence each."""

    @property
    def kept(self) -> tuple[Member, ...]:
        """The members that were kept, the largest share first."""
        kept = [member for member in self.members if member.share > 0]
        return tuple(sorted(kept, key=lambda member: -member.share))

    @property
    def is_weighed(self) -> bool:
        """Whether there were pseudo-OOD samples to weigh detectors by; else weights are equal."""
        return len(self.per_kind) > 0

    @property
    def cost(self) -> Cost:
        """What the kept members cost together."""
        costs = [member.cost for member in self.kept]
        return Cost(
            sum(cost.microseconds for cost in costs),
            sum(cost.megabytes for cost in costs),
            any(cost.has_bank for cost in costs),
        )

    @property
    def summary(self) -> str:
        """One sentence: the members that were kept and what they cost.

        >>> cost = Cost(3.0, 0.5, False)
        >>> Choice((Member("fdbd", 1.0, 1.0, cost, {}),), 300).summary
        'fdbd 100 %: 3 µs per sample in batches of 32, 0.5 MB beside the head'
        """
        shares = ", ".join(f"{member.name} {100 * member.share:.0f} %" for member in self.kept)
        cost = self.cost
        return (
            f"{shares}: {cost.microseconds:.3g} µs per sample in batches of {COST_ROWS}, "
            f"{cost.megabytes:.3g} MB beside the head"
        )

    @classmethod
    def from_dict(cls, values: object) -> Choice:
        """What `to_dict` has made; ValueError for anything else."""
        given: Any = values
        try:
            members = tuple(Member.from_dict(member) for member in given["members"])
            num_held_out = int(given["num_held_out"])
            return cls(members, num_held_out, given["per_kind"], tuple(given["notes"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"this does not describe a choice of detectors: {error!r}") from None

    def to_dict(self) -> dict[str, object]:
        """All of it as JSON values."""
        members = [{**member._asdict(), "cost": member.cost._asdict()} for member in self.members]
        total = self.cost._asdict()
        return {
            "members": members,
            "cost": total,
            "num_held_out": self.num_held_out,
            "per_kind": self.per_kind,
            "notes": list(self.notes),
        }


def choose_members(
    pool: Pool, held_out: Batch, kinds: Mapping[str, Batch], auto: Auto
) -> tuple[Detector, Choice]:
    """Weigh a fitted pool, leave out what carries little weight or exceeds the budget, and
    calibrate the rest: a weighted ensemble, or the one detector that is left.

    Args:
        pool: the fitted pool of `Auto.make_pool`.
        held_out: features of in-distribution samples that neither the network nor the fit has seen.
        kinds: features of pseudo-OOD samples by kind; none: equal weights.
    """
    count = len(held_out.features)
    if count < FEWEST:
        raise ValueError(
            f"{count} held-out samples, expected at least {FEWEST} to weigh detectors with, "
            f"better {auto.held_out}"
        )
    share_head(pool.members)
    candidates, failures = _usable_members(pool, held_out)
    names = list(candidates)
    members = list(candidates.values())
    aurocs = _aurocs(members, held_out, kinds)
    costs = [measure_cost(member, held_out) for member in members]
    weights = _weights(aurocs, kinds, auto.beta) if kinds else _equal_weights(names)
    kept = keep(weights, costs, auto.limits)
    shares = _shares(weights, kept)
    own_shares = None
    if kinds:
        own_shares = [float(shares[place]) for place in kept]
    detector = _combined([members[place] for place in kept], own_shares, held_out)
    found = []
    for place, name in enumerate(names):
        weight = float(weights[place])
        share = float(shares[place])
        found.append(Member(name, weight, share, costs[place], aurocs[place]))
    sizes = {kind: len(batch.features) for kind, batch in kinds.items()}
    notes = _notes(kinds, auto, [costs[place] for place in kept], failures)
    return detector, Choice(tuple(found), count, sizes, notes)


def _usable_members(pool: Pool, held_out: Batch) -> tuple[dict[str, Detector], dict[str, str]]:
    """The members that score every held-out sample, by name, and why the others cannot be used."""
    usable = {}
    failures = dict(pool.failures)
    for name, member in pool.fitted_members().items():
        with torch.no_grad():
            scores = member.score(held_out)
        if torch.isfinite(scores).all():
            usable[name] = member
            continue
        row = int((~torch.isfinite(scores)).nonzero()[0])
        failures[name] = f"it scores held-out sample {row} {scores[row].item()}"
    if not usable:
        raise ValueError(
            f"no detector of the pool scores all held-out samples; {pool.names[0]}: "
            f"{failures[pool.names[0]]}, expected a finite score: its features are not finite"
        )
    return usable, failures


def _combined(
    members: Sequence[Detector], shares: Sequence[float] | None, held_out: Batch
) -> Detector:
    """The chosen members as one detector: a single one as it is, several as an ensemble. Without
    shares their weights are equal, for which the study supports the harmonic mean."""
    if len(members) == 1:
        return members[0]
    if shares is None:
        ensemble = Ensemble(list(members))
    else:
        ensemble = Ensemble(list(members), "fisher", list(shares))
    ensemble.calibrate(held_out)
    return ensemble


def _aurocs(
    members: Sequence[Detector], held_out: Batch, kinds: Mapping[str, Batch]
) -> list[dict[str, tuple[float, float, float]]]:
    """For each member, how well it tells each kind from what was held out: AUROC and interval."""
    found = []
    with torch.no_grad():
        for member in members:
            inside = member.score(held_out)
            of_member = {}
            for kind, batch in kinds.items():
                of_member[kind] = _auroc(inside, member.score(batch))
            found.append(of_member)
    return found


def _weights(
    aurocs: Sequence[Mapping[str, tuple[float, float, float]]], kinds: Iterable[str], beta: float
) -> Floats:
    """The weight of each member, by the rule of `choice_rule`."""
    table = []
    for kind in kinds:
        table.append([of_member[kind][0] for of_member in aurocs])
    return weigh(np.array(table), beta)


def share_head(members: Sequence[Detector]) -> None:
    """Let all members share one copy of the head, which is large if it has many classes."""
    parts: list[Detector] = []
    for member in members:
        parts.extend(innermost(member))
    first = parts[0]
    for part in parts[1:]:
        for name in ("head_weight", "head_bias"):
            shared = first._buffers[name]
            own = part._buffers[name]
            assert shared is not None
            assert own is not None
            if torch.equal(shared, own):
                part._buffers[name] = shared


def measure_cost(member: Detector, batch: Batch) -> Cost:
    """The time of a score in this process and the memory of what was learnt. The time is the
    shortest of several, which other work on the machine disturbs least."""
    rows = torch.arange(COST_ROWS) % len(batch.features)
    few = batch.rows(rows)
    times = []
    with torch.no_grad():
        for _ in range(10):
            start = time.perf_counter()
            member.score(few)
            times.append(time.perf_counter() - start)
    seconds = min(times)
    num_bytes = 0
    for part in member.modules():
        for name, tensor in part._buffers.items():
            if tensor is not None and name not in ("head_weight", "head_bias"):
                num_bytes += tensor.numel() * tensor.element_size()
    return Cost(1e6 * seconds / COST_ROWS, num_bytes / 1e6, _has_bank(member))


def _has_bank(member: Detector) -> bool:
    from fdbd.detectors.knn import Banked

    return any(isinstance(part, Banked) for part in member.modules())


def _equal_weights(names: Sequence[str]) -> Floats:
    """The same weight for each detector of `EQUAL_POOL`, or for all detectors if none of those is
    among them."""
    is_in = np.array([name in EQUAL_POOL for name in names], dtype=np.float64)
    if not is_in.any():
        is_in[:] = 1
    shares: Floats = is_in / is_in.sum()
    return shares


def _auroc(inside: Tensor, outside: Tensor) -> tuple[float, float, float]:
    found = evaluate(inside, outside).auroc
    return float(found), float(found.low), float(found.high)


def _shares(weights: Floats, kept: Sequence[int]) -> Floats:
    """The weights of those that are kept, normalised; 0 for the others."""
    shares = np.zeros_like(weights)
    chosen = list(kept)
    shares[chosen] = weights[chosen] / weights[chosen].sum()
    return shares


def _notes(
    kinds: Mapping[str, Batch], auto: Auto, costs: Sequence[Cost], failures: Mapping[str, str]
) -> tuple[str, ...]:
    notes = []
    if not kinds:
        notes.append(
            "no pseudo-OOD samples could be made of these data, so all members have equal weights: "
            "give fdbd.Auto(kinds=…) a function that makes them"
        )
    if not auto.limits.admits(costs):
        notes.append("the budget admits no detector of the pool: the first was taken nevertheless")
    for name, why in failures.items():
        notes.append(f"{name} was left out: {why}")
    return tuple(notes)
