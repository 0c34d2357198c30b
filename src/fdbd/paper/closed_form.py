"""How close the closed form is to the exact boundary distance, and what each way to compute the distance costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fdbd.core import geometry
from fdbd.core.batch import Head
from fdbd.paper import plot
from fdbd.paper.models import EvaluatedModel, load_models
from fdbd.paper.plot import Floats
from fdbd.paper.result import Result

OUTSIDE = "OOD sets"
EXACT, ONE, ALL = "exact projection", "attack, one pair at a time", "attack, all pairs at once"


@dataclass(frozen=True)
class CarliniWagner:
    """The targeted attack of Carlini and Wagner (2017) in feature space, which bounds a boundary distance from above:
    minimise ‖δ‖² + c · max(max_{j≠t} logit_j(z + δ) − logit_t(z + δ), 0), with Adam, c found by bisection.

    Defaults are those of the fDBD paper's appendix. There is no box around features, so δ is optimised directly.
    """

    initial_constant: float = 2.0
    rate: float = 0.005
    steps: int = 500
    searches: int = 3

    def distances(self, features: Tensor, head: Head, targets: Tensor) -> Tensor:
        """(N,) length of the shortest δ found that makes z of (N, P) a member of class targets (N,); inf for none."""
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
    """Closed form, attack on one pair at a time, attack in one batch and exact projection on the same pairs."""
    models, claimed = load_models(result), result.settings["claimed"]
    gaps: dict[str, dict[str, Floats]] = {}
    for model in models:
        result.say(f"{EXACT} for {model.title}")
        gaps[model.title] = _gaps(model, result.settings["samples"])
    summaries = {title: {name: _summary(part) for name, part in parts.items()} for title, parts in gaps.items()}
    columns = {"model": "{model}", "features": "{name}"}
    columns |= {key: f"{{{key}!p}}" for key in ("mean", "median", "p95", "maximum")}
    records = [
        {"model": title, "name": name, **summaries[title][name], "above": 100 * (part > 1e-9).mean()}
        for title, parts in gaps.items()
        for name, part in parts.items()
    ]
    note = "Relative gap of the closed form below the exact distance, percent."
    result.table({**columns, "pairs above 0": "{above:.1f}"}, records, note)
    for label, is_outside in (("ID", False), ("OOD", True)):
        some = [record for record in records if (record["name"] == OUTSIDE) == is_outside]
        means, largest = [part["mean"] for part in some], max(part["maximum"] for part in some)
        bound = f"The closed form is within {claimed:.1%} of the exact distance for {label} features"
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
    outside = torch.cat([part.rows(slice(0, samples // len(benchmark.ood))).features for part in benchmark.ood])
    sets = {benchmark.test.name: benchmark.test.rows(slice(0, samples)).features, OUTSIDE: outside}
    return {name: relative_gaps(z, benchmark.head) for name, z in sets.items()}


def _summary(gaps: Floats) -> dict[str, float]:
    p95 = float(np.quantile(gaps, 0.95))
    return {"mean": float(gaps.mean()), "median": float(np.median(gaps)), "p95": p95, "maximum": float(gaps.max())}


def _race(model: EvaluatedModel, result: Result) -> dict[str, Any]:
    """The time of each way per pair, and how their distances compare."""
    settings, head = result.settings, model.benchmark.head
    attack = CarliniWagner(**settings["attack"])
    z = model.benchmark.test.rows(slice(0, settings["samples"])).features
    geometry.exact_distances(z[:2], head)  # compiles
    classes, alone = head.num_classes - 1, settings["one_by_one"]
    seconds: dict[str, tuple[float, int]] = {}

    def timed(name: str, pairs: int, run: Callable[[], Tensor]) -> Tensor:
        result.say(f"{name}: {pairs:,} pairs")
        start = time.perf_counter()
        found = run()
        seconds[name] = time.perf_counter() - start, pairs
        return found

    def one_by_one() -> Tensor:
        return torch.cat([attack.distances(z[samples[n], None], head, targets[n, None]) for n in range(alone)])

    timed("closed form", len(z) * classes, lambda: geometry.distances(z, head))
    exact = timed(EXACT, len(z) * classes, lambda: geometry.exact_distances(z, head))
    samples, targets = _pairs(z, head, settings["attacked"])
    found = timed(ALL, len(samples), lambda: attack.distances(z[samples], head, targets))
    single = timed(ONE, alone, one_by_one)
    times = {name: total / count for name, (total, count) in seconds.items()}
    success, took = float(found.isfinite().double().mean()), seconds[EXACT][0]
    true, closed = exact[samples, targets], _in_double(z, head)[samples, targets]
    reached = found.isfinite() & true.isfinite()
    true, closed, attacked = true[reached], closed[reached], found.double()[reached]
    excess, spread = attacked / true - 1, attacked / closed - 1
    result.table(
        {"method": "{name}", "pairs": "{pairs:,}", "µs per pair": "{micro:.3g}"},
        ({"name": name, "pairs": seconds[name][1], "micro": time * 1e6} for name, time in times.items()),
        f"{model.title}; attack: constant {attack.initial_constant}, rate {attack.rate}, {attack.steps} steps, "
        f"{attack.searches} searches; success {success:.1%}; on average {float(excess.mean()):.2%} above the exact "
        f"distance and {float(spread.mean()):.2%} above the closed form.",
        title="Time per pair of sample and class",
    )
    tolerance = 1 + 1e-5  # the attack computes in float32
    ordered = bool((closed <= true * tolerance).all() and (true <= attacked * tolerance).all())
    result.check("closed form ≤ exact distance ≤ attack, for every pair", ordered, f"{len(true):,} pairs.")
    result.check("The attack succeeds on nearly all pairs", success > 0.99, f"{success:.1%}.")
    statement = f"Exact projection of {len(z):,} samples × {classes} classes takes less than 1 s"
    result.check(statement, took < 1, f"{took:.3f} s.")
    ratio, batched = (times[name] / times[EXACT] for name in (ONE, ALL))
    statement = "A pair is projected at least 1,000 times faster than it is attacked alone"
    result.check(statement, ratio >= 1000, f"{ratio:,.0f} times; against the batched attack {batched:,.0f} times.")
    return {
        "samples": len(z),
        "classes": classes,
        "seconds per pair": times,
        "exact seconds": took,
        "success": success,
        "attack above exact": {"mean": float(excess.mean()), "median": float(excess.median())},
        "attack above closed form": {"mean": float(spread.mean()), "median": float(spread.median())},
        "largest difference of single and batched": float((single - found[: len(single)]).nan_to_num(0).abs().max()),
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
            ordered, share = 100 * np.sort(part), 100 * (np.arange(len(part)) + 1) / len(part)
            thin = np.unique(np.linspace(0, len(ordered) - 1, 400).astype(int))
            axis.plot(share[thin], ordered[thin], color=next(colours), label=f"{title}, {name}")
    axis.axhline(1.5, color=plot.GREY, ls=":", lw=1)
    axis.text(2, 1.7, "1.5 %, the paper's bound", fontsize=8, color="#666666")
    plot.label(axis, "share of pairs with a smaller gap, percent", "gap of the closed form, percent", legend=8)
    times = result.data["seconds per pair"]
    places = np.arange(len(times))[::-1]
    bars.barh(places, [1e6 * value for value in times.values()], color=plot.INSIDE, height=0.6)
    bars.set_yticks(places, list(times), fontsize=8)
    plot.label(bars, "µs per pair of sample and class", log="x")
