"""The closed form of the boundary distance: how close it is to the exact one and what each way
costs; and Theorem 3.2, by which it is a lower bound that is equal at the nearest class."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fdbd import geometry
from fdbd.bench.figures import Floats
from fdbd.core.batch import Head
from fdbd.core.linear_algebra import unit
from fdbd.metrics import as_percent
from fdbd.paper import plot
from fdbd.paper.models import EvaluatedModel, load_models
from fdbd.paper.result import Result

OUTSIDE = "OOD sets"
EXACT, ONE, ALL = "exact projection", "attack, one pair at a time", "attack, all pairs at once"


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
        weight, bias = head.weight.to(features), head.bias.to(features)
        constant = torch.full((count,), self.initial_constant, dtype=features.dtype)
        low, high = torch.zeros_like(constant), torch.full_like(constant, torch.inf)
        best = torch.full_like(constant, torch.inf)
        target = torch.nn.functional.one_hot(targets, head.num_classes).bool()
        for _ in range(self.searches):
            delta = torch.zeros_like(features, requires_grad=True)
            optimiser = torch.optim.Adam([delta], lr=self.rate)
            reached = torch.zeros(count, dtype=torch.bool)
            for _ in range(self.steps):
                logits = (features + delta) @ weight.T + bias
                others = logits.masked_fill(target, -torch.inf).amax(dim=1)
                gap = others - logits.gather(1, targets[:, None])[:, 0]
                length = delta.square().sum(dim=1)
                with torch.no_grad():
                    inside = gap <= 0
                    reached |= inside
                    best = torch.where(inside, torch.minimum(best, length.sqrt()), best)
                optimiser.zero_grad()
                (length + constant * gap.clamp_min(0)).sum().backward()
                optimiser.step()
            high = torch.where(reached, torch.minimum(high, constant), high)
            low = torch.where(reached, low, torch.maximum(low, constant))
            constant = torch.where(high.isfinite(), (low + high) / 2, 10 * constant)
        return best.detach()


def closed_form(result: Result) -> None:
    """Closed form, attack on one pair at a time, attack in one batch and exact projection on the
    same pairs."""
    models, claimed = load_models(result), result.settings["claimed"]
    gaps: dict[str, dict[str, Floats]] = {}
    for model in models:
        result.say(f"{EXACT} for {model.title}")
        gaps[model.title] = _gaps(model, result.settings["samples"])
    summaries = {
        title: {name: _summary(part) for name, part in parts.items()}
        for title, parts in gaps.items()
    }
    rows = [
        [
            title,
            name,
            *map(as_percent, summaries[title][name].values()),
            f"{100 * (part > 1e-9).mean():.1f}",
        ]
        for title, parts in gaps.items()
        for name, part in parts.items()
    ]
    columns = ["model", "features", "mean", "median", "p95", "maximum", "pairs above 0"]
    result.table(
        columns, rows, "Relative gap of the closed form below the exact distance, percent."
    )
    for label, is_outside in (("ID", False), ("OOD", True)):
        some = [
            part
            for parts in summaries.values()
            for name, part in parts.items()
            if (name == OUTSIDE) == is_outside
        ]
        means, largest = [part["mean"] for part in some], max(part["maximum"] for part in some)
        bound = (
            f"The closed form is within {claimed:.1%} of the exact distance for {label} features"
        )
        measured = f"Mean gap between {min(means):.2%} and {max(means):.2%}."
        result.check(f"{bound}, on average over pairs", max(means) < claimed, measured)
        result.check(f"{bound}, for every pair", largest < claimed, f"Largest gap {largest:.1%}.")
    result.data = {"gap": summaries, **_race(models[0], result)}
    _draw(gaps, result)


def relative_gaps(features: Tensor, head: Head) -> Floats:
    """(pairs,) 1 − closed/exact over all samples and reachable classes."""
    exact, closed = geometry.exact_distances(features, head), _in_double(features, head)
    reachable = exact.isfinite() & (exact > 0)
    return (1 - closed[reachable] / exact[reachable]).clamp_min(0).numpy()


def _in_double(features: Tensor, head: Head) -> Tensor:
    return geometry.distances(features.double(), Head(head.weight.double(), head.bias.double()))


def _gaps(model: EvaluatedModel, samples: int) -> dict[str, Floats]:
    benchmark = model.benchmark
    outside = torch.cat(
        [part.rows(slice(0, samples // len(benchmark.ood))).features for part in benchmark.ood]
    )
    sets = {benchmark.test.name: benchmark.test.rows(slice(0, samples)).features, OUTSIDE: outside}
    return {name: relative_gaps(z, benchmark.head) for name, z in sets.items()}


def _summary(gaps: Floats) -> dict[str, float]:
    median, p95, maximum = map(float, np.quantile(gaps, [0.5, 0.95, 1]))
    return {"mean": float(gaps.mean()), "median": median, "p95": p95, "maximum": maximum}


def _race(model: EvaluatedModel, result: Result) -> dict[str, Any]:
    """The time of each way per pair, and how their distances compare."""
    settings, head = result.settings, model.benchmark.head
    attack = CarliniWagner(**settings["attack"])
    z = model.benchmark.test.rows(slice(0, settings["samples"])).features
    geometry.exact_distances(z[:2], head)  # compiles
    classes, alone = head.num_classes - 1, settings["one_by_one"]
    samples, targets = _pairs(z, head, settings["attacked"])
    single = [(z[samples[n], None], head, targets[n, None]) for n in range(alone)]
    ways: dict[str, tuple[int, Callable[[], Tensor]]] = {
        "closed form": (len(z) * classes, lambda: geometry.distances(z, head)),
        EXACT: (len(z) * classes, lambda: geometry.exact_distances(z, head)),
        ALL: (len(samples), lambda: attack.distances(z[samples], head, targets)),
        ONE: (alone, lambda: torch.cat([attack.distances(*pair) for pair in single])),
    }
    found, seconds = {}, {}
    for name, (pairs, run) in ways.items():
        result.say(f"{name}: {pairs:,} pairs")
        start = time.perf_counter()
        found[name] = run()
        seconds[name] = time.perf_counter() - start
    times = {name: seconds[name] / pairs for name, (pairs, _) in ways.items()}
    true, closed, attacked = (
        found[EXACT][samples, targets],
        _in_double(z, head)[samples, targets],
        found[ALL].double(),
    )
    success = float(attacked.isfinite().double().mean())
    reached = attacked.isfinite() & true.isfinite()
    true, closed, attacked = true[reached], closed[reached], attacked[reached]
    excess, spread = attacked / true - 1, attacked / closed - 1
    result.table(
        ["method", "pairs", "µs per pair"],
        [[name, f"{pairs:,}", f"{times[name] * 1e6:.3g}"] for name, (pairs, _) in ways.items()],
        f"{model.title}; attack: constant {attack.initial_constant}, rate {attack.rate}, {attack.steps} steps, "
        f"{attack.searches} searches; success {success:.1%}; on average {float(excess.mean()):.2%} above the exact "
        f"distance and {float(spread.mean()):.2%} above the closed form.",
        title="Time per pair of sample and class",
    )
    tolerance = 1 + 1e-5  # the attack computes in float32
    ordered = bool((closed <= true * tolerance).all() and (true <= attacked * tolerance).all())
    result.check(
        "closed form ≤ exact distance ≤ attack, for every pair", ordered, f"{len(true):,} pairs."
    )
    result.check("The attack succeeds on nearly all pairs", success > 0.99, f"{success:.1%}.")
    statement = f"Exact projection of {len(z):,} samples × {classes} classes takes less than 1 s"
    result.check(statement, seconds[EXACT] < 1, f"{seconds[EXACT]:.3f} s.")
    ratio, batched = (times[name] / times[EXACT] for name in (ONE, ALL))
    statement = "A pair is projected at least 1,000 times faster than it is attacked alone"
    result.check(
        statement,
        ratio >= 1000,
        f"{ratio:,.0f} times; against the batched attack {batched:,.0f} times.",
    )
    return {
        "samples": len(z),
        "classes": classes,
        "seconds per pair": times,
        "exact seconds": seconds[EXACT],
        "success": success,
        "attack above exact": {"mean": float(excess.mean()), "median": float(excess.median())},
        "attack above closed form": {
            "mean": float(spread.mean()),
            "median": float(spread.median()),
        },
        "largest difference of single and batched": float(
            (found[ONE] - found[ALL][:alone]).nan_to_num(0).abs().max()
        ),
    }


def _pairs(z: Tensor, head: Head, count: int) -> tuple[Tensor, Tensor]:
    """Samples and target classes of `count` pairs, spread over samples and classes."""
    predicted = head(z).argmax(dim=1)
    samples, targets = (predicted[:, None] != torch.arange(head.num_classes)).nonzero(as_tuple=True)
    chosen = torch.arange(min(count, len(samples))) * len(samples) // min(count, len(samples))
    return samples[chosen], targets[chosen]


def _draw(gaps: Mapping[str, Mapping[str, Floats]], result: Result) -> None:
    axis, bars = result.axes(9, 3.2, 1, 2)[0]
    colours = iter((plot.INSIDE, plot.OUTSIDE, *plot.COLOURS[1:]))
    for title, parts in gaps.items():
        for name, part in parts.items():
            shares = np.linspace(0, 1, 400)
            axis.plot(
                100 * shares,
                100 * np.quantile(part, shares),
                color=next(colours),
                label=f"{title}, {name}",
            )
    axis.axhline(1.5, color=plot.GREY, ls=":", lw=1)
    axis.text(2, 1.7, "1.5 %, the paper's bound", fontsize=8, color="#666666")
    plot.label(
        axis,
        "share of pairs with a smaller gap, percent",
        "gap of the closed form, percent",
        legend=8,
    )
    times = result.data["seconds per pair"]
    places = np.arange(len(times))[::-1]
    bars.barh(places, [1e6 * value for value in times.values()], color=plot.INSIDE, height=0.6)
    bars.set_yticks(places, list(times), fontsize=8)
    plot.label(bars, "µs per pair of sample and class", log="x")


def theorem(result: Result) -> None:
    """Random heads over class counts and dimensions: bound, equality, and a search for a nearer
    point."""
    settings, tolerance = result.settings, 1e-9
    generator = torch.Generator().manual_seed(settings["seed"])
    cases, ranks, rows = [], {}, []
    for classes, width in settings["sizes"]:
        result.say(f"{classes} classes in {width} dimensions")
        case, by_rank = _case(classes, width, settings["samples"], settings["tries"], generator)
        cases.append(case)
        ranks[f"C = {classes}, P = {width}"] = 100 * by_rank
        shares = (f"{case[key]:.2%}" for key in ("gap_mean", "gap_p95", "equal"))
        rows.append(
            [f"{classes}", f"{width}", f"{case['pairs']:,}", f"{case['violation']:.1e}", *shares]
        )
    columns = ["C", "P", "pairs", "largest violation", "mean gap", "p95 gap", "pairs with equality"]
    note = "Gap: 1 − closed form / exact distance. Violation: how far the closed form exceeds it, relative."
    result.table(columns, rows, note)
    of = {key: [case[key] for case in cases] for key in cases[0]}
    excess, difference, beyond, broken = (
        max(of["violation"]),
        max(of["nearest"]),
        min(of["beyond"]),
        of["broken"],
    )
    measured = f"{sum(of['pairs']):,} pairs, largest relative excess {excess:.1e}."
    result.check("The closed form is never above the exact distance", excess <= tolerance, measured)
    measured = f"Largest relative difference {difference:.1e}."
    result.check("At the nearest class the two are equal", difference <= tolerance, measured)
    statement = "A search finds no member of a class's region nearer than the closed form"
    result.check(statement, not any(of["found"]), f"{sum(of['tried']):,} points tried.")
    statement = (
        "The search works: just beyond the bound it finds members of the nearest class's region"
    )
    result.check(statement, beyond > 0.999, f"For {beyond:.1%} of the samples or more.")
    statement = "Without the assumption that k is the predicted class the bound fails, and the search finds that"
    result.check(
        statement, min(broken) > 0, f"In {min(broken):.1%} to {max(broken):.1%} of the pairs."
    )
    result.notes = [
        "The bound is tight at the nearest class alone; at the others the gaps of the table are left."
    ]
    result.data = {"cases": cases}
    axis = result.axes(7, 3.6)[0, 0]
    plot.curves(axis, None, ranks)
    x, y = (
        "rank of the class by its closed-form distance (1: nearest)",
        "mean gap below the exact distance, percent",
    )
    plot.label(axis, x, y, legend=8, log="x")


def _case(
    classes: int, width: int, samples: int, tries: int, generator: torch.Generator
) -> tuple[dict[str, Any], Floats]:
    """What was found for one random head, and the mean gap by the rank of the class."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    head, z = Head(normal(classes, width), normal(classes)), 2 * normal(samples, width)
    logits = head(z)
    predicted = logits.argmax(dim=1)
    closed, exact = geometry.distances(z, head), geometry.exact_distances(z, head)
    reachable = exact.isfinite()
    ratio = closed[reachable] / exact[reachable]
    nearest, target = geometry.nearest_boundary(closed)
    gap = (1 - ratio).clamp_min(0)
    every = (predicted[:, None] != torch.arange(classes)).nonzero()[
        :: max(1, samples * (classes - 1) // tries)
    ]
    rows, targets = every.unbind(dim=1)
    # The least likely class in place of the predicted one: z lies on the wrong side of its
    # hyperplanes.
    least = logits.argmin(dim=1)[rows]
    kept = least != targets
    by_rank = (
        (1 - closed / exact)
        .clamp_min(0)
        .gather(1, closed.nan_to_num(torch.inf).argsort(dim=1)[:, :-1])
    )
    found = nearer_points(z[rows], head, predicted[rows], targets, 0.999, generator)
    beyond = nearer_points(z, head, predicted, target, 1.001, generator, tilts=(0.0,))
    broken = nearer_points(z[rows][kept], head, least[kept], targets[kept], 0.999, generator)
    case = {
        "classes": classes,
        "width": width,
        "pairs": int(reachable.sum()),
        "violation": float((ratio - 1).max().clamp_min(0)),
        "nearest": float((nearest / exact.gather(1, target[:, None])[:, 0] - 1).abs().max()),
        "gap_mean": float(gap.mean()),
        "gap_p95": float(gap.quantile(0.95)),
        "equal": float((gap < 1e-9).double().mean()),
        "tried": 17 * len(rows),
        "found": int(found.sum()),
        "beyond": float(beyond.double().mean()),
        "broken": float(broken.double().mean()),
    }
    return case, by_rank.nan_to_num(1.0).mean(dim=0).numpy()


def nearer_points(
    z: Tensor,
    head: Head,
    assumed: Tensor,
    targets: Tensor,
    factor: float,
    generator: torch.Generator,
    tilts: tuple[float, ...] = (0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 2.5),
) -> Tensor:
    """(N,) whether a member of the target's region was found within `factor` times the closed form
    of z.

    Steps go from the winning class straight to the target, along the hyperplane's normal, and
    tilted from it in random directions, at the full length and half of it. `assumed` (N,) is the
    class k of the closed form, whose numerator is taken by its amount as the paper prints it.
    """
    gap = head.weight[targets] - head.weight[assumed]
    logits = head(z)
    numerator = (logits.gather(1, assumed[:, None]) - logits.gather(1, targets[:, None]))[
        :, 0
    ].abs()
    length = factor * numerator / torch.linalg.vector_norm(gap, dim=1)
    normal, straight = unit(gap), unit(head.weight[targets] - head.weight[logits.argmax(dim=1)])
    found = head(z + length[:, None] * straight).argmax(dim=1) == targets
    for tilt in tilts:
        across = torch.randn(z.shape, generator=generator, dtype=z.dtype)
        across = unit(across - (across * normal).sum(dim=1, keepdim=True) * normal)
        direction = np.cos(tilt) * normal + np.sin(tilt) * across
        for share in (1.0, 0.5):
            found |= head(z + share * length[:, None] * direction).argmax(dim=1) == targets
    return found
