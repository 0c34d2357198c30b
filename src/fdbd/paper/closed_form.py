"""The closed form of the boundary distance: how close it is to the exact one and what each way
costs; and Theorem 3.2, by which it is a lower bound that is equal at the nearest class."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fdbd import geometry
from fdbd.bench.figures import Floats
from fdbd.core.batch import Head
from fdbd.core.linear_algebra import unit
from fdbd.metrics import as_percent
from fdbd.paper import plot
from fdbd.paper.finding import Finding
from fdbd.paper.models import EvaluatedModel, load_models
from fdbd.paper.settings import DistanceQuality, Theorem

OUTSIDE = "OOD sets"
CLOSED = "closed form"
EXACT = "exact projection"
ALL = "attack, all pairs at once"
ONE = "attack, one pair at a time"

Gaps = dict[str, dict[str, Floats]]
"""Relative gaps by model and by set of features: the ID set, and all OOD sets together."""


@dataclass(frozen=True)
class CarliniWagner:
    """The targeted attack of Carlini and Wagner (2017) in feature space, which bounds a boundary
    distance from above: minimise ‖δ‖² + c · max(max_{j≠t} logit_j(z + δ) − logit_t(z + δ), 0), with
    Adam, c found by bisection.

    Defaults are those of the fDBD paper's appendix. There is no box around features, so δ is
    optimised directly.
    """

    initial_constant: float = 2.0
    rate: float = 0.005
    steps: int = 500
    searches: int = 3

    def distances(self, features: Tensor, head: Head, targets: Tensor) -> Tensor:
        """(N,) length of the shortest δ found that makes z of (N, P) a member of class targets
        (N,); inf for none."""
        count = len(features)
        constant = torch.full((count,), self.initial_constant, dtype=features.dtype)
        # The constants between which the search is: too small to succeed, and known to succeed.
        low = torch.zeros_like(constant)
        high = torch.full_like(constant, torch.inf)
        best = torch.full_like(constant, torch.inf)
        for _ in range(self.searches):
            shortest = self._descend(features, head, targets, constant)
            best = torch.minimum(best, shortest)
            reached = shortest.isfinite()
            high = torch.where(reached, torch.minimum(high, constant), high)
            low = torch.where(reached, low, torch.maximum(low, constant))
            # Ten times as much until it succeeds, then halfway.
            constant = torch.where(high.isfinite(), (low + high) / 2, 10 * constant)
        return best

    def _descend(self, features: Tensor, head: Head, targets: Tensor, constant: Tensor) -> Tensor:
        """(N,) length of the shortest δ that succeeds among those of one descent; inf if none
        does."""
        weight = head.weight.to(features)
        bias = head.bias.to(features)
        is_target = torch.nn.functional.one_hot(targets, head.num_classes).bool()
        shortest = torch.full_like(constant, torch.inf)
        delta = torch.zeros_like(features, requires_grad=True)
        optimiser = torch.optim.Adam([delta], lr=self.rate)
        for _ in range(self.steps):
            logits = (features + delta) @ weight.T + bias
            best_other = logits.masked_fill(is_target, -torch.inf).amax(dim=1)
            gap = best_other - logits.gather(1, targets[:, None])[:, 0]
            square = delta.square().sum(dim=1)
            with torch.no_grad():
                candidate = torch.minimum(shortest, square.sqrt())
                shortest = torch.where(gap <= 0, candidate, shortest)
            optimiser.zero_grad()
            loss = square + constant * gap.clamp_min(0)
            loss.sum().backward()
            optimiser.step()
        return shortest.detach()


def distance_quality(finding: Finding, settings: DistanceQuality) -> None:
    """Closed form, attack on one pair at a time, attack in one batch and exact projection on the
    same pairs."""
    models = load_models(finding)
    gaps: Gaps = {}
    for model in models:
        finding.say(f"{EXACT} for {model.title}")
        gaps[model.title] = _gaps(model, settings.samples)
    _table_of_gaps(gaps, finding)
    _decide_size_of_gaps(gaps, settings.claimed, finding)
    finding.data = {"gap": _summaries(gaps)}
    finding.data |= _race(models[0], settings, finding)
    _draw(gaps, finding)


def relative_gaps(features: Tensor, head: Head) -> Floats:
    """(pairs,) 1 − closed/exact over all samples and reachable classes."""
    exact = geometry.exact_distances(features, head)
    closed = _in_double(features, head)
    reachable = exact.isfinite() & (exact > 0)
    return (1 - closed[reachable] / exact[reachable]).clamp_min(0).numpy()


def _in_double(features: Tensor, head: Head) -> Tensor:
    """The closed form in float64, so that its rounding does not look like a gap."""
    return geometry.distances(features.double(), Head(head.weight.double(), head.bias.double()))


def _gaps(model: EvaluatedModel, samples: int) -> dict[str, Floats]:
    benchmark = model.benchmark
    per_set = samples // len(benchmark.ood)
    inside = benchmark.test.rows(slice(0, samples)).features
    outside = torch.cat([part.rows(slice(0, per_set)).features for part in benchmark.ood])
    return {
        benchmark.test.name: relative_gaps(inside, benchmark.head),
        OUTSIDE: relative_gaps(outside, benchmark.head),
    }


def _summaries(gaps: Gaps) -> dict[str, dict[str, dict[str, float]]]:
    summaries: dict[str, dict[str, dict[str, float]]] = {}
    for title, parts in gaps.items():
        summaries[title] = {name: _summary(part) for name, part in parts.items()}
    return summaries


def _summary(gaps: Floats) -> dict[str, float]:
    median, p95, maximum = np.quantile(gaps, [0.5, 0.95, 1])
    return {
        "mean": float(gaps.mean()),
        "median": float(median),
        "p95": float(p95),
        "maximum": float(maximum),
    }


def _table_of_gaps(gaps: Gaps, finding: Finding) -> None:
    rows: list[list[str]] = []
    for title, parts in gaps.items():
        for name, part in parts.items():
            numbers = [as_percent(value) for value in _summary(part).values()]
            share_above = 100 * (part > 1e-9).mean()
            rows.append([title, name, *numbers, f"{share_above:.1f}"])
    finding.table(
        ["model", "features", "mean", "median", "p95", "maximum", "pairs above 0"],
        rows,
        "Relative gap of the closed form below the exact distance, percent.",
    )


def _decide_size_of_gaps(gaps: Gaps, claimed: float, finding: Finding) -> None:
    """Whether the gaps are as small as the paper says: on average, and for every pair."""
    summaries_by_label: dict[str, list[dict[str, float]]] = {"ID": [], "OOD": []}
    for parts in gaps.values():
        for name, part in parts.items():
            label = "OOD" if name == OUTSIDE else "ID"
            summaries_by_label[label].append(_summary(part))
    for label, summaries in summaries_by_label.items():
        means = [summary["mean"] for summary in summaries]
        largest = max(summary["maximum"] for summary in summaries)
        bound = (
            f"The closed form is within {claimed:.1%} of the exact distance for {label} features"
        )
        finding.decide(
            f"{bound}, on average over pairs",
            max(means) < claimed,
            f"Mean gap between {min(means):.2%} and {max(means):.2%}.",
        )
        finding.decide(f"{bound}, for every pair", largest < claimed, f"Largest gap {largest:.1%}.")


class _Pairs(NamedTuple):
    """Pairs of a sample and a target class, (N,) each."""

    samples: Tensor
    targets: Tensor


class _Timed(NamedTuple):
    """The result of one way of computing distances."""

    distances: Tensor
    pairs: int
    seconds: float

    @property
    def per_pair(self) -> float:
        """Seconds per pair of a sample and a class."""
        return self.seconds / self.pairs


def _race(model: EvaluatedModel, settings: DistanceQuality, finding: Finding) -> dict[str, Any]:
    """The time of each way per pair, and how their distances compare."""
    head = model.benchmark.head
    z = model.benchmark.test.rows(slice(0, settings.samples)).features
    pairs = _spread_pairs(z, head, settings.attacked)
    attack = CarliniWagner(**asdict(settings.attack))
    found = _time_all_ways(z, head, pairs, attack, settings.one_by_one, finding)

    exact = found[EXACT].distances[pairs.samples, pairs.targets]
    closed = _in_double(z, head)[pairs.samples, pairs.targets]
    comparison = _compare_with_attack(exact, closed, found[ALL].distances.double())
    _table_of_times(model.title, found, comparison, attack, finding)
    _decide_order_of_the_three(comparison, finding)
    _decide_speed(found, finding)
    # Pairs on which both failed are inf − inf, a NaN.
    batched = found[ALL].distances[: settings.one_by_one]
    single_minus_batched = (found[ONE].distances - batched).nan_to_num(0).abs()
    return {
        "samples": len(z),
        "classes": head.num_classes - 1,
        "seconds per pair": {name: way.per_pair for name, way in found.items()},
        "exact seconds": found[EXACT].seconds,
        "success": comparison.success,
        "attack above exact": _mean_and_median(comparison.above_exact),
        "attack above closed form": _mean_and_median(comparison.above_closed),
        "largest difference of single and batched": float(single_minus_batched.max()),
    }


def _time_all_ways(
    z: Tensor, head: Head, pairs: _Pairs, attack: CarliniWagner, alone: int, finding: Finding
) -> dict[str, _Timed]:
    """The distances by each way, and its time. The first `alone` pairs are attacked one by one."""

    def attack_one_by_one() -> Tensor:
        found = []
        for sample, target in zip(pairs.samples[:alone], pairs.targets[:alone]):
            found.append(attack.distances(z[sample, None], head, target[None]))
        return torch.cat(found)

    ways: dict[str, Callable[[], Tensor]] = {
        CLOSED: lambda: geometry.distances(z, head),
        EXACT: lambda: geometry.exact_distances(z, head),
        ALL: lambda: attack.distances(z[pairs.samples], head, pairs.targets),
        ONE: attack_one_by_one,
    }
    all_pairs = len(z) * (head.num_classes - 1)
    counts = {CLOSED: all_pairs, EXACT: all_pairs, ALL: len(pairs.samples), ONE: alone}
    # The first call imports and sets up what it needs, which is not to be timed.
    geometry.exact_distances(z[:2], head)
    found: dict[str, _Timed] = {}
    for name, run in ways.items():
        finding.say(f"{name}: {counts[name]:,} pairs")
        start = time.perf_counter()
        distances = run()
        found[name] = _Timed(distances, counts[name], time.perf_counter() - start)
    return found


def _decide_speed(found: Mapping[str, _Timed], finding: Finding) -> None:
    exact = found[EXACT].per_pair
    ratio = found[ONE].per_pair / exact
    finding.decide(
        "A pair is projected at least 1,000 times faster than it is attacked alone",
        ratio >= 1000,
        f"{ratio:,.0f} times; against the batched attack {found[ALL].per_pair / exact:,.0f} times.",
        ours=True,
    )


class _WithAttack(NamedTuple):
    """A comparison of the attack's distances with the other two."""

    #: share of the pairs on which the attack succeeded
    success: float
    #: relative excess over the exact distance, if it succeeded
    above_exact: Tensor
    #: relative excess over the closed form, for the same pairs
    above_closed: Tensor
    #: closed form ≤ exact ≤ attack for every pair
    ordered: bool


def _compare_with_attack(exact: Tensor, closed: Tensor, attacked: Tensor) -> _WithAttack:
    success = float(attacked.isfinite().double().mean())
    reached = attacked.isfinite() & exact.isfinite()
    exact = exact[reached]
    closed = closed[reached]
    attacked = attacked[reached]
    # The attack computes in float32.
    tolerance = 1 + 1e-5
    closed_is_least = bool((closed <= exact * tolerance).all())
    attack_is_largest = bool((exact <= attacked * tolerance).all())
    return _WithAttack(
        success, attacked / exact - 1, attacked / closed - 1, closed_is_least and attack_is_largest
    )


def _mean_and_median(values: Tensor) -> dict[str, float]:
    return {"mean": float(values.mean()), "median": float(values.median())}


def _table_of_times(
    title: str,
    found: Mapping[str, _Timed],
    comparison: _WithAttack,
    attack: CarliniWagner,
    finding: Finding,
) -> None:
    """Times are figures and no verdicts: they depend on the machine and on what else it does."""
    settings = (
        f"constant {attack.initial_constant}, rate {attack.rate}, {attack.steps} steps, "
        f"{attack.searches} searches"
    )
    above_exact = float(comparison.above_exact.mean())
    above_closed = float(comparison.above_closed.mean())
    rows = []
    for name, way in found.items():
        rows.append([name, f"{way.pairs:,}", f"{1e6 * way.per_pair:.3g}"])
    finding.table(
        ["method", "pairs", "µs per pair"],
        rows,
        f"{title}; attack: {settings}; success {comparison.success:.1%}; on average "
        f"{above_exact:.2%} above the exact distance and {above_closed:.2%} above the closed form. "
        f"The exact projection of all {found[EXACT].pairs:,} pairs took "
        f"{found[EXACT].seconds:.3f} s. The paper's attack takes 992.2 ms per pair on a "
        "Tesla T4.",
        title="Time per pair of sample and class",
    )


def _decide_order_of_the_three(comparison: _WithAttack, finding: Finding) -> None:
    finding.decide(
        "closed form ≤ exact distance ≤ attack, for every pair",
        comparison.ordered,
        f"{len(comparison.above_exact):,} pairs.",
    )
    finding.decide(
        "The attack succeeds on nearly all pairs",
        comparison.success > 0.99,
        f"{comparison.success:.1%}.",
    )


def _spread_pairs(z: Tensor, head: Head, count: int) -> _Pairs:
    """`count` pairs of a sample and a class that is not predicted, spread over samples and
    classes."""
    predicted = head(z).argmax(dim=1)
    is_other = predicted[:, None] != torch.arange(head.num_classes)
    samples, targets = is_other.nonzero(as_tuple=True)
    taken = min(count, len(samples))
    chosen = torch.arange(taken) * len(samples) // taken
    return _Pairs(samples[chosen], targets[chosen])


def _draw(gaps: Gaps, finding: Finding) -> None:
    axis, bars = finding.axes(9, 3.2, 1, 2)[0]
    colours = iter((plot.INSIDE, plot.OUTSIDE, *plot.COLOURS[1:]))
    shares = np.linspace(0, 1, 400)
    for title, parts in gaps.items():
        for name, part in parts.items():
            quantiles = 100 * np.quantile(part, shares)
            label = f"{title}, {name}"
            axis.plot(100 * shares, quantiles, color=next(colours), label=label)
    axis.axhline(1.5, color=plot.GREY, ls=":", lw=1)
    axis.text(2, 1.7, "1.5 %, the paper's bound", fontsize=8, color="#666666")
    plot.label(
        axis,
        "share of pairs with a smaller gap, percent",
        "gap of the closed form, percent",
        legend=8,
    )
    times = finding.data["seconds per pair"]
    places = np.arange(len(times))[::-1]
    bars.barh(places, [1e6 * value for value in times.values()], color=plot.INSIDE, height=0.6)
    bars.set_yticks(places, list(times), fontsize=8)
    plot.label(bars, "µs per pair of sample and class", log="x")


@dataclass(frozen=True)
class _Case:
    """The results for one random head."""

    classes: int
    width: int
    #: reachable pairs of a sample and a class
    pairs: int
    #: largest relative excess of the closed form over the exact distance
    violation: float
    #: largest relative difference of the two at the nearest class
    nearest: float
    gap_mean: float
    gap_p95: float
    #: share of the pairs at which the two are equal
    equal: float
    #: points among which members nearer than the closed form were looked for
    tried: int
    #: pairs for which one was found
    found: int
    #: share of the samples for which one was found just beyond the bound
    beyond: float
    #: share of the pairs with one, if k is not the predicted class
    broken: float


def theorem(finding: Finding, settings: Theorem) -> None:
    """Random heads over class counts and dimensions: bound, equality, and a search for a nearer
    point."""
    generator = torch.Generator().manual_seed(settings.seed)
    cases: list[_Case] = []
    gap_by_rank: dict[str, Floats] = {}
    for classes, width in settings.sizes:
        finding.say(f"{classes} classes in {width} dimensions")
        case, by_rank = _case(classes, width, settings.samples, settings.tries, generator)
        cases.append(case)
        gap_by_rank[f"C = {classes}, P = {width}"] = 100 * by_rank
    _table_of_cases(cases, finding)
    _decide_bound(cases, finding)
    _decide_search(cases, finding)
    finding.notes = [
        "The bound is tight at the nearest class alone; at the others the gaps of the table are "
        "left."
    ]
    finding.data = {"cases": [asdict(case) for case in cases]}
    axis = finding.axes(7, 3.6)[0, 0]
    plot.curves(axis, None, gap_by_rank)
    plot.label(
        axis,
        "rank of the class by its closed-form distance (1: nearest)",
        "mean gap below the exact distance, percent",
        legend=8,
        log="x",
    )


def _table_of_cases(cases: list[_Case], finding: Finding) -> None:
    rows = []
    for case in cases:
        rows.append(
            [
                f"{case.classes}",
                f"{case.width}",
                f"{case.pairs:,}",
                f"{case.violation:.1e}",
                f"{case.gap_mean:.2%}",
                f"{case.gap_p95:.2%}",
                f"{case.equal:.2%}",
            ]
        )
    finding.table(
        ["C", "P", "pairs", "largest violation", "mean gap", "p95 gap", "pairs with equality"],
        rows,
        "Gap: 1 − closed form / exact distance. Violation: how far the closed form exceeds it, "
        "relative.",
    )


def _decide_bound(cases: list[_Case], finding: Finding) -> None:
    tolerance = 1e-9
    pairs = sum(case.pairs for case in cases)
    excess = max(case.violation for case in cases)
    finding.decide(
        "The closed form is never above the exact distance",
        excess <= tolerance,
        f"{pairs:,} pairs, largest relative excess {excess:.1e}.",
    )
    at_nearest = max(case.nearest for case in cases)
    finding.decide(
        "At the nearest class the two are equal",
        at_nearest <= tolerance,
        f"Largest relative difference {at_nearest:.1e}.",
    )


def _decide_search(cases: list[_Case], finding: Finding) -> None:
    """A search that could not find anything would prove nothing: it has to succeed just beyond the
    bound, and if an assumption is taken away."""
    finding.decide(
        "A search finds no member of a class's region nearer than the closed form",
        sum(case.found for case in cases) == 0,
        f"{sum(case.tried for case in cases):,} points tried.",
    )
    beyond = min(case.beyond for case in cases)
    finding.decide(
        "The search works: just beyond the bound it finds members of the nearest class's region",
        beyond > 0.999,
        f"For {beyond:.1%} of the samples or more.",
    )
    broken = [case.broken for case in cases]
    finding.decide(
        "Without the assumption that k is the predicted class the bound fails, and the search "
        "finds that",
        min(broken) > 0,
        f"In {min(broken):.1%} to {max(broken):.1%} of the pairs.",
    )


def _case(
    classes: int, width: int, samples: int, tries: int, generator: torch.Generator
) -> tuple[_Case, Floats]:
    """The results for one random head, and the mean gap by the rank of the class."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    head = Head(normal(classes, width), normal(classes))
    z = 2 * normal(samples, width)
    logits = head(z)
    predicted = logits.argmax(dim=1)
    closed = geometry.distances(z, head)
    exact = geometry.exact_distances(z, head)
    reachable = exact.isfinite()
    ratio = closed[reachable] / exact[reachable]
    gap = (1 - ratio).clamp_min(0)
    nearest_distance, nearest_class = geometry.nearest_boundary(closed)
    exact_at_nearest = exact.gather(1, nearest_class[:, None])[:, 0]

    search = _search(z, head, predicted, nearest_class, tries, generator)
    case = _Case(
        classes=classes,
        width=width,
        pairs=int(reachable.sum()),
        violation=float((ratio - 1).max().clamp_min(0)),
        nearest=float((nearest_distance / exact_at_nearest - 1).abs().max()),
        gap_mean=float(gap.mean()),
        gap_p95=float(gap.quantile(0.95)),
        equal=float((gap < 1e-9).double().mean()),
        tried=search.tried,
        found=search.found,
        beyond=search.beyond,
        broken=search.broken,
    )
    return case, _mean_gap_by_rank(closed, exact)


class _Search(NamedTuple):
    """The results of a search for points nearer than the closed form."""

    #: points
    tried: int
    #: pairs of a sample and a class with a point nearer than the closed form
    found: int
    #: share of the samples with a point just beyond it, at the nearest class
    beyond: float
    #: share of the pairs with a nearer point, for k not the predicted class
    broken: float


def _search(
    z: Tensor,
    head: Head,
    predicted: Tensor,
    nearest_class: Tensor,
    tries: int,
    generator: torch.Generator,
) -> _Search:
    """Search from about `tries` pairs of a sample and another class."""
    is_other = predicted[:, None] != torch.arange(head.num_classes)
    step = max(1, len(z) * (head.num_classes - 1) // tries)
    rows, targets = is_other.nonzero()[::step].unbind(dim=1)
    found = nearer_points(z[rows], head, predicted[rows], targets, 0.999, generator)
    beyond = nearer_points(z, head, predicted, nearest_class, 1.001, generator, tilts=(0.0,))
    # The least likely class in place of the predicted one: z lies on the wrong side of its
    # hyperplanes.
    least = head(z).argmin(dim=1)[rows]
    kept = least != targets
    broken = nearer_points(z[rows][kept], head, least[kept], targets[kept], 0.999, generator)
    return _Search(
        tried=POINTS_PER_PAIR * len(rows),
        found=int(found.sum()),
        beyond=float(beyond.double().mean()),
        broken=float(broken.double().mean()),
    )


def _mean_gap_by_rank(closed: Tensor, exact: Tensor) -> Floats:
    """(C − 1,) mean over samples of 1 − closed/exact, at the nearest class, the second nearest and
    so on; an unreachable class has the gap 1."""
    gap = (1 - closed / exact).clamp_min(0)
    # The predicted class has no distance and comes last.
    order = closed.nan_to_num(torch.inf).argsort(dim=1)[:, :-1]
    return gap.gather(1, order).nan_to_num(1.0).mean(dim=0).numpy()


TILTS = (0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 2.5)
"""Angles, in radians, between the steps of a search and the normal of the hyperplane."""
POINTS_PER_PAIR = 1 + 2 * len(TILTS)
"""One step straight to the target, and at each angle one of full and one of half length."""


def nearer_points(
    z: Tensor,
    head: Head,
    assumed: Tensor,
    targets: Tensor,
    factor: float,
    generator: torch.Generator,
    tilts: tuple[float, ...] = TILTS,
) -> Tensor:
    """(N,) whether a member of the target's region was found within `factor` times the closed form
    of z.

    Steps go from the winning class straight to the target, along the hyperplane's normal, and
    tilted from it in random directions, at the full length and half of it. `assumed` (N,) is the
    class k of the closed form, whose numerator is taken without its sign, as in the paper.
    """
    logits = head(z)
    gap = head.weight[targets] - head.weight[assumed]
    margin = logits.gather(1, assumed[:, None]) - logits.gather(1, targets[:, None])
    length = factor * margin[:, 0].abs() / torch.linalg.vector_norm(gap, dim=1)

    def reaches_target(direction: Tensor, share: float) -> Tensor:
        moved = z + share * length[:, None] * direction
        return head(moved).argmax(dim=1) == targets

    winning = logits.argmax(dim=1)
    found = reaches_target(unit(head.weight[targets] - head.weight[winning]), 1.0)
    normal = unit(gap)
    for tilt in tilts:
        random = torch.randn(z.shape, generator=generator, dtype=z.dtype)
        along_normal = (random * normal).sum(dim=1, keepdim=True)
        across = unit(random - along_normal * normal)
        direction = np.cos(tilt) * normal + np.sin(tilt) * across
        for share in (1.0, 0.5):
            found |= reaches_target(direction, share)
    return found
