"""The picture of one sample: what its histogram holds."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fdbd.pages.explanation import SampleExplanation, draw, histogram_range


def sample(score: float, calibration: np.ndarray) -> SampleExplanation:
    boundaries = [{"name": "$cat$", "distance": 1.0, "share": 0.5}]
    return SampleExplanation(
        predicted="dog",
        score=score,
        p_value=0.1,
        is_ood=True,
        threshold=0.5,
        standing=0.1,
        boundaries=boundaries,
        others=3,
        members=[],
        calibration=calibration,
    )


@pytest.mark.parametrize("score", [-40.0, 0.0, 7.5])
def test_no_score_is_clipped_to_the_edge(score: float) -> None:
    calibration = np.random.default_rng(0).normal(size=500)
    low, high = histogram_range(sample(score, calibration))
    assert low < min(score, calibration.min())
    assert high > max(score, calibration.max())


def test_one_absurd_calibration_score_does_not_hide_the_others() -> None:
    calibration = np.append(np.random.default_rng(0).normal(size=1000), [1e9, -math.inf])
    low, high = histogram_range(sample(0.0, calibration))
    assert -40 < low < high < 40


@pytest.mark.parametrize("score", [0.3, 12.0, math.nan, -math.inf])
def test_the_picture_is_written_for_any_score(score: float, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    calibration = np.append(np.random.default_rng(0).normal(size=200), 1e9)
    pixels = np.zeros((16, 16, 3), np.uint8)
    path = draw(sample(score, calibration), pixels, "a$b.png", tmp_path / "p.png")
    assert path.stat().st_size > 5000
