"""The proposition on regularisation: conditioning on the deviation can only raise the KL divergence of ID from OOD."""

from __future__ import annotations

from typing import Any

import numpy as np

from fdbd.paper import plot
from fdbd.paper.experiment import Experiment, Say
from fdbd.paper.models import load_models
from fdbd.paper.plot import Floats
from fdbd.paper.result import Result, check
from fdbd.paper.table import Table


def kl(first: Floats, second: Floats) -> float:
    """Kullback-Leibler divergence in nats of two arrays of probabilities of one shape."""
    used = first > 0
    with np.errstate(divide="ignore"):
        return float((first[used] * np.log(first[used] / second[used])).sum())


def sides(inside: Floats, outside: Floats) -> tuple[float, float]:
    """D(f_y‖g_y) and D(f_{y|x}‖g_{y|x}), averaged over f_x, of joint tables (x, y)."""
    marginal = kl(inside.sum(axis=0), outside.sum(axis=0))
    return marginal, kl(inside, outside) - kl(inside.sum(axis=1), outside.sum(axis=1))


def proposition_kl(experiment: Experiment, say: Say) -> Result:
    """Random joint tables with and without equal x-marginals, and the features of the model."""
    settings = experiment.settings
    random = np.random.default_rng(settings["seed"])
    say("random joint distributions")
    equal = [_random_sides(random, True) for _ in range(settings["tables"])]
    unequal = [_random_sides(random, False) for _ in range(settings["tables"])]
    (model, *_), result = load_models(experiment, say)
    say("joint histograms of the features")
    measured = _of_features(model.distances_and_deviations(), settings["bins"])
    rows = [
        [name, *(f"{value[key]:.3f}" for key in ("x", "y", "conditional", "ratio"))] for name, value in measured.items()
    ]
    columns = ["OOD set", "D of the deviation x", "D of the distance y", "D of y given x", "D of y/x"]
    note = f"Kullback-Leibler divergence of ID from OOD in nats, from histograms of {settings['bins']} quantile bins."
    result.tables = [Table(experiment.title, columns, rows, [note])]
    excess = [left - right for left, right in equal]
    violated = sum(left > right + 1e-12 for left, right in unequal)
    of_x = [value["x"] for value in measured.values()]
    result.checks = [
        check(
            "With equal marginals of x, D(f_y‖g_y) ≤ D(f_y|x‖g_y|x)",
            max(excess) <= 1e-12,
            f"{len(equal):,} random joint distributions; largest excess {max(excess):.1e}.",
        ),
        check(
            "Without equal marginals the search finds violations",
            violated > 0,
            f"{violated:,} of {len(unequal):,}.",
        ),
        check(
            "On the features, the marginals of x are equal: D of x below 0.05",
            max(of_x) < 0.05,
            f"D of x between {min(of_x):.3f} and {max(of_x):.3f}.",
        ),
    ]
    for key, statement in (
        ("conditional", "On the features, conditioning on x raises the divergence"),
        ("ratio", "What the detector does, dividing y by x, raises it too"),
    ):
        raised = sum(value[key] >= value["y"] for value in measured.values())
        found = f"On {raised} of {len(measured)} sets."
        result.checks.append(check(statement, raised == len(measured), found))
    result.data = {"features": measured}
    result.figure = _figure(equal, unequal, measured)
    return result


def _random_sides(random: np.random.Generator, same: bool) -> tuple[float, float]:
    """Both sides for a random pair of joint distributions, from sharp to flat."""
    x, y = random.integers(2, 12, size=2)
    sharp = 10 ** random.uniform(-0.7, 1, size=2)
    conditional = [random.dirichlet(np.full(y, part), size=x) + 1e-9 for part in sharp]
    marginals = random.dirichlet(np.ones(x), size=2)
    if same:
        marginals[1] = marginals[0]
    elif random.random() < 0.5:
        conditional[1] = conditional[0] + 0.2 * conditional[1]  # x tells most, and y follows it
    joint = [m[:, None] * c / c.sum(axis=1, keepdims=True) for m, c in zip(marginals, conditional)]
    return sides(joint[0], joint[1])


def _of_features(found: dict[str, tuple[Floats, Floats]], bins: int) -> dict[str, dict[str, float]]:
    """The divergences of the ID set from each OOD set, x the deviation and y the average distance."""
    inside, *outside = found.items()
    result = {}
    for title, other in outside:
        pairs = inside[1], other
        y_edges, x_edges = (_edges([pair[part] for pair in pairs], bins) for part in (0, 1))
        ratio_edges = _edges([y / x for y, x in pairs], bins)
        # Half a sample more in each row of cells keeps every cell possible.
        tables = [_share(np.histogram2d(x, y, [x_edges, y_edges])[0] + 0.5 / bins) for y, x in pairs]
        ratios = [_share(np.histogram(y / x, ratio_edges)[0] + 0.5) for y, x in pairs]
        marginal, conditional = sides(tables[0], tables[1])
        of_x = kl(tables[0].sum(axis=1), tables[1].sum(axis=1))
        result[title] = {"x": of_x, "y": marginal, "conditional": conditional, "ratio": kl(ratios[0], ratios[1])}
    return result


def _share(counts: Floats) -> Floats:
    shares: Floats = counts / counts.sum()
    return shares


def _edges(sides: list[Floats], bins: int) -> Floats:
    """Edges at quantiles of both sides, each with the same weight."""
    grid = np.linspace(0, 1, 201)
    both = np.concatenate([np.quantile(side, grid) for side in sides])
    edges = np.quantile(both, np.linspace(0, 1, bins + 1))
    return np.concatenate([[-np.inf], edges[1:-1], [np.inf]])


def _figure(equal: Any, unequal: Any, measured: dict[str, dict[str, float]]) -> Any:
    drawn, axes = plot.figure(9, 3.9, 1, 2)
    axis = axes[0, 0]
    for pairs, colour, label in ((unequal, "#edae49", "unequal"), (equal, plot.INSIDE, "equal")):
        left, right = np.maximum(np.array(pairs[:400]).T, 1e-4)
        look = {"s": 7, "alpha": 0.6, "linewidths": 0, "rasterized": True}
        axis.scatter(right, left, color=colour, label=f"{label} marginals of x", **look)
    axis.plot([1e-4, 30], [1e-4, 30], color="#888888", lw=1, ls="--")
    axis.set_xscale("log")
    axis.set_yscale("log")
    title = "random joint distributions (claim: below the line)"
    plot.label(axis, "D of y given x, nats", "D of y, nats", title, legend=8)
    axis = axes[0, 1]
    places = np.arange(len(measured))
    labels = "deviation x", "distance y", "y given x", "y / x (fDBD)"
    colours = "#bbbbbb", plot.OUTSIDE, plot.INSIDE, "#66a182"
    for number, (key, label, colour) in enumerate(zip(("x", "y", "conditional", "ratio"), labels, colours)):
        heights = [value[key] for value in measured.values()]
        axis.bar(places + 0.2 * (number - 1.5), heights, 0.2, color=colour, label=label)
    axis.set_xticks(places, list(measured), fontsize=8, rotation=20)
    plot.label(axis, y="D of ID from OOD, nats", title="features of the model", legend=8)
    return drawn
