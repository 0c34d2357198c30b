"""Propositions 5.1 and 5.2 under the paper's model, and with an assumption taken away; and that on
regularisation: conditioning on the deviation can only raise the KL divergence of ID from OOD.

The model: class means at the corners of a simplex, and points drawn on spheres around them.
"""

import math
from collections.abc import Mapping
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from scipy.linalg import helmert
from scipy.special import rel_entr
from torch import Generator, Tensor

from fdbd import geometry
from fdbd.bench.figures import Floats, Standing, balanced_edges
from fdbd.core.batch import Head
from fdbd.core.linear_algebra import unit
from fdbd.paper import plot
from fdbd.paper.models import load_models
from fdbd.paper.result import Result

_FEWEST = 50  # points that an average takes
_ANGLES = 4001
Case = dict[str, Any]
DIVERGENCES = {
    "x": ("deviation x", "#bbbbbb"),
    "y": ("distance y", plot.OUTSIDE),
    "conditional": ("y given x", plot.INSIDE),
    "ratio": ("y / x (fDBD)", "#66a182"),
}
"""Label and colour of each divergence of ID from OOD."""


def simplex_etf(classes: int, width: int) -> Tensor:
    """(C, P) float64 unit vectors with inner products −1/(C − 1): a simplex equiangular tight
    frame.

    >>> means = simplex_etf(3, 5)
    >>> torch.allclose(means @ means.T, torch.eye(3, dtype=torch.float64) * 1.5 - 0.5)
    True
    """
    if width < classes - 1:
        raise ValueError(
            f"{classes} class means of a simplex need {classes - 1} dimensions, not {width}"
        )
    # Helmert's orthonormal basis of the vectors that sum to zero is the same on every machine; a
    # singular value decomposition would be degenerate here.
    corners = torch.from_numpy(helmert(classes).T * math.sqrt(classes / (classes - 1)))
    return torch.nn.functional.pad(corners, (0, width - classes + 1))


def boundary_distance(points: Tensor, means: Tensor, bias: Tensor | None = None) -> Tensor:
    """(N,) d(z, S) of points (N, P): to the nearest boundary of the region argmax ⟨μ_i, z⟩ (+
    bias_i) they lie in."""
    head = Head(means, means.new_zeros(len(means)) if bias is None else bias)
    return geometry.nearest_boundary(geometry.distances(points, head))[0]


def sphere(count: int, width: int, generator: Generator) -> Tensor:
    """(N, P) float64 points, uniform on the unit sphere."""
    return unit(torch.randn(count, width, generator=generator, dtype=torch.float64))


def band(count: int, axis: Tensor, low: float, high: float, generator: Generator) -> Tensor:
    """(N, P) points of the unit sphere, uniform among those whose angle with the unit vector `axis`
    is in [low, high].

    The angle is drawn from its density ∝ sin^(P−2), tabled in logarithms; rejection would find no
    point of a cap from about twenty dimensions on.
    """
    width = len(axis)
    angles = torch.linspace(low, high, _ANGLES, dtype=torch.float64)
    middle = (angles[1:] + angles[:-1]) / 2
    logs = (width - 2) * middle.sin().clamp_min(1e-300).log()
    steps = (logs - logs.max()).exp().cumsum(dim=0)
    chosen = torch.rand(count, generator=generator, dtype=torch.float64) * steps[-1]
    cell = torch.searchsorted(steps, chosen).clamp_max(_ANGLES - 2)
    within = torch.rand(count, generator=generator, dtype=torch.float64)
    angle = (angles[cell] + within * (angles[1] - angles[0]))[:, None]
    across = torch.randn(count, width, generator=generator, dtype=torch.float64)
    points: Tensor = angle.cos() * axis + angle.sin() * unit(
        across - (across @ axis)[:, None] * axis
    )
    return points


def cap_angle(radius: float, norm: float, reach: float) -> float:
    """Angle up to which points of the sphere of `radius` are within `reach` of a mean at distance
    `norm`; NaN: none."""
    cosine = (radius**2 + norm**2 - reach**2) / (2 * radius * norm)
    return math.nan if cosine > 1 else math.acos(max(cosine, -1.0))


def separation_limit(classes: int) -> float:
    """The largest 2σ, in units of ‖μ_i‖, for which each dense region lies within its decision
    region: the distance √(C / (2(C − 1))) of a class mean to its boundaries.

    >>> separation_limit(2)
    1.0
    """
    return math.sqrt(classes / (2 * (classes - 1)))


def proposition_1(result: Result) -> None:
    """The average boundary distance over a sphere grows with its radius."""
    settings = result.settings
    generator = Generator().manual_seed(settings["seed"])
    radii, count = settings["radii"], settings["points"]

    def averages(means: Tensor, bias: Tensor | None = None) -> list[float]:
        width = means.shape[1]
        return [
            float(boundary_distance(r * sphere(count, width, generator), means, bias).mean())
            for r in radii
        ]

    curves, biased, rows, worst = {}, {}, [], math.inf
    for classes, width in settings["sizes"]:
        means = simplex_etf(classes, width)
        curves[f"C = {classes}, P = {width}"] = values = averages(means)
        worst = min(worst, _smallest_growth(means, count, generator))
        ends, rises = (
            (f"{value:.4f}" for value in (values[0], values[-1])),
            sum(b > a for a, b in pairwise(values)),
        )
        rows.append([f"{classes}", f"{width}", *ends, f"{rises} of {len(radii) - 1}"])
    classes, width = settings["broken"]
    for bias in settings["biases"]:
        shift = bias * torch.eye(classes, dtype=torch.float64)[0]
        biased[f"bias {bias:g} on one class"] = averages(simplex_etf(classes, width), shift)
    ends_of = (f"average at r = {radius:g}" for radius in (radii[0], radii[-1]))
    columns = ["C", "P", *ends_of, "steps that rise"]
    result.table(columns, rows, "Independent points at each radius; ‖μ_i‖ = 1.")
    rising = all(b > a for values in curves.values() for a, b in pairwise(values))
    statement = "The average distance rises with the radius, for every C and P"
    result.check(statement, rising, f"{len(curves)} settings.")
    directions = f"{count * len(curves):,} directions and pairs of radii"
    measured = f"{directions}; smallest growth per unit of radius {worst:.1e}."
    result.check(
        "No direction is found along which the distance does not grow", worst > 0, measured
    )
    falls = sum(b < a for values in biased.values() for a, b in pairwise(values))
    cones = "With a bias on one class the regions are no cones, and the search finds radii where the average falls"
    result.check(cones, falls > 0, f"{falls} falling steps.")
    result.notes = [
        "d(z, S) is linear in the radius along each direction, so the statement is about scaling alone."
    ]
    result.data = {"radii": radii, "model": curves, "broken": biased}
    titles = "the paper's model", f"with a bias (C = {classes}, P = {width})"
    x, y = (
        "r, distance from the mean, in units of ‖μ_i‖",
        "average distance to the nearest boundary",
    )
    for axis, lines, title in zip(result.axes(9, 3.3, 1, 2)[0], (curves, biased), titles):
        plot.curves(axis, radii, lines)
        plot.label(axis, x, y, title, legend=7, log="y" * (lines is curves))


def _smallest_growth(means: Tensor, count: int, generator: Generator) -> float:
    """The smallest growth of the distance per unit of radius over random directions and pairs of
    radii."""
    directions = sphere(count, means.shape[1], generator)
    low, high = (
        (torch.rand(2, count, generator=generator, dtype=torch.float64) * 5 + 1e-3)
        .sort(dim=0)
        .values
    )
    growth = boundary_distance(high[:, None] * directions, means) - boundary_distance(
        low[:, None] * directions, means
    )
    return float((growth / (high - low).clamp_min(1e-12)).min())


def proposition_2(result: Result) -> None:
    """At equal radius, points of the dense region lie farther from the boundaries than points
    outside, on average."""
    settings = result.settings
    generator = Generator().manual_seed(settings["seed"])
    count = settings["points"]
    found: dict[str, list[Case]] = {"separated": [], "overlapping": [], "twins": []}
    for classes, width in settings["sizes"]:
        for kind in ("separated", "overlapping"):
            for share, place in product(settings[kind], settings["places"]):
                reach = share * separation_limit(classes)
                case = _compare(classes, width, reach, 1 + place * reach, count, generator)
                found[kind] += [] if case is None else [{**case, "share": share, "place": place}]
    twins = found["twins"] = [
        _twins(p, w, angle, share, count, generator) for p, w, angle, share in settings["twins"]
    ]
    _order_table(found, result)
    separated = "Where both regions are non-empty and classes are separated, ID averages are larger"
    overlapping = "The order of the averages stays when dense regions reach over the boundaries"
    for statement, cases in zip((separated, overlapping), found.values()):
        right = sum(case["inside"] - case["outside"] >= -2 * case["error"] for case in cases)
        least = min(cases, key=_ratio)
        where = f"C = {least['classes']}, P = {least['width']}, 2σ = {least['reach']:.2f}, r = {least['radius']:.2f}"
        measured = (
            f"{right} of {len(cases)} settings; smallest ratio {_ratio(least):.3f} ({where})."
        )
        result.check(statement, right == len(cases), measured)
    violations = sum(_ratio(case) < 1 for case in twins)
    statement = "Where the class means are no simplex (twins at a small angle, still separated), a violation is found"
    result.check(statement, violations > 0, f"In {violations} of {len(twins)} settings.")
    result.notes = [
        "Defined only where |r − ‖μ_i‖| ≤ 2σ: elsewhere the sphere of radius r misses the dense region. The paper's "
        "range σ < r < 5σ lies outside of that whenever ‖μ_i‖ > 7σ.",
        "The paper's proof shows that the distance falls along each geodesic from a class mean; that orders the points "
        "of one geodesic, not the averages over regions whose geodesics differ in length. The averages are measured.",
        "Caps are sampled by their angle, since a random point almost never falls in a cap in 20 dimensions or more.",
    ]
    result.data = found
    axis = result.axes(7, 4.2)[0, 0]
    labels = "separated (the paper's model)", "dense regions overlap", "twins: no simplex"
    looks = (plot.INSIDE, "o"), ("#edae49", "s"), (plot.OUTSIDE, "^")
    for label, cases, (colour, marker) in zip(labels, found.values(), looks):
        x, y = ([case[key] for case in cases] for key in ("outside", "inside"))
        axis.scatter(x, y, s=18, color=colour, marker=marker, label=label, alpha=0.8)
    ends = [
        min(case[key] for part in found.values() for case in part for key in ("inside", "outside")),
        1.5,
    ]
    axis.plot(ends, ends, color=plot.GREY, lw=1, ls="--", label="equal")
    average = "average distance {} the dense region"
    plot.label(axis, average.format("outside"), average.format("within"), legend=8, log="xy")


def _ratio(case: Case) -> float:
    """Average distance of the dense region over that of the rest of the sphere; above 1 is the
    claim."""
    return float(case["inside"] / case["outside"])


def _order_table(found: dict[str, list[Case]], result: Result) -> None:
    rows = []
    for name, cases in found.items():
        for classes, width in sorted({(case["classes"], case["width"]) for case in cases}):
            ratios = [
                _ratio(case)
                for case in cases
                if (case["classes"], case["width"]) == (classes, width)
            ]
            ends = f"{min(ratios):.3f}", f"{max(ratios):.3f}"
            rows.append([name, f"{classes}", f"{width}", f"{len(ratios)}", *ends])
    columns = ["class means", "C", "P", "settings of σ and r", "smallest ratio", "largest ratio"]
    note = "Ratio: average distance of the dense region over that of the rest of the sphere; above 1 is the claim."
    result.table(columns, rows, note)


def _compare(
    classes: int, width: int, reach: float, radius: float, count: int, generator: Generator
) -> Case | None:
    """Average distance in the dense region and outside it on one sphere; None where one of the two
    is empty.

    By symmetry one class is enough for the dense regions, and a point within the dense region of
    some class is within that of its own class, since the nearest class mean is its own.
    """
    angle = cap_angle(radius, 1.0, reach)
    if not math.isfinite(angle) or angle <= 0:
        return None
    means = simplex_etf(classes, width)
    dense = _own(band(count, means[0], 0.0, angle, generator), means)
    points = sphere(count, width, generator)
    points = points[(points @ means.T).amax(dim=1) < math.cos(angle)]
    if (
        len(points) < _FEWEST
    ):  # the dense regions fill the sphere: look for the rest where it must be
        points = _own(band(count, means[0], angle, math.pi, generator), means)
    return None if len(points) < _FEWEST else _case(means, radius, reach, angle, dense, points)


def _case(
    means: Tensor, radius: float, reach: float, angle: float, dense: Tensor, points: Tensor
) -> Case:
    """Average boundary distances within the dense regions and outside, of points (N, P) of the unit
    sphere."""
    inside, outside = (boundary_distance(radius * part, means) for part in (dense, points))
    return {
        **{
            "classes": len(means),
            "width": means.shape[1],
            "reach": reach,
            "radius": radius,
            "angle": angle,
        },
        **{"inside": float(inside.mean()), "outside": float(outside.mean())},
        "error": math.hypot(
            *(float(part.std()) / math.sqrt(len(part)) for part in (inside, outside))
        ),
    }


def _own(points: Tensor, means: Tensor) -> Tensor:
    """Those of the points that lie in the region of the first class."""
    return points[(points @ means.T).argmax(dim=1) == 0]


def _twins(
    pairs: int, width: int, angle: float, share: float, count: int, generator: Generator
) -> Case:
    """Class means in pairs, `angle` to either side of the corners of a simplex: equal norms,
    centred, separated."""
    corners = simplex_etf(pairs, width)
    aside = torch.eye(width, dtype=torch.float64)[pairs - 1]  # a direction that no corner has
    means = torch.cat(
        [math.cos(angle) * corners + sign * math.sin(angle) * aside for sign in (1, -1)]
    )
    reach = share * math.sin(angle)  # the distance of a mean to the boundary with its twin
    cap = cap_angle(1.0, 1.0, reach)
    dense = torch.cat([band(count // len(means) + 1, mean, 0.0, cap, generator) for mean in means])
    points = sphere(count, width, generator)
    outside = points[(points @ means.T).amax(dim=1) < math.cos(cap)]
    return {**_case(means, 1.0, reach, cap, dense, outside), "share": share}


def kl(first: Floats, second: Floats) -> float:
    """Kullback-Leibler divergence in nats of two arrays of probabilities of one shape."""
    return float(rel_entr(first, second).sum())


def sides(inside: Floats, outside: Floats) -> tuple[float, float]:
    """D(f_y‖g_y) and D(f_{y|x}‖g_{y|x}), averaged over f_x, of joint tables (x, y)."""
    marginal = kl(inside.sum(axis=0), outside.sum(axis=0))
    return marginal, kl(inside, outside) - kl(inside.sum(axis=1), outside.sum(axis=1))


def proposition_kl(result: Result) -> None:
    """Random joint tables with and without equal x-marginals, and the features of the model."""
    bins, tables = result.settings["bins"], result.settings["tables"]
    random = np.random.default_rng(result.settings["seed"])
    equal, unequal = (
        [_random_sides(random, same) for _ in range(tables)] for same in (True, False)
    )
    measured = _of_features(load_models(result)[0].standings(), bins)
    result.table(
        ["OOD set", "D of the deviation x", "D of the distance y", "D of y given x", "D of y/x"],
        [
            [name, *(f"{values[key]:.3f}" for key in DIVERGENCES)]
            for name, values in measured.items()
        ],
        f"Kullback-Leibler divergence of ID from OOD in nats, from histograms of {bins} quantile bins.",
    )
    excess = max(left - right for left, right in equal)
    text = f"{len(equal):,} random joint distributions; largest excess {excess:.1e}."
    result.check(
        "With equal marginals of x, D(f_y‖g_y) is at most its mean given x", excess <= 1e-12, text
    )
    violated = sum(left > right + 1e-12 for left, right in unequal)
    text = f"{violated:,} of {len(unequal):,}."
    result.check("Without equal marginals the search finds violations", violated > 0, text)
    of_x = [values["x"] for values in measured.values()]
    text = f"D of x between {min(of_x):.3f} and {max(of_x):.3f}."
    result.check(
        "On the features, the marginals of x are equal: D of x below 0.05", max(of_x) < 0.05, text
    )
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
    for number, (key, (name, colour)) in enumerate(DIVERGENCES.items()):
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
    """The divergences of the ID set from each OOD set, x the deviation and y the average
    distance."""
    inside, *outside = found.values()
    divergences = {}
    for other in outside:
        pair = inside, other
        x_edges, y_edges, ratio_edges = (
            [
                -np.inf,
                *balanced_edges([getattr(part, kind) for part in pair], bins, 201)[1:-1],
                np.inf,
            ]
            for kind in ("deviation", "distance", "scores")
        )
        # Half a sample more in each row of cells keeps every cell possible.
        counts = [
            np.histogram2d(p.deviation, p.distance, [x_edges, y_edges])[0] + 0.5 / bins
            for p in pair
        ]
        first, second = (part / part.sum() for part in counts)
        ratios = [np.histogram(part.scores, ratio_edges)[0] + 0.5 for part in pair]
        marginal, conditional = sides(first, second)
        of_x, ratio = (
            kl(first.sum(axis=1), second.sum(axis=1)),
            kl(*(part / part.sum() for part in ratios)),
        )
        divergences[other.samples.name] = {
            "x": of_x,
            "y": marginal,
            "conditional": conditional,
            "ratio": ratio,
        }
    return divergences
