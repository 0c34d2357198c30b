"""The theorem and the propositions: they hold under the paper's model, and the search sees when
they do not."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdbd import Head
from fdbd.paper.closed_form import nearer_points
from fdbd.paper.propositions import (
    _Histograms,
    band,
    boundary_distance,
    cap_angle,
    kl,
    separation_limit,
    sides,
    simplex_etf,
    sphere,
)


@pytest.mark.parametrize(("classes", "width"), [(2, 1), (3, 2), (10, 9), (10, 40)])
def test_class_means_are_centred_of_equal_length_and_equiangular(classes: int, width: int) -> None:
    means = simplex_etf(classes, width)
    assert torch.allclose(means.sum(dim=0), torch.zeros(width, dtype=torch.float64), atol=1e-12)
    expected = torch.full(
        (classes, classes), -1 / (classes - 1), dtype=torch.float64
    ).fill_diagonal_(1)
    assert torch.allclose(means @ means.T, expected)
    assert float(boundary_distance(means, means)[0]) == pytest.approx(separation_limit(classes))


def test_the_frame_is_the_same_on_every_machine() -> None:
    side = math.sqrt(3) / 2
    expected = torch.tensor([[side, 0.5, 0], [-side, 0.5, 0], [0, -1, 0]], dtype=torch.float64)
    assert torch.allclose(simplex_etf(3, 3), expected, rtol=1e-15, atol=1e-15)


def test_a_simplex_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="need 4 dimensions, not 3"):
        simplex_etf(5, 3)


def test_points_of_a_cap_are_distributed_as_rejection_would_have_them() -> None:
    generator = torch.Generator().manual_seed(0)
    axis = torch.tensor([0.6, 0.8, 0.0], dtype=torch.float64)
    drawn = band(20_000, axis, 0.2, 1.1, generator)
    accepted = sphere(60_000, 3, generator)
    cosine = accepted @ axis
    accepted = accepted[(cosine < math.cos(0.2)) & (cosine > math.cos(1.1))]
    assert torch.allclose(
        torch.linalg.vector_norm(drawn, dim=1), torch.ones(20_000, dtype=torch.float64)
    )
    for quantile in (0.1, 0.5, 0.9):
        mine, theirs = (float((part @ axis).quantile(quantile)) for part in (drawn, accepted))
        assert mine == pytest.approx(theirs, abs=0.01)
    assert torch.allclose(drawn.mean(dim=0), accepted.mean(dim=0), atol=0.02)


def test_a_cap_in_many_dimensions_is_still_sampled() -> None:
    axis = torch.eye(1, 2000, dtype=torch.float64)[0]
    points = band(50, axis, 0.0, 0.3, torch.Generator().manual_seed(0))
    angles = (points @ axis).clamp(-1, 1).arccos()
    assert (angles <= 0.3 + 1e-9).all()
    assert angles.min() > 0.28, "in 2,000 dimensions nearly all of a cap is at its rim"


def test_a_sphere_that_misses_the_dense_region_has_no_cap() -> None:
    assert math.isnan(cap_angle(0.5, 1.0, 0.4))
    assert cap_angle(1.0, 1.0, math.sqrt(2)) == pytest.approx(math.pi / 2)


def test_the_theorem_holds_and_its_search_would_see_if_it_did_not(tiny, verdicts) -> None:
    finding = tiny("theorem-bound", sizes=[[4, 3], [6, 12]], samples=15, tries=60)
    assert set(verdicts(finding).values()) == {"holds"}


def test_the_search_finds_a_member_of_the_region_just_beyond_the_bound_and_none_before() -> None:
    head = Head(
        torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64),
        torch.zeros(2, dtype=torch.float64),
    )
    z = torch.tensor([[3.0, 1.0]], dtype=torch.float64)
    own = torch.tensor([0])
    target = torch.tensor([1])
    generator = torch.Generator().manual_seed(0)
    assert not nearer_points(z, head, own, target, 0.999, generator).any()
    assert nearer_points(z, head, own, target, 1.001, generator).all()


def test_distance_grows_with_the_radius_unless_a_class_has_a_bias(tiny, verdicts) -> None:
    finding = tiny("proposition-1", sizes=[[3, 4], [10, 16]], points=400, biases=[3.0])
    assert set(verdicts(finding).values()) == {"holds"}


def test_dense_regions_lie_farther_from_boundaries_unless_class_means_are_twins(
    tiny, verdicts
) -> None:
    finding = tiny(
        "proposition-2",
        sizes=[[3, 6], [10, 30]],
        points=800,
        overlapping=[1.2],
        twins=[[5, 10, 0.05, 0.9]],
    )
    found = list(verdicts(finding).values())
    assert (found[0], found[2]) == ("holds", "holds")
    assert all(case["radius"] >= 1 - case["reach"] for case in finding.data["separated"])


def test_kl_of_known_distributions() -> None:
    assert kl(np.array([0.5, 0.5]), np.array([0.25, 0.75])) == pytest.approx(
        0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    )
    assert kl(np.array([1.0, 0.0]), np.array([0.5, 0.5])) == pytest.approx(math.log(2))


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), x=st.integers(2, 6), y=st.integers(2, 6))
def test_conditioning_raises_the_divergence_when_marginals_are_equal(
    seed: int, x: int, y: int
) -> None:
    random = np.random.default_rng(seed)
    marginal = random.dirichlet(np.ones(x))
    first, second = (marginal[:, None] * random.dirichlet(np.ones(y), size=x) for _ in range(2))
    alone, given_x = sides(first, second)
    assert alone <= given_x + 1e-12
    by_hand = sum(
        marginal[i] * kl(first[i] / marginal[i], second[i] / marginal[i]) for i in range(x)
    )
    assert given_x == pytest.approx(by_hand)


def test_without_equal_marginals_conditioning_may_lower_it(tiny, verdicts) -> None:
    # y says what x says.
    copies = np.diag([0.9, 0.1]), np.diag([0.1, 0.9])
    alone, given_x = sides(copies[0] + 1e-12, copies[1] + 1e-12)
    assert alone > 1 > given_x + 0.9
    found = list(verdicts(tiny("proposition-kl", tables=100)).values())
    assert found[:2] == ["holds", "holds"]


def test_a_divergence_on_features_is_decided_by_its_error(tiny) -> None:
    result = tiny("proposition-kl", tables=50, resamples=20)
    (conditional,) = [s for s in result.statements if "conditioning on x" in s.statement]
    (ratio,) = [s for s in result.statements if "dividing y by x" in s.statement]
    for item in (conditional, ratio):
        found = re.findall(r"([+-][\d.]+) ± ([\d.]+)", item.measured)
        assert len(found) == len(result.tables[0].rows)
        # A statement on several sets is refuted by one that is surely below, and holds if all are
        # surely above; the normal quantile of the test and the printed one are rounded apart.
        sure_below = any(float(d) < -1.01 * float(e) for d, e in found)
        sure_above = all(float(d) > 1.01 * float(e) for d, e in found)
        if sure_below:
            assert item.verdict == "does not hold"
        elif sure_above:
            assert item.verdict == "holds"
        else:
            assert item.verdict != "holds" or min(float(d) for d, _ in found) > 0


def test_the_error_of_a_divergence_is_that_of_repeated_samples() -> None:
    random = np.random.default_rng(0)
    edges = np.array([-np.inf, -0.5, 0.5, np.inf])
    histograms = _Histograms(edges, edges, edges)

    def points(shift: float) -> np.ndarray:
        return random.standard_normal((2000, 3)) + shift

    fresh = [histograms.divergences(points(0), points(0.3))["y"] for _ in range(200)]
    inside = points(0)
    outside = points(0.3)
    drawn = []
    for _ in range(200):
        first = inside[random.integers(2000, size=2000)]
        second = outside[random.integers(2000, size=2000)]
        drawn.append(histograms.divergences(first, second)["y"])
    assert np.std(drawn) == pytest.approx(np.std(fresh), rel=0.25)
