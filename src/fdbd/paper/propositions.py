"""Propositions 5.1 and 5.2 under the paper's model, and with an assumption taken away; and that on
regularisation: conditioning on the deviation can only raise the KL divergence of ID from OOD.

The model: class means at the corners of a simplex, and points drawn on spheres around them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product

import numpy as np
import torch
from scipy.linalg import helmert
from scipy.special import rel_entr
from torch import Generator, Tensor

from fdbd import geometry
from fdbd.bench.figures import Floats, Standing, balanced_edges
from fdbd.core.batch import Head
from fdbd.core.linear_algebra import unit
from fdbd.metrics import Comparison
from fdbd.paper import plot
from fdbd.paper.finding import Finding
from fdbd.paper.models import load_models
from fdbd.paper.settings import PropositionKL, PropositionOne, PropositionTwo

_FEWEST = 50
"""Points that an average needs."""
_ANGLES = 4001
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
    if bias is None:
        bias = means.new_zeros(len(means))
    head = Head(means, bias)
    nearest, _ = geometry.nearest_boundary(geometry.distances(points, head))
    return nearest


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
    across -= (across @ axis)[:, None] * axis
    points: Tensor = angle.cos() * axis + angle.sin() * unit(across)
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


def proposition_1(finding: Finding, settings: PropositionOne) -> None:
    """The average boundary distance over a sphere grows with its radius."""
    generator = Generator().manual_seed(settings.seed)
    radii = settings.radii
    curves: dict[str, list[float]] = {}
    rows: list[list[str]] = []
    smallest_growth = math.inf
    for classes, width in settings.sizes:
        means = simplex_etf(classes, width)
        averages = _averages_over_spheres(radii, means, None, settings.points, generator)
        curves[f"C = {classes}, P = {width}"] = averages
        growth = _smallest_growth(means, settings.points, generator)
        smallest_growth = min(smallest_growth, growth)
        rising = f"{_count_rises(averages)} of {len(radii) - 1}"
        ends = [f"{averages[0]:.4f}", f"{averages[-1]:.4f}"]
        rows.append([f"{classes}", f"{width}", *ends, rising])
    biased = _averages_with_a_bias(settings, generator)

    finding.table(
        [
            "C",
            "P",
            f"average at r = {radii[0]:g}",
            f"average at r = {radii[-1]:g}",
            "steps that rise",
        ],
        rows,
        "Independent points at each radius; ‖μ_i‖ = 1.",
    )
    steps = len(radii) - 1
    finding.decide(
        "The average distance rises with the radius, for every C and P",
        all(_count_rises(averages) == steps for averages in curves.values()),
        f"{len(curves)} settings.",
    )
    tried = f"{settings.points * len(curves):,} directions and pairs of radii"
    finding.decide(
        "No direction is found along which the distance does not grow",
        smallest_growth > 0,
        f"{tried}; smallest growth per unit of radius {smallest_growth:.1e}.",
    )
    falls = sum(_count_falls(averages) for averages in biased.values())
    finding.decide(
        "With a bias on one class the regions are not cones, and the search finds radii where the "
        "average falls",
        falls > 0,
        f"{falls} falling steps.",
    )
    finding.notes = [
        "d(z, S) is linear in the radius along each direction, so the statement is about scaling "
        "alone."
    ]
    finding.data = {"radii": radii, "model": curves, "broken": biased}
    _draw_radii(curves, biased, settings, finding)


def _averages_over_spheres(
    radii: Sequence[float], means: Tensor, bias: Tensor | None, count: int, generator: Generator
) -> list[float]:
    """The average boundary distance over the sphere of each radius."""
    averages = []
    for radius in radii:
        points = radius * sphere(count, means.shape[1], generator)
        averages.append(float(boundary_distance(points, means, bias).mean()))
    return averages


def _averages_with_a_bias(settings: PropositionOne, generator: Generator) -> dict[str, list[float]]:
    """The same with a bias on the first class, by the size of the bias."""
    classes, width = settings.broken
    means = simplex_etf(classes, width)
    biased: dict[str, list[float]] = {}
    for size in settings.biases:
        bias = size * torch.eye(classes, dtype=torch.float64)[0]
        averages = _averages_over_spheres(settings.radii, means, bias, settings.points, generator)
        biased[f"bias {size:g} on one class"] = averages
    return biased


def _count_rises(values: Sequence[float]) -> int:
    return sum(after > before for before, after in pairwise(values))


def _count_falls(values: Sequence[float]) -> int:
    return sum(after < before for before, after in pairwise(values))


def _smallest_growth(means: Tensor, count: int, generator: Generator) -> float:
    """The smallest growth of the distance per unit of radius over random directions and pairs of
    radii."""
    directions = sphere(count, means.shape[1], generator)
    radii = torch.rand(2, count, generator=generator, dtype=torch.float64) * 5 + 1e-3
    low, high = radii.sort(dim=0).values
    at_low = boundary_distance(low[:, None] * directions, means)
    at_high = boundary_distance(high[:, None] * directions, means)
    growth = (at_high - at_low) / (high - low).clamp_min(1e-12)
    return float(growth.min())


def _draw_radii(
    curves: Mapping[str, Sequence[float]],
    biased: Mapping[str, Sequence[float]],
    settings: PropositionOne,
    finding: Finding,
) -> None:
    left, right = finding.axes(9, 3.3, 1, 2)[0]
    x = "r, distance from the mean, in units of ‖μ_i‖"
    y = "average distance to the nearest boundary"
    plot.curves(left, settings.radii, curves)
    plot.label(left, x, y, "the paper's model", legend=7, log="y")
    plot.curves(right, settings.radii, biased)
    classes, width = settings.broken
    plot.label(right, x, y, f"with a bias (C = {classes}, P = {width})", legend=7)


@dataclass(frozen=True)
class Case:
    """Average boundary distances on one sphere: of the points in the dense regions, and of those
    outside. Lengths are in units of ‖μ_i‖."""

    classes: int
    width: int
    #: 2σ, how far a dense region reaches from its class mean
    reach: float
    #: of the sphere
    radius: float
    #: up to which points of the sphere belong to a dense region
    angle: float
    #: average distance of the points in the dense regions
    inside: float
    #: average distance of the points outside
    outside: float
    #: standard error of the difference of the two
    error: float
    #: `reach` in units of the largest one that keeps classes apart
    share: float
    #: where the radius lies between −1 and 1 of the reach
    place: float = 0.0

    @property
    def ratio(self) -> float:
        """Above 1 is the claim."""
        return self.inside / self.outside


def proposition_2(finding: Finding, settings: PropositionTwo) -> None:
    """At equal radius, points of the dense region lie farther from the boundaries than points
    outside, on average."""
    generator = Generator().manual_seed(settings.seed)
    separated: list[Case] = []
    overlapping: list[Case] = []
    for size in settings.sizes:
        separated += _cases(size, settings.separated, settings, generator)
        overlapping += _cases(size, settings.overlapping, settings, generator)
    twins: list[Case] = []
    for pairs, width, angle, share in settings.twins:
        twins.append(_twins(pairs, width, angle, share, settings.points, generator))
    found = {"separated": separated, "overlapping": overlapping, "twins": twins}

    _table_of_ratios(found, finding)
    _decide_order(
        "Where both regions are non-empty and classes are separated, ID averages are larger",
        separated,
        finding,
    )
    _decide_order(
        "The order of the averages stays when dense regions reach over the boundaries",
        overlapping,
        finding,
        ours=True,
    )
    violations = sum(case.ratio < 1 for case in twins)
    finding.decide(
        "Where the class means are not a simplex (twins at a small angle, still separated), a "
        "violation is found",
        violations > 0,
        f"In {violations} of {len(twins)} settings.",
        ours=True,
    )
    finding.notes = [
        "Defined only where |r − ‖μ_i‖| ≤ 2σ: elsewhere the sphere of radius r misses the dense "
        "region. The paper's range σ < r < 5σ lies outside of that whenever ‖μ_i‖ > 7σ.",
        "The paper's proof shows that the distance falls along each geodesic from a class mean; "
        "that orders the points of one geodesic, not the averages over regions whose geodesics "
        "differ in length. The averages are measured.",
        "Caps are sampled by their angle, since a random point almost never falls in a cap in 20 "
        "dimensions or more.",
    ]
    finding.data = {}
    for name, cases in found.items():
        finding.data[name] = [asdict(case) for case in cases]
    _draw_cases(found, finding)


def _cases(
    size: tuple[int, int],
    shares: Sequence[float],
    settings: PropositionTwo,
    generator: Generator,
) -> list[Case]:
    """One case for each reach and radius at which neither region is empty."""
    classes, width = size
    found = []
    for share, place in product(shares, settings.places):
        case = _compare(classes, width, share, place, settings.points, generator)
        if case is not None:
            found.append(case)
    return found


def _decide_order(
    statement: str, cases: Sequence[Case], finding: Finding, ours: bool = False
) -> None:
    right = sum(case.inside - case.outside >= -2 * case.error for case in cases)
    least = min(cases, key=lambda case: case.ratio)
    setting = (
        f"C = {least.classes}, P = {least.width}, 2σ = {least.reach:.2f}, r = {least.radius:.2f}"
    )
    finding.decide(
        statement,
        right == len(cases),
        f"{right} of {len(cases)} settings; smallest ratio {least.ratio:.3f} ({setting}).",
        ours=ours,
    )


def _table_of_ratios(found: Mapping[str, Sequence[Case]], finding: Finding) -> None:
    rows = []
    for name, cases in found.items():
        ratios_by_size: dict[tuple[int, int], list[float]] = {}
        for case in cases:
            ratios_by_size.setdefault((case.classes, case.width), []).append(case.ratio)
        for (classes, width), ratios in sorted(ratios_by_size.items()):
            ends = [f"{min(ratios):.3f}", f"{max(ratios):.3f}"]
            rows.append([name, f"{classes}", f"{width}", f"{len(ratios)}", *ends])
    finding.table(
        ["class means", "C", "P", "settings of σ and r", "smallest ratio", "largest ratio"],
        rows,
        "Ratio: average distance of the dense region over that of the rest of the sphere; above 1 "
        "is the claim.",
    )


def _draw_cases(found: Mapping[str, Sequence[Case]], finding: Finding) -> None:
    axis = finding.axes(7, 4.2)[0, 0]
    looks = {
        "separated": ("separated (the paper's model)", plot.INSIDE, "o"),
        "overlapping": ("dense regions overlap", "#edae49", "s"),
        "twins": ("twins: no simplex", plot.OUTSIDE, "^"),
    }
    smallest = math.inf
    for name, cases in found.items():
        label, colour, marker = looks[name]
        x = [case.outside for case in cases]
        y = [case.inside for case in cases]
        axis.scatter(x, y, s=18, color=colour, marker=marker, label=label, alpha=0.8)
        smallest = min(smallest, *x, *y)
    ends = [smallest, 1.5]
    axis.plot(ends, ends, color=plot.GREY, lw=1, ls="--", label="equal")
    plot.label(
        axis,
        "average distance outside the dense region",
        "average distance within the dense region",
        legend=8,
        log="xy",
    )


def _compare(
    classes: int, width: int, share: float, place: float, count: int, generator: Generator
) -> Case | None:
    """Average distance in the dense region and outside it on one sphere; None if one of the two is
    empty.

    By symmetry one class is enough for the dense regions, and a point within the dense region of
    some class is within that of its own class, since the nearest class mean is its own.
    """
    reach = share * separation_limit(classes)
    radius = 1 + place * reach
    angle = cap_angle(radius, 1.0, reach)
    if not math.isfinite(angle) or angle <= 0:
        return None
    means = simplex_etf(classes, width)
    dense = _own(band(count, means[0], 0.0, angle, generator), means)
    points = sphere(count, width, generator)
    outside = points[(points @ means.T).amax(dim=1) < math.cos(angle)]
    if len(outside) < _FEWEST:
        # The dense regions nearly fill the sphere: look for the rest where it must be.
        outside = _own(band(count, means[0], angle, math.pi, generator), means)
    if len(outside) < _FEWEST:
        return None
    return _case(
        means, dense, outside, radius=radius, reach=reach, angle=angle, share=share, place=place
    )


def _case(
    means: Tensor,
    dense: Tensor,
    outside: Tensor,
    *,
    radius: float,
    reach: float,
    angle: float,
    share: float,
    place: float = 0.0,
) -> Case:
    """Average boundary distances within the dense regions and outside, of points (N, P) of the unit
    sphere."""
    inside_distances = boundary_distance(radius * dense, means)
    outside_distances = boundary_distance(radius * outside, means)
    return Case(
        classes=len(means),
        width=means.shape[1],
        reach=reach,
        radius=radius,
        angle=angle,
        inside=float(inside_distances.mean()),
        outside=float(outside_distances.mean()),
        error=math.hypot(_error_of_mean(inside_distances), _error_of_mean(outside_distances)),
        share=share,
        place=place,
    )


def _error_of_mean(values: Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values))


def _own(points: Tensor, means: Tensor) -> Tensor:
    """Those of the points that lie in the region of the first class."""
    return points[(points @ means.T).argmax(dim=1) == 0]


def _twins(
    pairs: int, width: int, angle: float, share: float, count: int, generator: Generator
) -> Case:
    """Class means in pairs, `angle` to either side of the corners of a simplex: equal norms,
    centred, separated."""
    corners = simplex_etf(pairs, width)
    # A direction in which no corner points.
    aside = torch.eye(width, dtype=torch.float64)[pairs - 1]
    one_twin = math.cos(angle) * corners + math.sin(angle) * aside
    other_twin = math.cos(angle) * corners - math.sin(angle) * aside
    means = torch.cat([one_twin, other_twin])
    # The sine is the distance of a mean to the boundary with its twin.
    reach = share * math.sin(angle)
    cap = cap_angle(1.0, 1.0, reach)
    per_mean = count // len(means) + 1
    dense = torch.cat([band(per_mean, mean, 0.0, cap, generator) for mean in means])
    points = sphere(count, width, generator)
    outside = points[(points @ means.T).amax(dim=1) < math.cos(cap)]
    return _case(means, dense, outside, radius=1.0, reach=reach, angle=cap, share=share)


def kl(first: Floats, second: Floats) -> float:
    """Kullback-Leibler divergence in nats of two arrays of probabilities of one shape."""
    return float(rel_entr(first, second).sum())


def sides(inside: Floats, outside: Floats) -> tuple[float, float]:
    """Both sides of the proposition's inequality, for joint tables (x, y) of ID and OOD:
    D(f_y‖g_y), and D(f_{y|x}‖g_{y|x}) averaged over f_x."""
    of_y = kl(inside.sum(axis=0), outside.sum(axis=0))
    of_x = kl(inside.sum(axis=1), outside.sum(axis=1))
    return of_y, kl(inside, outside) - of_x


def proposition_kl(finding: Finding, settings: PropositionKL) -> None:
    """Random joint tables with and without equal x-marginals, and the features of the model."""
    random = np.random.default_rng(settings.seed)
    equal = [_random_sides(random, same=True) for _ in range(settings.tables)]
    unequal = [_random_sides(random, same=False) for _ in range(settings.tables)]
    _decide_on_random_tables(equal, unequal, finding)

    model = load_models(finding)[0]
    inside, *outside = model.standings().values()
    found: dict[str, Divergences] = {}
    draws: dict[str, list[Divergences]] = {}
    for other in outside:
        name = other.samples.name
        finding.say(f"divergences of {name}")
        histograms = _Histograms.from_quantiles(inside, other, settings.bins)
        found[name] = histograms.divergences(_points(inside), _points(other))
        draws[name] = _resample(histograms, inside, other, settings.resamples, random)
    _table_of_divergences(found, draws, settings, finding)
    _decide_on_features(found, draws, finding)
    finding.data = {"features": found}
    left, right = finding.axes(9, 3.9, 1, 2)[0]
    _draw_random_tables(left, equal, unequal)
    _draw_divergences(right, found)


def _decide_on_random_tables(
    equal: Sequence[tuple[float, float]],
    unequal: Sequence[tuple[float, float]],
    finding: Finding,
) -> None:
    excess = max(left - right for left, right in equal)
    finding.decide(
        "With equal marginals of x, D(f_y‖g_y) is at most its mean given x",
        excess <= 1e-12,
        f"{len(equal):,} random joint distributions; largest excess {excess:.1e}.",
    )
    violated = sum(left > right + 1e-12 for left, right in unequal)
    finding.decide(
        "Without equal marginals the search finds violations",
        violated > 0,
        f"{violated:,} of {len(unequal):,}.",
        ours=True,
    )


Divergences = dict[str, float]
"""The divergences of the ID set from an OOD set, by the keys of `DIVERGENCES`."""


def _points(part: Standing) -> Floats:
    """(N, 3) deviation, average distance, and their ratio, which is fDBD's score."""
    return np.stack([part.deviation, part.distance, part.scores], axis=1)


@dataclass(frozen=True)
class _Histograms:
    """Edges of the bins of x, y and y/x."""

    of_x: Floats
    of_y: Floats
    of_ratio: Floats

    @classmethod
    def from_quantiles(cls, inside: Standing, outside: Standing, bins: int) -> "_Histograms":
        """Bins that ID and OOD samples fill about equally; the outermost are without end."""

        def edges(first: Floats, second: Floats) -> Floats:
            inner = balanced_edges([first, second], bins, 201)[1:-1]
            return np.array([-np.inf, *inner, np.inf])

        return cls(
            edges(inside.deviation, outside.deviation),
            edges(inside.distance, outside.distance),
            edges(inside.scores, outside.scores),
        )

    def divergences(self, inside: Floats, outside: Floats) -> Divergences:
        """The divergences of points (N, 3) of the ID set from those of an OOD set."""
        joint_inside = self._joint(inside)
        joint_outside = self._joint(outside)
        of_y, of_y_given_x = sides(joint_inside, joint_outside)
        return {
            "x": kl(joint_inside.sum(axis=1), joint_outside.sum(axis=1)),
            "y": of_y,
            "conditional": of_y_given_x,
            "ratio": kl(self._ratio(inside), self._ratio(outside)),
        }

    def _joint(self, points: Floats) -> Floats:
        counts, _, _ = np.histogram2d(points[:, 0], points[:, 1], [self.of_x, self.of_y])
        # Half a sample more in each row of cells keeps every cell possible.
        counts += 0.5 / (len(self.of_y) - 1)
        joint: Floats = counts / counts.sum()
        return joint

    def _ratio(self, points: Floats) -> Floats:
        counts = np.histogram(points[:, 2], self.of_ratio)[0] + 0.5
        shares: Floats = counts / counts.sum()
        return shares


def _resample(
    histograms: _Histograms,
    inside: Standing,
    outside: Standing,
    count: int,
    random: np.random.Generator,
) -> list[Divergences]:
    """The divergences of `count` bootstrap samples of both sets, in the same bins."""
    of_id = _points(inside)
    of_ood = _points(outside)
    found = []
    for _ in range(count):
        drawn_id = of_id[random.integers(len(of_id), size=len(of_id))]
        drawn_ood = of_ood[random.integers(len(of_ood), size=len(of_ood))]
        found.append(histograms.divergences(drawn_id, drawn_ood))
    return found


def _spread(draws: Sequence[Divergences], key: str, minus: str = "") -> float:
    """Standard error of a divergence, or of its difference from another one, by the bootstrap."""
    values = []
    for draw in draws:
        subtracted = draw[minus] if minus else 0.0
        values.append(draw[key] - subtracted)
    return float(np.std(values, ddof=1))


def _table_of_divergences(
    found: Mapping[str, Divergences],
    draws: Mapping[str, Sequence[Divergences]],
    settings: PropositionKL,
    finding: Finding,
) -> None:
    rows = []
    for name, values in found.items():
        cells = []
        for key in DIVERGENCES:
            half_width = 1.96 * _spread(draws[name], key)
            cells.append(f"{values[key]:.3f} ± {half_width:.3f}")
        rows.append([name, *cells])
    finding.table(
        ["OOD set", "D of the deviation x", "D of the distance y", "D of y given x", "D of y/x"],
        rows,
        f"Kullback-Leibler divergence of ID from OOD in nats, from histograms of {settings.bins} "
        f"quantile bins; ±: 95 % interval from {settings.resamples} bootstrap samples.",
    )


def _decide_on_features(
    found: Mapping[str, Divergences],
    draws: Mapping[str, Sequence[Divergences]],
    finding: Finding,
) -> None:
    of_x = [values["x"] for values in found.values()]
    below_margin = []
    for name, values in found.items():
        below_margin.append(
            Comparison.from_difference(0.05 - values["x"], _spread(draws[name], "x"))
        )
    finding.decide(
        "On the features, the marginals of x are equal: D of x below 0.05",
        below_margin,
        f"D of x between {min(of_x):.3f} and {max(of_x):.3f}.",
    )
    statements = {
        "conditional": "On the features, conditioning on x raises the divergence",
        "ratio": "What the detector does, dividing y by x, raises it too",
    }
    for key, statement in statements.items():
        tests = []
        differences = []
        for name, values in found.items():
            raised_by = values[key] - values["y"]
            error = _spread(draws[name], key, minus="y")
            tests.append(Comparison.from_difference(raised_by, error))
            differences.append(f"{name} {raised_by:+.3f} ± {1.96 * error:.3f}")
        finding.decide(statement, tests, f"Nats: {', '.join(differences)}.")


def _draw_random_tables(
    axis: plot.Axes,
    equal: Sequence[tuple[float, float]],
    unequal: Sequence[tuple[float, float]],
) -> None:
    for pairs, colour, name in ((unequal, "#edae49", "unequal"), (equal, plot.INSIDE, "equal")):
        of_y, of_y_given_x = np.maximum(np.array(pairs[:400]).T, 1e-4)
        axis.scatter(
            of_y_given_x,
            of_y,
            color=colour,
            label=f"{name} marginals of x",
            s=7,
            alpha=0.6,
            linewidths=0,
            rasterized=True,
        )
    axis.plot([1e-4, 30], [1e-4, 30], color=plot.GREY, lw=1, ls="--")
    title = "random joint distributions (claim: below the line)"
    plot.label(axis, "D of y given x, nats", "D of y, nats", title, legend=8, log="xy")


def _draw_divergences(axis: plot.Axes, found: Mapping[str, Divergences]) -> None:
    places = np.arange(len(found))
    for number, (key, (name, colour)) in enumerate(DIVERGENCES.items()):
        heights = [values[key] for values in found.values()]
        axis.bar(places + 0.2 * (number - 1.5), heights, 0.2, color=colour, label=name)
    axis.set_xticks(places, list(found), fontsize=8, rotation=20)
    plot.label(axis, y="D of ID from OOD, nats", title="features of the model", legend=8)


def _random_sides(random: np.random.Generator, same: bool) -> tuple[float, float]:
    """Both sides for a random pair of joint distributions, from sharp to flat."""
    num_x, num_y = random.integers(2, 12, size=2)
    sharpness = 10 ** random.uniform(-0.7, 1, size=2)
    # For ID and OOD: a row of probabilities of y for each x.
    given_x = [random.dirichlet(np.full(num_y, sharp), size=num_x) + 1e-9 for sharp in sharpness]
    marginals = random.dirichlet(np.ones(num_x), size=2)
    if same:
        marginals[1] = marginals[0]
    elif random.random() < 0.5:
        # Most of the difference is in x, and y follows it.
        given_x[1] = given_x[0] + 0.2 * given_x[1]
    joint = []
    for marginal, conditional in zip(marginals, given_x):
        normalised = conditional / conditional.sum(axis=1, keepdims=True)
        joint.append(marginal[:, None] * normalised)
    return sides(joint[0], joint[1])
