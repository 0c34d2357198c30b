"""Propositions 5.1 and 5.2 under the paper's model, and with an assumption taken away."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from fdbd.paper import plot
from fdbd.paper.experiment import Experiment, Say
from fdbd.paper.result import Check, Result, check
from fdbd.paper.simplex import band, boundary_distance, cap_angle, separation_limit, simplex_etf, sphere
from fdbd.paper.table import Table

_FEWEST = 50  # points that an average takes


def proposition_1(experiment: Experiment, say: Say) -> Result:
    """The average boundary distance over a sphere grows with its radius."""
    settings = experiment.settings
    generator = torch.Generator().manual_seed(settings["seed"])
    radii, count = settings["radii"], settings["points"]
    curves, rows, worst = [], [], math.inf
    for classes, width in settings["sizes"]:
        say(f"{classes} classes in {width} dimensions")
        means = simplex_etf(classes, width)
        averages = [float(boundary_distance(r * sphere(count, width, generator), means).mean()) for r in radii]
        curves.append((f"C = {classes}, P = {width}", averages))
        worst = min(worst, _smallest_growth(means, count, generator))
        steps = f"{sum(b > a for a, b in pairwise(averages))} of {len(radii) - 1}"
        rows.append([str(classes), str(width), f"{averages[0]:.4f}", f"{averages[-1]:.4f}", steps])
    say("a bias on one class")
    classes, width = settings["broken"]
    biased = []
    means = simplex_etf(classes, width)
    for bias in settings["biases"]:
        shift = bias * torch.eye(classes, dtype=torch.float64)[0]
        values = [float(boundary_distance(r * sphere(count, width, generator), means, shift).mean()) for r in radii]
        biased.append((f"bias {bias:g} on one class", values))
    columns = ["C", "P", f"average at r = {radii[0]:g}", f"average at r = {radii[-1]:g}", "steps that rise"]
    result = Result(tables=[Table(experiment.title, columns, rows, ["Independent points at each radius; ‖μ_i‖ = 1."])])
    rising = all(b > a for _, values in curves for a, b in pairwise(values))
    falls = sum(b < a for _, values in biased for a, b in pairwise(values))
    result.checks = [
        check("The average distance rises with the radius, for every C and P", rising, f"{len(curves)} settings."),
        check(
            "No direction is found along which the distance does not grow",
            worst > 0,
            f"{count * len(curves):,} directions and pairs of radii; smallest growth per unit of radius {worst:.1e}.",
        ),
        check(
            "With a bias on one class the regions are no cones, and the search finds radii where the average falls",
            falls > 0,
            f"{falls} falling steps.",
        ),
    ]
    result.notes = ["d(z, S) is linear in the radius along each direction, so the statement is about scaling alone."]
    result.data = {"radii": radii, "model": dict(curves), "broken": dict(biased)}
    result.figure, axes = plot.figure(9, 3.3, 1, 2)
    titles = "the paper's model", f"with a bias (C = {classes}, P = {width})"
    for axis, lines, title in zip(axes[0], (curves, biased), titles):
        for colour, (label, values) in zip((plot.INSIDE, *plot.COLOURS), lines):
            axis.plot(radii, values, marker="o", ms=3, color=colour, label=label)
        x, y = "r, distance from the mean, in units of ‖μ_i‖", "average distance to the nearest boundary"
        plot.label(axis, x, y, title, legend=7)
    axes[0, 0].set_yscale("log")
    return result


def _smallest_growth(means: Tensor, count: int, generator: torch.Generator) -> float:
    """The smallest growth of the distance per unit of radius over random directions and pairs of radii."""
    directions = sphere(count, means.shape[1], generator)
    low, high = (torch.rand(2, count, generator=generator, dtype=torch.float64) * 5 + 1e-3).sort(dim=0).values
    growth = boundary_distance(high[:, None] * directions, means) - boundary_distance(low[:, None] * directions, means)
    return float((growth / (high - low).clamp_min(1e-12)).min())


def proposition_2(experiment: Experiment, say: Say) -> Result:
    """At equal radius, points of the dense region lie farther from the boundaries than points outside, on average."""
    settings = experiment.settings
    generator = torch.Generator().manual_seed(settings["seed"])
    count = settings["points"]
    held: list[dict[str, Any]] = []
    broken: list[dict[str, Any]] = []
    for classes, width in settings["sizes"]:
        say(f"{classes} classes in {width} dimensions")
        for shares, into in ((settings["separated"], held), (settings["overlapping"], broken)):
            for share, place in product(shares, settings["places"]):
                reach = share * separation_limit(classes)
                case = _compare(classes, width, reach, 1 + place * reach, count, generator)
                into += [] if case is None else [{**case, "share": share, "place": place}]
    say("twins among the class means")
    twins = [_twins(p, w, angle, share, count, generator) for p, w, angle, share in settings["twins"]]
    result = Result(tables=[_order_table(held, broken, twins, experiment.title)])
    result.checks = [
        _order_check("Where both regions are non-empty and classes are separated, ID averages are larger", held),
        _order_check("The order of the averages stays when dense regions reach over the boundaries", broken),
        check(
            "Where the class means are no simplex (twins at a small angle, still separated), a violation is found",
            any(case["inside"] < case["outside"] for case in twins),
            f"In {sum(case['inside'] < case['outside'] for case in twins)} of {len(twins)} settings.",
        ),
    ]
    result.notes = [
        "Defined only where |r − ‖μ_i‖| ≤ 2σ: elsewhere the sphere of radius r misses the dense region. The paper's "
        "range σ < r < 5σ lies outside of that whenever ‖μ_i‖ > 7σ.",
        "The paper's proof shows that the distance falls along each geodesic from a class mean; that orders the points "
        "of one geodesic, not the averages over regions whose geodesics differ in length. The averages are measured.",
        "Caps are sampled by their angle; no point of a cap is hit by chance from about 20 dimensions on.",
    ]
    result.data = {"separated": held, "overlapping": broken, "twins": twins}
    result.figure = _order_figure(held, broken, twins)
    return result


def _compare(
    classes: int, width: int, reach: float, radius: float, count: int, generator: torch.Generator
) -> dict[str, Any] | None:
    """Average distance in the dense region and outside it on one sphere; None where one of the two is empty.

    By symmetry one class is enough for the dense regions, and a point within the dense region of some class is within
    that of its own class, since the nearest class mean is its own.
    """
    angle = cap_angle(radius, 1.0, reach)
    if not math.isfinite(angle) or angle <= 0:
        return None
    means = simplex_etf(classes, width)
    dense = _own(band(count, means[0], 0.0, angle, generator), means)
    points = sphere(count, width, generator)
    points = points[(points @ means.T).amax(dim=1) < math.cos(angle)]
    if len(points) < _FEWEST:  # the dense regions fill the sphere: look for the rest where it must be
        points = _own(band(count, means[0], angle, math.pi, generator), means)
    if len(points) < _FEWEST:
        return None
    return _case(means, radius, reach, angle, dense, points)


def _case(means: Tensor, radius: float, reach: float, angle: float, dense: Tensor, points: Tensor) -> dict[str, Any]:
    """Average boundary distances within the dense regions and outside, of points (N, P) of the unit sphere."""
    inside, outside = (boundary_distance(radius * part, means) for part in (dense, points))
    return {
        **{"classes": len(means), "width": means.shape[1], "reach": reach, "radius": radius, "angle": angle},
        **{"inside": float(inside.mean()), "outside": float(outside.mean())},
        "error": math.hypot(*(float(part.std()) / math.sqrt(len(part)) for part in (inside, outside))),
    }


def _own(points: Tensor, means: Tensor) -> Tensor:
    """Those of the points that lie in the region of the first class."""
    return points[(points @ means.T).argmax(dim=1) == 0]


def _twins(
    pairs: int, width: int, angle: float, share: float, count: int, generator: torch.Generator
) -> dict[str, Any]:
    """Class means in pairs, `angle` to either side of the corners of a simplex: equal norms, centred, separated."""
    corners = simplex_etf(pairs, width)
    aside = torch.zeros(pairs, width, dtype=torch.float64)
    aside[:, pairs - 1] = 1.0  # a direction that no corner has
    means = torch.cat([math.cos(angle) * corners + sign * math.sin(angle) * aside for sign in (1, -1)])
    reach = share * math.sin(angle)  # the distance of a mean to the boundary with its twin
    cap = cap_angle(1.0, 1.0, reach)
    dense = torch.cat([band(count // len(means) + 1, mean, 0.0, cap, generator) for mean in means])
    points = sphere(count, width, generator)
    outside = points[(points @ means.T).amax(dim=1) < math.cos(cap)]
    return {**_case(means, 1.0, reach, cap, dense, outside), "share": share}


def _order_check(statement: str, cases: list[dict[str, Any]]) -> Check:
    wrong = [case for case in cases if case["inside"] - case["outside"] < -2 * case["error"]]
    least = min(cases, key=lambda case: case["inside"] / case["outside"])
    where = f"C = {least['classes']}, P = {least['width']}, 2σ = {least['reach']:.2f}, r = {least['radius']:.2f}"
    ratio = f"smallest ratio {least['inside'] / least['outside']:.3f} ({where})"
    return check(statement, not wrong, f"{len(cases) - len(wrong)} of {len(cases)} settings; {ratio}.")


def _order_table(held: Any, broken: Any, twins: Any, title: str) -> Table:
    rows = []
    for name, cases in (("separated", held), ("overlapping", broken), ("twins", twins)):
        for classes, width in sorted({(case["classes"], case["width"]) for case in cases}):
            part = [case for case in cases if (case["classes"], case["width"]) == (classes, width)]
            ratios = [case["inside"] / case["outside"] for case in part]
            cells = [str(len(part)), f"{min(ratios):.3f}", f"{max(ratios):.3f}"]
            rows.append([name, str(classes), str(width), *cells])
    notes = ["Ratio: average distance of the dense region over that of the rest of the sphere; above 1 is the claim."]
    columns = ["class means", "C", "P", "settings of σ and r", "smallest ratio", "largest ratio"]
    return Table(title, columns, rows, notes)


def _order_figure(held: Any, broken: Any, twins: Any) -> Any:
    drawn, axes = plot.figure(7, 4.2)
    axis = axes[0, 0]
    labels = "separated (the paper's model)", "dense regions overlap", "twins: no simplex"
    looks = (plot.INSIDE, "o"), ("#edae49", "s"), (plot.OUTSIDE, "^")
    for label, cases, (colour, marker) in zip(labels, (held, broken, twins), looks):
        x, y = ([case[key] for case in cases] for key in ("outside", "inside"))
        axis.scatter(x, y, s=18, color=colour, marker=marker, label=label, alpha=0.8)
    ends = [min(c[k] for c in (*held, *broken, *twins) for k in ("inside", "outside")), 1.5]
    axis.plot(ends, ends, color="#888888", lw=1, ls="--", label="equal")
    axis.set_xscale("log")
    axis.set_yscale("log")
    average = "average distance {} the dense region"
    plot.label(axis, average.format("outside"), average.format("within"), legend=8)
    return drawn
