"""What a score costs as classes and features grow."""

from __future__ import annotations

import pytest
import torch

from fdbd import FDBD, Batch, Head
from fdbd.core import geometry
from fdbd.paper.complexity import ALL_PAIRS, FOLDED, as_printed, costs, slope


def test_the_printed_form_is_fdbd() -> None:
    generator = torch.Generator().manual_seed(0)
    head = Head(torch.randn(7, 5, generator=generator), torch.randn(7, generator=generator))
    train, z = torch.randn(40, 5, generator=generator), torch.randn(9, 5, generator=generator)
    logits = head(z)
    norms = geometry.pairwise_norms(head).float().fill_diagonal_(1)
    found = as_printed(z, logits, logits.argmax(dim=1), norms, train.mean(dim=0))
    assert torch.allclose(found, FDBD().fit(Batch(train), head).score(Batch(z)), atol=1e-5)


def test_the_slope_is_that_of_a_power() -> None:
    assert slope([10, 100, 1000], [3 * n**0.5 for n in (10, 100, 1000)]) == pytest.approx(0.5)


@pytest.mark.slow
def test_the_folded_cost_does_not_grow_with_the_number_of_classes() -> None:
    settings = {"batch": 256, "bank": 300, "budget": 0.3}
    sizes = [10, 30, 100, 300, 1000]
    rounds = [[costs(classes, 256, settings) for classes in sizes] for _ in range(3)]
    # The least of three: a busy machine only ever adds.
    found = [{name: min(part[name] for part in parts) for name in parts[0]} for parts in zip(*rounds)]
    folded, printed = ([part[name] for part in found] for name in (FOLDED, ALL_PAIRS))
    assert slope(sizes, folded) < 0.1
    assert slope(sizes, printed) > slope(sizes, folded) + 0.1
    assert found[-1]["KNN"] > folded[-1]
