"""What a score costs as classes and features grow."""

from __future__ import annotations

import pytest
import torch

from fdbd import FDBD, Batch, Head, geometry
from fdbd.paper.complexity import as_printed, slope


def test_the_printed_form_is_fdbd() -> None:
    generator = torch.Generator().manual_seed(0)
    head = Head(torch.randn(7, 5, generator=generator), torch.randn(7, generator=generator))
    train = torch.randn(40, 5, generator=generator)
    z = torch.randn(9, 5, generator=generator)
    logits = head(z)
    norms = geometry.pairwise_norms(head).float().fill_diagonal_(1)
    found = as_printed(z, logits, logits.argmax(dim=1), norms, train.mean(dim=0))
    assert torch.allclose(found, FDBD().fit(Batch(train), head).score(Batch(z)), atol=1e-5)


def test_the_slope_is_that_of_a_power() -> None:
    assert slope([10, 100, 1000], [3 * n**0.5 for n in (10, 100, 1000)]) == pytest.approx(0.5)


def test_all_detectors_of_the_papers_comparison_have_a_cost(tiny, verdicts) -> None:
    sizes = {"classes": (10, 20), "widths": (16, 32), "bank": 200, "budget": 0.001, "batch": 16}
    result = tiny("complexity", **sizes)
    names = {row[0].partition(",")[0].partition(" ")[0] for row in result.tables[0].rows}
    assert names == {"fDBD", "MSP", "Energy", "KNN", "MDS", "SSD+", "ViM", "ODIN"}
    odin = result.data["odin"]
    assert odin["extra"] > 0.3 * odin["forward"], "a pass back and another one forth"
    (on_odin,) = [statement for statement in verdicts(result) if statement.startswith("ODIN")]
    assert "resnet10_compact" in on_odin
