"""How close the closed form is to the exact boundary distance, and what each way to compute the distance costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fdbd.core import geometry
from fdbd.core.batch import Head
from fdbd.paper import plot
from fdbd.paper.attack import CarliniWagner
from fdbd.paper.experiment import Experiment, Say
from fdbd.paper.models import EvaluatedModel, load_models
from fdbd.paper.plot import Floats
from fdbd.paper.result import Check, Result, check
from fdbd.paper.table import Table

OUTSIDE = "OOD sets"


def closed_form(experiment: Experiment, say: Say) -> Result:
    """Closed form, attack on one pair at a time, attack in one batch and exact projection on the same pairs."""
    settings = experiment.settings
    models, result = load_models(experiment, say)
    gaps: dict[str, dict[str, Floats]] = {}
    for model in models:
        say(f"exact projection for {model.title}")
        gaps[model.title] = _gaps(model, settings["samples"])
    rows = [
        [title, name, *(f"{100 * value:.2f}" for value in _summary(part).values()), f"{100 * (part > 1e-9).mean():.1f}"]
        for title, parts in gaps.items()
        for name, part in parts.items()
    ]
    columns = ["model", "features", "mean", "median", "p95", "maximum", "pairs above 0"]
    notes = ["Relative gap of the closed form below the exact distance, percent."]
    timing, speed, attacked = _race(models[0], settings, say)
    result.tables = [Table(experiment.title, columns, rows, notes), timing]
    result.checks = [*_gap_checks(gaps, settings["claimed"]), *_race_checks(speed, attacked)]
    summaries = {title: {name: _summary(part) for name, part in parts.items()} for title, parts in gaps.items()}
    result.data = {"gap": summaries, **speed}
    result.figure = _figure(gaps, speed)
    return result


def _gap_checks(gaps: Mapping[str, Mapping[str, Floats]], claimed: float) -> list[Check]:
    """The claim for ID and for OOD features, on average over the pairs of each model and for every pair."""
    checks = []
    for label, is_outside in (("ID", False), ("OOD", True)):
        parts = [part for by_set in gaps.values() for name, part in by_set.items() if (name == OUTSIDE) == is_outside]
        means, largest = [float(part.mean()) for part in parts], max(float(part.max()) for part in parts)
        bound = f"The closed form is within {claimed:.1%} of the exact distance for {label} features"
        measured = f"Mean gap between {min(means):.2%} and {max(means):.2%}."
        checks.append(check(f"{bound}, on average over pairs", max(means) < claimed, measured))
        checks.append(check(f"{bound}, for every pair", largest < claimed, f"Largest gap {largest:.1%}."))
    return checks


def relative_gaps(features: Tensor, head: Head) -> Floats:
    """(pairs,) 1 − closed/exact over all samples and reachable classes."""
    exact = geometry.exact_distances(features, head)
    closed = geometry.distances(features.double(), Head(head.weight.double(), head.bias.double()))
    reachable = exact.isfinite() & (exact > 0)
    return (1 - closed[reachable] / exact[reachable]).clamp_min(0).numpy()


def _gaps(model: EvaluatedModel, samples: int) -> dict[str, Floats]:
    benchmark = model.benchmark
    outside = torch.cat([part.rows(slice(0, samples // len(benchmark.ood))).features for part in benchmark.ood])
    sets = {benchmark.test.name: benchmark.test.rows(slice(0, samples)).features, OUTSIDE: outside}
    return {name: relative_gaps(z, benchmark.head) for name, z in sets.items()}


def _summary(gaps: Floats) -> dict[str, float]:
    p95 = float(np.quantile(gaps, 0.95))
    return {"mean": float(gaps.mean()), "median": float(np.median(gaps)), "p95": p95, "maximum": float(gaps.max())}


def _race(
    model: EvaluatedModel, settings: Mapping[str, Any], say: Say
) -> tuple[Table, dict[str, Any], dict[str, Tensor]]:
    head, test = model.benchmark.head, model.benchmark.test
    attack = CarliniWagner(**settings["attack"])
    z = test.rows(slice(0, settings["samples"])).features
    geometry.exact_distances(z[:2], head)  # compiles
    classes = head.num_classes - 1
    speed: dict[str, Any] = {"samples": len(z), "classes": classes}
    seconds: dict[str, tuple[float, int]] = {}

    def timed(name: str, pairs: int, run: Callable[[], Tensor]) -> Tensor:
        say(f"{name}: {pairs:,} pairs")
        start = time.perf_counter()
        found = run()
        seconds[name] = time.perf_counter() - start, pairs
        return found

    def one_by_one() -> Tensor:
        chosen = range(settings["one_by_one"])
        return torch.cat([attack.distances(z[samples[n], None], head, targets[n, None]) for n in chosen])

    timed("closed form", len(z) * classes, lambda: geometry.distances(z, head))
    exact = timed("exact projection", len(z) * classes, lambda: geometry.exact_distances(z, head))
    samples, targets = _pairs(z, head, settings["attacked"])
    attack_all = "attack, all pairs at once"
    batched = timed(attack_all, len(samples), lambda: attack.distances(z[samples], head, targets))
    single = timed("attack, one pair at a time", settings["one_by_one"], one_by_one)

    true = exact[samples, targets]
    closed = geometry.distances(z.double(), Head(head.weight.double(), head.bias.double()))[samples, targets]
    attacked = {"closed": closed, "exact": true, "attack": batched.double()}
    success = batched.isfinite()
    excess = (batched.double() / true - 1)[success & true.isfinite()]
    spread = (batched.double() / closed - 1)[success & true.isfinite()]
    speed |= {
        "seconds per pair": {name: total / count for name, (total, count) in seconds.items()},
        "exact seconds": seconds["exact projection"][0],
        "success": float(success.double().mean()),
        "attack above exact": {"mean": float(excess.mean()), "median": float(excess.median())},
        "attack above closed form": {"mean": float(spread.mean()), "median": float(spread.median())},
        "largest difference of single and batched": float((single - batched[: len(single)]).nan_to_num(0).abs().max()),
    }
    rows = [[name, f"{count:,}", f"{total / count * 1e6:.3g}"] for name, (total, count) in seconds.items()]
    notes = [
        f"{model.title}; attack: constant {attack.initial_constant}, rate {attack.rate}, {attack.steps} steps, "
        f"{attack.searches} searches; success {speed['success']:.1%}; on average "
        f"{speed['attack above exact']['mean']:.2%} above the exact distance and "
        f"{speed['attack above closed form']['mean']:.2%} above the closed form."
    ]
    return Table("Time per pair of sample and class", ["method", "pairs", "µs per pair"], rows, notes), speed, attacked


def _pairs(z: Tensor, head: Head, count: int) -> tuple[Tensor, Tensor]:
    """Samples and target classes of `count` pairs, spread over samples and classes."""
    predicted = head(z).argmax(dim=1)
    samples, targets = (predicted[:, None] != torch.arange(head.num_classes)).nonzero(as_tuple=True)
    chosen = torch.arange(min(count, len(samples))) * len(samples) // min(count, len(samples))
    return samples[chosen], targets[chosen]


def _race_checks(speed: dict[str, Any], attacked: dict[str, Tensor]) -> list[Check]:
    times = speed["seconds per pair"]
    ratio, batched = (
        times[name] / times["exact projection"] for name in ("attack, one pair at a time", "attack, all pairs at once")
    )
    tolerance = 1 + 1e-5  # the attack computes in float32
    found = attacked["attack"].isfinite() & attacked["exact"].isfinite()
    closed, exact, attack = (attacked[key][found] for key in ("closed", "exact", "attack"))
    ordered = bool((closed <= exact * tolerance).all() and (exact <= attack * tolerance).all())
    return [
        check("closed form ≤ exact distance ≤ attack, for every pair", ordered, f"{int(found.sum()):,} pairs."),
        check("The attack succeeds on nearly all pairs", speed["success"] > 0.99, f"{speed['success']:.1%}."),
        check(
            f"Exact projection of {speed['samples']:,} samples × {speed['classes']} classes takes less than 1 s",
            speed["exact seconds"] < 1,
            f"{speed['exact seconds']:.3f} s.",
        ),
        check(
            "A pair is projected at least 1,000 times faster than it is attacked alone",
            ratio >= 1000,
            f"{ratio:,.0f} times; against the batched attack {batched:,.0f} times.",
        ),
    ]


def _figure(errors: Mapping[str, Mapping[str, Floats]], speed: Mapping[str, Any]) -> Any:
    drawn, axes = plot.figure(9, 3.2, 1, 2)
    axis = axes[0, 0]
    colours = iter((plot.INSIDE, plot.OUTSIDE, *plot.COLOURS[1:]))
    for title, parts in errors.items():
        for name, gaps in parts.items():
            ordered = 100 * np.sort(gaps)
            share = 100 * (np.arange(len(ordered)) + 1) / len(ordered)
            thin = np.unique(np.linspace(0, len(ordered) - 1, 400).astype(int))
            axis.plot(share[thin], ordered[thin], color=next(colours), label=f"{title}, {name}")
    axis.axhline(1.5, color="#888888", ls=":", lw=1)
    axis.text(2, 1.7, "1.5 %, the paper's bound", fontsize=8, color="#666666")
    plot.label(axis, "share of pairs with a smaller gap, percent", "gap of the closed form, percent", legend=8)
    times = speed["seconds per pair"]
    axis = axes[0, 1]
    places = np.arange(len(times))[::-1]
    axis.barh(places, [1e6 * value for value in times.values()], color=plot.INSIDE, height=0.6)
    axis.set_xscale("log")
    axis.set_yticks(places, list(times), fontsize=8)
    plot.label(axis, "µs per pair of sample and class")
    return drawn
