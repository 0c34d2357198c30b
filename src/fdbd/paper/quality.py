"""How good the closed-form distance is, and what it costs: against the attack and against the exact projection."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fdbd.core import geometry
from fdbd.core.batch import Head
from fdbd.paper import plot
from fdbd.paper.attack import CarliniWagner
from fdbd.paper.experiment import Experiment
from fdbd.paper.finding import Check, Finding, Table, check
from fdbd.paper.kinds import Say
from fdbd.paper.subject import Subject, stand_ins, subjects


def distance_quality(experiment: Experiment, say: Say) -> Finding:
    """Closed form, attack one pair at a time, attack in one batch and exact projection on the same pairs."""
    settings = experiment.settings
    found, missing = subjects(experiment, say)
    finding = Finding(missing=missing, notes=stand_ins(found))
    errors: dict[str, Any] = {}
    for subject in found:
        say(f"exact projection for {subject.title}")
        errors[subject.title] = _gaps(subject, settings["samples"])
    rows = [
        [title, name, *(f"{100 * value:.2f}" for value in _summary(part).values()), f"{100 * (part > 1e-9).mean():.1f}"]
        for title, parts in errors.items()
        for name, part in parts.items()
    ]
    columns = ["model", "features", "mean", "median", "p95", "maximum", "pairs above 0"]
    gaps = Table(
        experiment.title, columns, rows, ["Relative gap of the closed form below the exact distance, percent."]
    )
    timing, speed, attacked = _race(found[0], settings, say)
    finding.tables = [gaps, timing]
    means = [float(part.mean()) for parts in errors.values() for part in parts.values()]
    finding.checks = [
        check(
            f"The closed form is within {settings['claimed']:.1%} of the exact distance, on average over pairs",
            max(means) < settings["claimed"],
            f"Mean gap between {min(means):.2%} and {max(means):.2%}.",
        ),
        check(
            f"It is within {settings['claimed']:.1%} for every pair",
            all((part < settings["claimed"]).all() for parts in errors.values() for part in parts.values()),
            f"Largest gap {max(float(part.max()) for parts in errors.values() for part in parts.values()):.1%}.",
        ),
        *_race_checks(speed, attacked),
    ]
    finding.data = {
        "gap": {title: {name: _summary(part) for name, part in parts.items()} for title, parts in errors.items()},
        **speed,
    }
    finding.figure = _figure(errors, speed)
    return finding


def relative_gaps(features: Tensor, head: Head) -> np.ndarray[Any, Any]:
    """(pairs,) 1 − closed/exact over all samples and reachable classes."""
    exact = geometry.exact_distances(features, head)
    closed = geometry.distances(features.double(), Head(head.weight.double(), head.bias.double()))
    reachable = exact.isfinite() & (exact > 0)
    gaps: np.ndarray[Any, Any] = (1 - closed[reachable] / exact[reachable]).clamp_min(0).numpy()
    return gaps


def _gaps(subject: Subject, samples: int) -> dict[str, np.ndarray[Any, Any]]:
    benchmark = subject.benchmark
    outside = torch.cat([part.rows(slice(0, samples // len(benchmark.ood))).features for part in benchmark.ood])
    sets = {benchmark.test.name: benchmark.test.rows(slice(0, samples)).features, "OOD sets": outside}
    return {name: relative_gaps(z, benchmark.head) for name, z in sets.items()}


def _summary(gaps: np.ndarray[Any, Any]) -> dict[str, float]:
    p95 = float(np.quantile(gaps, 0.95))
    return {"mean": float(gaps.mean()), "median": float(np.median(gaps)), "p95": p95, "maximum": float(gaps.max())}


def _race(subject: Subject, settings: Any, say: Say) -> tuple[Table, dict[str, Any], dict[str, Tensor]]:
    head, test = subject.benchmark.head, subject.benchmark.test
    attack = CarliniWagner(**settings["attack"])
    z = test.rows(slice(0, settings["samples"])).features
    geometry.exact_distances(z[:2], head)  # compiles
    classes = head.num_classes - 1
    speed: dict[str, Any] = {"samples": len(z), "classes": classes}
    seconds: dict[str, tuple[float, int]] = {}

    start = time.perf_counter()
    geometry.distances(z, head)
    seconds["closed form"] = time.perf_counter() - start, len(z) * classes
    start = time.perf_counter()
    exact = geometry.exact_distances(z, head)
    seconds["exact projection"] = time.perf_counter() - start, len(z) * classes

    samples, targets = _pairs(z, head, settings["attacked"])
    say(f"attack on {len(samples):,} pairs at once")
    start = time.perf_counter()
    batched = attack.distances(z[samples], head, targets)
    seconds["attack, all pairs at once"] = time.perf_counter() - start, len(samples)
    single = []
    start = time.perf_counter()
    for number in range(settings["one_by_one"]):
        say(f"attack on one pair, {number + 1} of {settings['one_by_one']}")
        single.append(attack.distances(z[samples[number], None], head, targets[number, None])[0])
    seconds["attack, one pair at a time"] = time.perf_counter() - start, len(single)

    true = exact[samples, targets]
    closed = geometry.distances(z.double(), Head(head.weight.double(), head.bias.double()))[samples, targets]
    attacked = {"closed": closed, "exact": true, "attack": batched.double()}
    success = batched.isfinite()
    excess = (batched.double() / true - 1)[success & true.isfinite()]
    spread = (batched.double() / closed - 1)[success & true.isfinite()]
    speed |= {
        "seconds a pair": {name: total / count for name, (total, count) in seconds.items()},
        "exact seconds": seconds["exact projection"][0],
        "success": float(success.double().mean()),
        "attack above exact": {"mean": float(excess.mean()), "median": float(excess.median())},
        "attack above closed form": {"mean": float(spread.mean()), "median": float(spread.median())},
        "largest difference of single and batched": float(
            (torch.stack(single) - batched[: len(single)]).nan_to_num(0).abs().max()
        ),
    }
    rows = [[name, f"{count:,}", f"{total / count * 1e6:.3g}"] for name, (total, count) in seconds.items()]
    notes = [
        f"{subject.title}; attack: constant {attack.initial_constant}, rate {attack.rate}, {attack.steps} steps, "
        f"{attack.searches} searches; success {speed['success']:.1%}; on average "
        f"{speed['attack above exact']['mean']:.2%} above the exact distance and "
        f"{speed['attack above closed form']['mean']:.2%} above the closed form."
    ]
    return Table("Time a pair of sample and class", ["method", "pairs", "µs a pair"], rows, notes), speed, attacked


def _pairs(z: Tensor, head: Head, count: int) -> tuple[Tensor, Tensor]:
    """Samples and target classes of `count` pairs, spread over samples and classes."""
    predicted = head(z).argmax(dim=1)
    samples, targets = (predicted[:, None] != torch.arange(head.num_classes)).nonzero(as_tuple=True)
    chosen = torch.arange(min(count, len(samples))) * len(samples) // min(count, len(samples))
    return samples[chosen], targets[chosen]


def _race_checks(speed: dict[str, Any], attacked: dict[str, Tensor]) -> list[Check]:
    times = speed["seconds a pair"]
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


def _figure(errors: dict[str, Any], speed: dict[str, Any]) -> Any:
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
    axis.set_xlabel("share of pairs with a smaller gap, percent", fontsize=9)
    axis.set_ylabel("gap of the closed form, percent", fontsize=9)
    axis.legend(fontsize=8, frameon=False)
    times = speed["seconds a pair"]
    axis = axes[0, 1]
    places = np.arange(len(times))[::-1]
    axis.barh(places, [1e6 * value for value in times.values()], color=plot.INSIDE, height=0.6)
    axis.set_xscale("log")
    axis.set_yticks(places, list(times), fontsize=8)
    axis.set_xlabel("µs a pair of sample and class", fontsize=9)
    return drawn
