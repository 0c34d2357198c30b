"""The promise of a map threshold holds for images whose pixels are alike; that of pooled pixels
does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdbd.decision.map_threshold import MapThreshold, PixelShares, image_scores
from fdbd.decision.threshold import Threshold

ALPHA = 0.1


def correlated_maps(generator: torch.Generator, images: int, side: int = 12) -> torch.Tensor:
    """Scores (N, M) of images that differ as a whole: each has a level of its own, and its pixels
    scatter little around it."""
    levels = torch.randn(images, 1, generator=generator)
    return levels + 0.3 * torch.randn(images, side * side, generator=generator)


def threshold_from(scores: torch.Tensor, **target: float) -> MapThreshold:
    shares = PixelShares()
    shares.add(scores)
    return MapThreshold.from_shares(shares, **target)


def test_on_average_no_more_than_alpha_of_an_images_pixels_are_flagged() -> None:
    generator = torch.Generator().manual_seed(0)
    flagged = []
    verdicts = []
    for _ in range(600):
        threshold = threshold_from(correlated_maps(generator, 30), alpha=ALPHA)
        new = correlated_maps(generator, 4)
        flagged.append(float(threshold.is_ood(new).double().mean()))
        verdict = threshold.image_threshold.is_ood(image_scores(new))
        verdicts.append(float(verdict.double().mean()))
    error = np.std(flagged) / np.sqrt(len(flagged))
    assert np.mean(flagged) <= ALPHA + 2 * error
    # And it is not idle: what is allowed is nearly used.
    assert np.mean(flagged) >= ALPHA - 0.04
    assert np.mean(verdicts) <= ALPHA + 2 * np.std(verdicts) / np.sqrt(len(verdicts))


def test_a_threshold_from_pooled_pixels_promises_nothing_about_the_next_image() -> None:
    """It takes thousands of pixels of few images for thousands of independent samples."""
    generator = torch.Generator().manual_seed(1)
    too_many = 0
    for _ in range(300):
        scores = correlated_maps(generator, 8)
        pooled = Threshold.conformal(scores.flatten(), 0.01)
        rate = float(pooled.is_ood(correlated_maps(generator, 40).flatten()).double().mean())
        too_many += rate > 0.02
    # Were pixels exchangeable, a rate of twice the target from 1,152 of them were a rare event.
    assert too_many / 300 > 0.3
    with pytest.raises(ValueError, match="takes at least 99"):
        threshold_from(correlated_maps(generator, 8), alpha=0.01)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(-1e3, 1e3, width=32), min_size=4, max_size=4), min_size=9, max_size=30
    ),
    st.sampled_from([0.1, 0.2, 0.5]),
)
def test_the_threshold_keeps_its_level_on_its_own_images(
    values: list[list[float]], alpha: float
) -> None:
    scores = torch.tensor(values)
    threshold = threshold_from(scores, alpha=alpha)
    count = len(scores)
    share = float(threshold.is_ood(scores).double().mean())
    assert share <= ((count + 1) * alpha - 1) / count + 1e-9


def test_images_of_different_sizes_count_the_same_and_shares_merge() -> None:
    generator = torch.Generator().manual_seed(2)
    small = torch.randn(20, 16, generator=generator)
    large = torch.randn(20, 400, generator=generator) - 1
    together = PixelShares()
    together.add(small)
    together.add(large)
    first = PixelShares()
    first.add(large)
    second = PixelShares()
    second.add(small)
    first.merge(second)
    threshold = MapThreshold.from_shares(together, tpr=0.8)
    assert MapThreshold.from_shares(first, tpr=0.8).value == threshold.value
    shares = [float(threshold.is_ood(part).double().mean(dim=1).mean()) for part in (small, large)]
    assert np.mean(shares) == pytest.approx(0.2, abs=0.01)


def test_a_pixel_that_is_not_finite_is_ood_and_no_calibration_data() -> None:
    threshold = threshold_from(torch.randn(40, 9), tpr=0.9)
    odd = torch.tensor([[float("nan"), float("inf"), -float("inf"), 100.0]])
    assert threshold.is_ood(odd).tolist() == [[True, True, True, False]]
    with pytest.raises(ValueError, match="image 1 has pixels whose score is not finite"):
        PixelShares().add(torch.tensor([[1.0], [float("nan")]]))


def test_it_is_the_same_after_a_file() -> None:
    threshold = threshold_from(torch.randn(60, 25), alpha=0.05)
    again = MapThreshold.from_state(threshold.to_config(), threshold.state_dict())
    maps = torch.randn(5, 3, 3)
    assert torch.equal(again.is_ood(maps), threshold.is_ood(maps))
    assert again.guarantee == threshold.guarantee
    with pytest.raises(ValueError, match="not valid"):
        MapThreshold.from_state({**threshold.to_config(), "kind": "magic"}, threshold.state_dict())
