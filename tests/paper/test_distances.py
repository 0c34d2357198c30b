"""The attack, the exact projection and the closed form, in their order."""

from __future__ import annotations

import pytest
import torch

from fdbd import Head, geometry
from fdbd.paper.closed_form import CarliniWagner, relative_gaps
from fdbd.paper.settings import Attack


@pytest.fixture(scope="module")
def pairs():
    generator = torch.Generator().manual_seed(3)
    head = Head(torch.randn(6, 4, generator=generator), torch.randn(6, generator=generator))
    z = torch.randn(30, 4, generator=generator)
    exact = geometry.exact_distances(z, head)
    closed = geometry.distances(z.double(), head)
    rows, targets = (exact.isfinite() & (exact < 2)).nonzero(as_tuple=True)
    return head, z, rows, targets, exact[rows, targets], closed[rows, targets]


def test_the_attack_is_never_below_the_exact_distance_which_is_never_below_the_closed_form(
    pairs,
) -> None:
    head, z, rows, targets, exact, closed = pairs
    found = CarliniWagner(rate=0.02, steps=200).distances(z[rows], head, targets).double()
    assert found.isfinite().double().mean() > 0.9
    assert (closed <= exact * (1 + 1e-9)).all()
    assert (found >= exact * (1 - 1e-5)).all()
    reached = found.isfinite()
    assert (found[reached] / exact[reached] - 1).median() < 0.1


def test_attacked_points_of_the_batch_are_those_of_single_attacks(pairs) -> None:
    head, z, rows, targets, *_ = pairs
    attack = CarliniWagner(rate=0.02, steps=40, searches=2)
    together = attack.distances(z[rows[:4]], head, targets[:4])
    alone = torch.cat(
        [attack.distances(z[rows[i], None], head, targets[i, None]) for i in range(4)]
    )
    assert torch.allclose(together, alone, rtol=1e-5, atol=1e-6)


def test_a_class_that_is_never_predicted_is_never_reached() -> None:
    head = Head(torch.tensor([[1.0], [0.0], [-1.0]]), torch.tensor([0.0, -1.0, 0.0]))
    found = CarliniWagner(steps=50).distances(torch.tensor([[0.5]]), head, torch.tensor([1]))
    assert found.isinf().all()


def test_the_gap_is_zero_with_two_classes_and_positive_with_many(pairs) -> None:
    head, z, *_ = pairs
    assert relative_gaps(z, Head(head.weight[:2], head.bias[:2])).max() < 1e-9
    assert relative_gaps(z, head).max() > 0.01


def test_distance_quality_orders_the_three_and_reports_the_gap(tiny, verdicts) -> None:
    attack = Attack(initial_constant=2.0, rate=0.02, steps=60, searches=2)
    result = tiny("distance-quality", samples=60, attacked=30, one_by_one=1, attack=attack)
    assert verdicts(result)["closed form ≤ exact distance ≤ attack, for every pair"] == "holds"
    gaps = result.data["gap"]["cross-entropy"]["cifar10"]
    assert 0 <= gaps["median"] <= gaps["p95"] <= gaps["maximum"] < 1
    assert result.data["largest difference of single and batched"] < 1e-4
