"""p-values weighted by a likelihood ratio keep their promise under covariate shift."""

import pytest
import torch

import fdbd
from fdbd.decision.weighted import effective_samples, weighted_p_values


def test_equal_ratios_give_the_p_values_of_a_threshold() -> None:
    generator = torch.Generator().manual_seed(0)
    calibration = torch.randn(99, generator=generator).round(decimals=1)
    scores = torch.randn(500, generator=generator).round(decimals=1)
    expected = fdbd.Threshold.conformal(calibration, 0.05).p_values(scores)
    found = weighted_p_values(calibration, torch.full((99,), 3.0), scores, torch.full((500,), 3.0))
    torch.testing.assert_close(found, expected.double(), rtol=0, atol=1e-6)


def test_each_p_value_is_the_share_of_weight_at_or_below() -> None:
    generator = torch.Generator().manual_seed(1)
    calibration = torch.randn(30, generator=generator)
    ratios = torch.rand(30, generator=generator)
    scores = torch.randn(20, generator=generator)
    own = torch.rand(20, generator=generator)
    found = weighted_p_values(calibration, ratios, scores, own)
    for score, ratio, p_value in zip(scores, own, found):
        weight = ratios[calibration <= score].double().sum() + ratio
        assert p_value.item() == pytest.approx(float(weight / (ratios.double().sum() + ratio)))


def test_the_level_holds_under_the_shift_that_the_ratios_describe() -> None:
    # A covariate x decides the score; new data have more of the large x. Their ratio is 2x.
    generator = torch.Generator().manual_seed(2)
    trials, n, alpha = 4000, 60, 0.1
    covariates = torch.rand(trials, n, generator=generator)
    new = torch.rand(trials, generator=generator).sqrt()
    flagged = plain = 0
    for known, x in zip(covariates, new):
        calibration = -known
        score = -x[None]
        found = weighted_p_values(calibration, 2 * known, score, 2 * x[None])
        flagged += int(found <= alpha)
        plain += int(fdbd.Threshold.conformal(calibration, alpha).p_values(score) <= alpha)
    slack = 3 * (alpha * (1 - alpha) / trials) ** 0.5
    assert flagged / trials <= alpha + slack
    # What the weights are for.
    assert plain / trials > alpha + slack


def test_scores_that_are_not_finite_get_the_smallest_p_value() -> None:
    scores = [float("nan"), float("inf"), float("-inf")]
    found = weighted_p_values([1.0, 2.0], [1.0, 1.0], scores, [0.0, 5.0, 1.0])
    assert found.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ([1.0], "1, expected one for each of 2"),
        ([1.0, -1.0], "at least 0"),
        ([1.0, float("nan")], "finite"),
    ],
)
def test_ratios_that_make_no_sense_are_refused(ratios: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        weighted_p_values([1.0, 2.0], ratios, [1.0], [1.0])


def test_few_heavy_samples_count_as_few() -> None:
    assert effective_samples([1.0] * 10 + [100.0]) < 1.3
    assert effective_samples([]) == 0.0
