"""`fdbd.choose`: what each detector of the pool makes of pseudo-OOD samples, what it costs, and
what ``"auto"`` makes of that; with real OOD data, the table on them beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fdbd.core.batch import Batch, Head, Inputs
from fdbd.decision.choice import COST_ROWS, Auto, Choice, Member, Pool
from fdbd.decision.guard import Data, Guard
from fdbd.detectors import Detector
from fdbd.metrics import evaluate
from fdbd.networks.find_head import HeadName

CAUTION = (
    "This is not a measurement on your OOD data: pseudo-OOD samples are far from most of what a "
    "model meets. On the test networks of the study (docs/choosing.md) the weighted ensemble of "
    '"auto" came closer to the best single detector in hindsight than the fixed choices it was '
    "compared with; on near OOD it did not."
)
EQUAL_CAUTION = (
    "No pseudo-OOD samples could be made of these data: give fdbd.Auto(kinds=…) a function that "
    "makes some, or OOD data of your own."
)
Interval = tuple[float, float, float]
"""A value with its 95 % interval: value, low, high."""


@dataclass(frozen=True)
class Advice:
    """What `fdbd.choose` found. The guard is fitted and has its detector, but no threshold yet.

    >>> import fdbd
    >>> rows = torch.randn(600, 6, generator=torch.Generator().manual_seed(0))
    >>> head = fdbd.Head(torch.eye(6)[:3], torch.zeros(3))
    >>> advice = fdbd.choose(head, [fdbd.Batch(rows[:300])], held_out=[fdbd.Batch(rows[300:])])
    >>> isinstance(advice, fdbd.Advice), len(advice.choice.kept) > 0
    (True, True)
    """

    choice: Choice
    guard: Guard
    ood: dict[str, dict[str, Interval]] = field(default_factory=dict)
    """AUROC by OOD set and detector, "auto" among them, against held-out samples that did not weigh
    the detectors; empty without OOD data."""
    pictures: dict[str, Tensor] = field(default_factory=dict)
    """One image (C, H, W) of each kind, from 0 to 1."""
    cautions: tuple[str, ...] = ()

    @property
    def pareto(self) -> tuple[Member, ...]:
        """Members that no other one beats in both time and weight, the cheapest first."""
        return pareto(self.choice.members)

    @property
    def sentence(self) -> str:
        """The advice, which claims no more than the study supports."""
        kept = self.choice.kept
        if not self.choice.is_weighed:
            return f"{_equal_weights(len(kept))}. {EQUAL_CAUTION}"
        if len(kept) == 1:
            taken = f'"auto" keeps {kept[0].name} alone: no other carries weight within the budget'
        else:
            taken = f'"auto" keeps {len(kept)} detectors, {kept[0].name} with the most weight'
        return f"{taken}. {CAUTION}"

    def to_dict(self) -> dict[str, object]:
        """All numbers as JSON values."""
        tables = {}
        for name, row in self.ood.items():
            tables[name] = {detector: list(found) for detector, found in row.items()}
        return {
            **self.choice.to_dict(),
            "kept": [member.name for member in self.choice.kept],
            "pareto": [member.name for member in self.pareto],
            "ood": tables,
            "advice": self.sentence,
            "cautions": list(self.cautions),
        }


def _equal_weights(number: int) -> str:
    if number == 1:
        return "One detector is left within the budget, and nothing has weighed it"
    return f'"auto" keeps {number} detectors with equal weights, as nothing has weighed them'


def pareto(members: Sequence[Member]) -> tuple[Member, ...]:
    """Members that no other one beats in both time and weight, the cheapest first."""
    front: list[Member] = []
    for member in sorted(members, key=lambda each: (each.cost.microseconds, -each.weight)):
        if not front or member.weight > front[-1].weight:
            front.append(member)
    return tuple(front)


def choose(
    model: nn.Module | Head,
    data: Data,
    held_out: Data,
    *,
    ood: Mapping[str, Iterable[Inputs | Batch]] | None = None,
    auto: Auto | None = None,
    head: HeadName = None,
    progress: bool = True,
) -> Advice:
    """Compare detectors on a model and its data, without OOD data.

    Args:
        model: as for `Guard`.
        data: training data, as for `Guard.fit`.
        held_out: in-distribution data that neither the network nor the fit has seen; some 300
            samples. With `ood`, one half of them is the in-distribution side of the real table.
        ood: data loaders of real OOD data by name, if there are any; they choose nothing.
        auto: options, such as a budget.
        head: name of the model's linear head, if it is not found by itself.
        progress: show a bar when it takes more than two seconds.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 16), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    >>> train, fresh = torch.rand(100, 3, 16, 16), torch.rand(60, 3, 16, 16)
    >>> found = choose(model, [train], [fresh], auto=Auto(per_kind=4))
    >>> len(found.choice.members), list(found.choice.members[0].aurocs)[:2]
    (20, ['patches', 'phases'])
    """
    guard = Guard(model, auto or Auto(), head=head)
    guard.fit(data, progress=progress)
    pool = guard.detector
    assert isinstance(pool, Pool)
    fitted = pool.fitted_members()
    share = 0.5 if ood else 1.0
    chosen = guard.stages.choose_from(held_out, share=share, progress=progress)
    choice = guard.choice
    assert choice is not None
    table: dict[str, dict[str, Interval]] = {}
    if ood:
        detectors = {member.name: fitted[member.name] for member in choice.members}
        detectors["auto"] = guard.detector
        inside = [part.batch for part in chosen.rest]
        table = _real_table(guard, detectors, inside, ood)
    return Advice(choice, guard, table, chosen.pictures)


def _real_table(
    guard: Guard,
    detectors: Mapping[str, Detector],
    inside: Sequence[Batch],
    ood: Mapping[str, Iterable[Inputs | Batch]],
) -> dict[str, dict[str, Interval]]:
    """AUROC by OOD set and detector, against features of held-out samples."""
    inside_scores = {}
    for name, detector in detectors.items():
        inside_scores[name] = _scores(detector, guard, inside)
    table: dict[str, dict[str, Interval]] = {}
    for title, loader in ood.items():
        outside = [guard.stages.features_of(item) for item in loader]
        row = {}
        for name, detector in detectors.items():
            row[name] = _auroc(inside_scores[name], _scores(detector, guard, outside))
        table[title] = row
    return table


def _scores(detector: Detector, guard: Guard, batches: Sequence[Batch]) -> Tensor:
    parts = []
    with torch.no_grad():
        for batch in batches:
            features = guard.stages.features_alone(batch)
            parts.append(detector.score(features).cpu())
    return torch.cat(parts)


def _auroc(inside: Tensor, outside: Tensor) -> Interval:
    found = evaluate(inside, outside).auroc
    return float(found), float(found.low), float(found.high)


def describe_cost(microseconds: float) -> str:
    """A time per sample in words, with two digits.

    >>> describe_cost(3.21), describe_cost(104.0), describe_cost(1234.0)
    ('3.2 µs', '100 µs', '1.2 ms')
    """
    if microseconds >= 1000:
        return f"{_two_digits(microseconds / 1000)} ms"
    return f"{_two_digits(microseconds)} µs"


def _two_digits(value: float) -> str:
    """A number rounded to two significant digits, without an exponent."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:g}"


COST_NOTE = f"per sample, in batches of {COST_ROWS}, on this machine"
