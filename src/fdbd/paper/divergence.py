"""The proposition on regularisation: conditioning on the deviation can only raise the KL divergence of ID from OOD."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fdbd.paper import plot
from fdbd.paper.models import load_models
from fdbd.paper.plot import Floats
from fdbd.paper.result import Result
from fdbd.report.figures import Standing, balanced_edges


def kl(first: Floats, second: Floats) -> float:
    """Kullback-Leibler divergence in nats of two arrays of probabilities of one shape."""
    used = first > 0
    with np.errstate(divide="ignore"):
        return float((first[used] * np.log(first[used] / second[used])).sum())


def sides(inside: Floats, outside: Floats) -> tuple[float, float]:
    """D(f_y‖g_y) and D(f_{y|x}‖g_{y|x}), averaged over f_x, of joint tables (x, y)."""
    marginal = kl(inside.sum(axis=0), outside.sum(axis=0))
    return marginal, kl(inside, outside) - kl(inside.sum(axis=1), outside.sum(axis=1))


def proposition_kl(result: Result) -> None:
    """Random joint tables with and without equal x-marginals, and the features of the model."""
    bins, tables = result.settings["bins"], result.settings["tables"]
    random = np.random.default_rng(result.settings["seed"])
    result.say("random joint distributions")
    equal, unequal = ([_random_sides(random, same) for _ in range(tables)] for same in (True, False))
    model = load_models(result)[0]
    result.say("joint histograms of the features")
    measured = _of_features(model.standings(), bins)
    columns = {"OOD set": "{name}", "D of the deviation x": "{x:.3f}", "D of the distance y": "{y:.3f}"}
    result.table(
        {**columns, "D of y given x": "{conditional:.3f}", "D of y/x": "{ratio:.3f}"},
        ({"name": name, **values} for name, values in measured.items()),
        f"Kullback-Leibler divergence of ID from OOD in nats, from histograms of {bins} quantile bins.",
    )
    excess = max(left - right for left, right in equal)
    text = f"{len(equal):,} random joint distributions; largest excess {excess:.1e}."
    result.check("With equal marginals of x, D(f_y‖g_y) ≤ D(f_y|x‖g_y|x)", excess <= 1e-12, text)
    violated = sum(left > right + 1e-12 for left, right in unequal)
    text = f"{violated:,} of {len(unequal):,}."
    result.check("Without equal marginals the search finds violations", violated > 0, text)
    of_x = [values["x"] for values in measured.values()]
    text = f"D of x between {min(of_x):.3f} and {max(of_x):.3f}."
    result.check("On the features, the marginals of x are equal: D of x below 0.05", max(of_x) < 0.05, text)
    for key, statement in (
        ("conditional", "On the features, conditioning on x raises the divergence"),
        ("ratio", "What the detector does, dividing y by x, raises it too"),
    ):
        raised = sum(values[key] >= values["y"] for values in measured.values())
        result.check(statement, raised == len(measured), f"On {raised} of {len(measured)} sets.")
    result.data = {"features": measured}
    axis, bars = result.axes(9, 3.9, 1, 2)[0]
    for pairs, colour, name in ((unequal, "#edae49", "unequal"), (equal, plot.INSIDE, "equal")):
        left, right = np.maximum(np.array(pairs[:400]).T, 1e-4)
        look = {"s": 7, "alpha": 0.6, "linewidths": 0, "rasterized": True}
        axis.scatter(right, left, color=colour, label=f"{name} marginals of x", **look)
    axis.plot([1e-4, 30], [1e-4, 30], color=plot.GREY, lw=1, ls="--")
    title = "random joint distributions (claim: below the line)"
    plot.label(axis, "D of y given x, nats", "D of y, nats", title, legend=8, log="xy")
    places = np.arange(len(measured))
    colours = {
        "deviation x": "#bbbbbb",
        "distance y": plot.OUTSIDE,
        "y given x": plot.INSIDE,
        "y / x (fDBD)": "#66a182",
    }
    for number, (key, (name, colour)) in enumerate(zip(("x", "y", "conditional", "ratio"), colours.items())):
        heights = [values[key] for values in measured.values()]
        bars.bar(places + 0.2 * (number - 1.5), heights, 0.2, color=colour, label=name)
    bars.set_xticks(places, list(measured), fontsize=8, rotation=20)
    plot.label(bars, y="D of ID from OOD, nats", title="features of the model", legend=8)


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


def _of_features(found: Mapping[str, Standing], bins: int) -> dict[str, dict[str, float]]:
    """The divergences of the ID set from each OOD set, x the deviation and y the average distance."""

    def edges(values: list[Floats]) -> Floats:
        return np.concatenate([[-np.inf], balanced_edges(values, bins, 201)[1:-1], [np.inf]])

    inside, *outside = found.values()
    result = {}
    for other in outside:
        pair = inside, other
        y_edges, x_edges = edges([part.distance for part in pair]), edges([part.deviation for part in pair])
        ratio_edges = edges([part.scores for part in pair])
        # Half a sample more in each row of cells keeps every cell possible.
        counts = [np.histogram2d(p.deviation, p.distance, [x_edges, y_edges])[0] + 0.5 / bins for p in pair]
        first, second = (part / part.sum() for part in counts)
        ratios = [np.histogram(part.scores, ratio_edges)[0] + 0.5 for part in pair]
        marginal, conditional = sides(first, second)
        of_x, ratio = kl(first.sum(axis=1), second.sum(axis=1)), kl(*(part / part.sum() for part in ratios))
        result[other.samples.name] = {"x": of_x, "y": marginal, "conditional": conditional, "ratio": ratio}
    return result
