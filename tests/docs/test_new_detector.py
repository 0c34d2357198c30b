"""The guide to a new detector, run block by block."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fdbd
from fdbd import Batch
from fdbd.core import configuration
from fdbd.core.configuration import registered

GUIDE = Path(__file__).parents[2] / "docs" / "new-detector.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
GUIDES_NAMES = ("prototype", "sqrt", "flipped")


@pytest.fixture
def names(tmp_path, monkeypatch) -> dict:
    """What the guide's code defines; its detectors leave the registry again. A detector of the same
    name, such as a reader's own file after the guide, makes room for the time of the test."""
    others = {name: kind for name, kind in registered().items() if name not in GUIDES_NAMES}
    monkeypatch.setattr(configuration, "_REGISTRY", others)
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "guide"}
    for block in BLOCKS:
        exec(compile(block, str(GUIDE), "exec"), names)
    return names


def test_the_code_of_the_guide_runs_as_it_stands(names: dict) -> None:
    assert set(GUIDES_NAMES) <= set(fdbd.list_detectors())
    assert bool(names["guard"].decide(Batch(torch.full((1, 8), torch.nan))).is_ood)


def test_the_detector_has_at_most_fifty_lines() -> None:
    assert len(BLOCKS[0].splitlines()) <= 50


def test_its_detector_closes_and_says_what_it_misses(names: dict) -> None:
    features, labels, head = names["features"], names["labels"], names["head"]
    with pytest.raises(ValueError, match="needs labels"):
        names["Prototype"]().fit(Batch(features), head)
    broken = features[:2].clone()
    broken[1, 0] = torch.inf
    scores = names["Prototype"]().fit(Batch(features, None, labels), head).score(Batch(broken))
    assert torch.isfinite(scores[0])
    assert scores[1] == -torch.inf
    with pytest.raises(ValueError, match=r"fdbd.Guard\(model, 'flipped'\)"):
        fdbd.create("flipped").fit(Batch(features), head)
