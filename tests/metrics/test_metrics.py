"""The measures against independent definitions, their intervals against simulation."""

from __future__ import annotations

import copy
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from fdbd import metrics
from fdbd.metrics.intervals import fpr_interval
from fdbd.metrics.points import Counts, average_precision, false_positive_rate

INF = math.inf
GOLDEN = (
    Path(__file__).parents[3] / "shared" / "data" / "openood_scores" / "scale_cifar10_resnet18.npz"
)

# Few distinct values, so that ties abound, and both infinities.
tied = st.lists(
    st.sampled_from([-INF, -2.0, -1.0, 0.0, 0.5, 1.0, 2.0, INF]), min_size=1, max_size=12
)
spread = st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=12)
samples = st.one_of(tied, spread)
rates = st.sampled_from([0.05, 0.3, 0.5, 0.55, 0.7, 0.8, 0.9, 0.95, 1.0])

unhurried = settings(deadline=None, max_examples=60, derandomize=True)


def auroc_by_pairs(inside: list[float], outside: list[float]) -> float:
    wins = 0.0
    for x in inside:
        for y in outside:
            wins += (x > y) + 0.5 * (x == y)
    return wins / len(inside) / len(outside)


def fpr_by_trying_all_thresholds(inside: list[float], outside: list[float], tpr: float) -> float:
    allowed = []
    for threshold in {*inside, *outside}:
        accepted = sum(x >= threshold for x in inside)
        if accepted >= tpr * len(inside) - 1e-9:
            allowed.append(threshold)
    return sum(y >= max(allowed) for y in outside) / len(outside)


def sklearn_ready(inside: list[float], outside: list[float]) -> tuple[list[int], np.ndarray]:
    scores = np.array([*inside, *outside])
    return [1] * len(inside) + [0] * len(outside), np.nan_to_num(scores, posinf=1e9, neginf=-1e9)


@unhurried
@given(samples, samples)
def test_auroc_is_the_share_of_pairs_in_the_right_order(
    inside: list[float], outside: list[float]
) -> None:
    assert metrics.auroc(inside, outside) == pytest.approx(
        auroc_by_pairs(inside, outside), abs=1e-12
    )


@unhurried
@given(samples, samples)
def test_auroc_and_aupr_agree_with_scikit_learn(inside: list[float], outside: list[float]) -> None:
    labels, scores = sklearn_ready(inside, outside)
    assert metrics.auroc(inside, outside) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert metrics.aupr(inside, outside) == pytest.approx(
        average_precision_score(labels, scores), abs=1e-12
    )
    flipped = average_precision_score(1 - np.array(labels), -scores)
    assert metrics.aupr(inside, outside, positive="ood") == pytest.approx(flipped, abs=1e-12)


@unhurried
@given(samples, samples, rates)
def test_fpr_is_that_of_the_largest_threshold_that_keeps_the_tpr(
    inside: list[float], outside: list[float], tpr: float
) -> None:
    expected = fpr_by_trying_all_thresholds(inside, outside, tpr)
    assert metrics.fpr_at_tpr(inside, outside, tpr) == pytest.approx(expected, abs=1e-12)
    negated = [-y for y in outside], [-x for x in inside]
    expected = fpr_by_trying_all_thresholds(*negated, tpr)
    assert metrics.fpr_at_tpr(inside, outside, tpr, positive="ood") == pytest.approx(
        expected, abs=1e-12
    )


def test_a_tie_group_at_the_threshold_is_accepted_whole() -> None:
    inside = [1.0] * 10 + [2.0] * 90
    assert metrics.fpr_at_tpr(inside, [1.0, 1.0, 0.0, 2.0], 0.95) == 0.75
    assert metrics.fpr_at_tpr(inside, [1.0, 1.0, 0.0, 2.0], 0.90) == 0.25


def test_target_rates_are_meant_as_decimals() -> None:
    inside = list(range(100))
    # Rounding would ask for 56.
    assert 0.55 * 100 > 55
    assert metrics.fpr_at_tpr(inside, [44.5, 45.5], 0.55) == 0.5
    assert metrics.fpr_at_tpr(inside, [44.5, 45.5], 1 - 0.45) == 0.5


@unhurried
@given(spread, spread)
def test_swapping_id_and_ood_gives_one_minus_auroc(
    inside: list[float], outside: list[float]
) -> None:
    assert metrics.auroc(outside, inside) == pytest.approx(
        1 - metrics.auroc(inside, outside), abs=1e-12
    )


@unhurried
@given(
    st.lists(st.integers(-50, 50), min_size=1, max_size=15),
    st.lists(st.integers(-50, 50), min_size=1, max_size=15),
)
def test_all_measures_ignore_a_monotone_transform(inside: list[int], outside: list[int]) -> None:
    plain = metrics.evaluate(inside, outside)
    bent = metrics.evaluate([math.exp(x / 10) for x in inside], [math.exp(y / 10) for y in outside])
    assert plain.to_dict() == bent.to_dict()


@unhurried
@given(samples, samples, st.sampled_from(["id", "ood"]), st.sampled_from([0.5, 0.95, 1.0]))
def test_every_interval_contains_its_value(
    inside: list[float], outside: list[float], side: str, tpr: float
) -> None:
    result = metrics.evaluate(inside, outside, positive=side, tpr=tpr, bootstrap=200)
    for estimate in (result.auroc, result.fpr, result.aupr_in, result.aupr_out):
        assert 0 <= estimate.low <= estimate <= estimate.high <= 1


def test_tensors_arrays_and_lists_give_the_same() -> None:
    inside = torch.randn(50) + 1
    outside = torch.randn(40)
    expected = metrics.evaluate(inside, outside)
    assert metrics.evaluate(inside.numpy(), outside.numpy()) == expected
    assert metrics.evaluate(inside.tolist(), outside.tolist()) == expected
    assert metrics.evaluate(inside.requires_grad_(), outside.double()) == expected
    metrics.evaluate(inside.bfloat16(), outside.half())


def test_infinite_scores_rank_at_the_ends() -> None:
    result = metrics.evaluate([INF, 1.0, INF], [-INF, -INF, 0.0])
    assert (result.auroc, result.fpr95, result.aupr_in, result.aupr_out) == (1, 0, 1, 1)
    assert metrics.auroc([-INF], [-INF]) == 0.5


@pytest.mark.parametrize(
    ("inside", "outside", "message"),
    [
        ([1.0, math.nan], [0.0], r"id_scores holds 1 NaN of 2, the first at index 1"),
        ([1.0], [], r"ood_scores is empty"),
        ([[1.0]], [0.0], r"id_scores has shape \(1, 1\), expected"),
        (3.0, [0.0], r"id_scores has shape \(\)"),
    ],
)
def test_bad_scores_are_named(inside: object, outside: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metrics.evaluate(inside, outside)


def test_bad_options_are_named() -> None:
    for options, message in [
        ({"tpr": 0.0}, "tpr is 0.0"),
        ({"tpr": 1.5}, "tpr is 1.5"),
        ({"tpr": math.nan}, "tpr is nan"),
        ({"positive": "in"}, "positive is 'in'"),
        ({"confidence": 95}, "confidence is 95"),
        ({"bootstrap": 5}, "bootstrap is 5"),
    ]:
        with pytest.raises(ValueError, match=message):
            metrics.evaluate([1.0], [0.0], **options)
    with pytest.raises(TypeError, match="id_scores must be a sequence of numbers"):
        metrics.evaluate(["high"], [0.0])


def test_conventions_differ_only_in_fpr() -> None:
    rng = np.random.default_rng(0)
    inside = rng.normal(1, 1, 300)
    outside = rng.normal(0, 2, 200)
    a = metrics.evaluate(inside, outside)
    b = metrics.evaluate(inside, outside, positive="ood")
    assert (a.auroc, a.aupr_in, a.aupr_out) == (b.auroc, b.aupr_in, b.aupr_out)
    assert a.fpr != b.fpr
    assert b.fpr == metrics.evaluate(-outside, -inside).fpr


def test_an_evaluation_is_a_plain_record() -> None:
    result = metrics.evaluate([1.0, 2.0, 3.0], [0.0, 1.0], tpr=0.9, positive="ood")
    record = json.loads(json.dumps(result.to_dict()))
    assert record["fpr"]["value"] == result.fpr
    assert (record["tpr"], record["positive"], record["num_id"], record["num_ood"]) == (
        0.9,
        "ood",
        3,
        2,
    )
    assert not hasattr(result, "fpr95")
    for copied in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
        assert copied == result
        assert copied.auroc.interval == result.auroc.interval
    assert "FPR90" in str(result)
    assert "OOD positive" in str(result)


def test_the_seed_decides_the_interval() -> None:
    rng = np.random.default_rng(0)
    inside = rng.normal(1, 1, 200)
    outside = rng.normal(0, 1, 200)
    first, again, other = (metrics.evaluate(inside, outside, seed=seed) for seed in (0, 0, 1))
    assert first.to_dict() == again.to_dict()
    assert first.fpr.interval != other.fpr.interval


def test_roc_curve_passes_through_the_measures() -> None:
    rng = np.random.default_rng(0)
    inside = rng.normal(1, 1, 3000).round(3)
    outside = rng.normal(0, 1, 2000).round(3)
    fpr, tpr, _ = metrics.roc_curve(inside, outside, points=100_000)
    assert (np.diff(fpr) * (tpr[1:] + tpr[:-1]) / 2).sum() == pytest.approx(
        metrics.auroc(inside, outside), abs=1e-12
    )
    assert fpr[np.argmax(tpr >= 0.95)] == metrics.fpr_at_tpr(inside, outside)
    thin_fpr, thin_tpr, thin_thresholds = metrics.roc_curve(inside, outside, points=50)
    assert len(thin_fpr) <= 50
    assert (thin_fpr[0], thin_tpr[0], thin_fpr[-1], thin_tpr[-1]) == (0, 0, 1, 1)
    assert thin_thresholds[0] == INF
    for f, t, threshold in zip(thin_fpr[1:], thin_tpr[1:], thin_thresholds[1:]):
        assert f == pytest.approx(np.mean(outside >= threshold))
        assert t == pytest.approx(np.mean(inside >= threshold))
    with pytest.raises(ValueError, match="points is 1"):
        metrics.roc_curve(inside, outside, points=1)


def test_delong_variance_matches_its_definition() -> None:
    rng = np.random.default_rng(0)
    inside = rng.normal(1, 1, (2, 40)).round(1)
    outside = rng.normal(0, 1, (2, 30)).round(1)
    wins = (inside[:, :, None] > outside[:, None, :]) + 0.5 * (
        inside[:, :, None] == outside[:, None, :]
    )
    by_id = wins.mean(2)
    by_ood = wins.mean(1)
    covariance = np.cov(by_id) / 40 + np.cov(by_ood) / 30
    result = metrics.delong_test(inside[0], outside[0], inside[1], outside[1])
    assert result.difference == pytest.approx(wins[0].mean() - wins[1].mean())
    error = math.sqrt(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    assert result.standard_error == pytest.approx(error)
    assert result.p_value == pytest.approx(math.erfc(abs(result.difference) / error / math.sqrt(2)))


def test_delong_test_is_uniform_under_equal_detectors_and_small_under_different_ones() -> None:
    rng = np.random.default_rng(0)
    p_values = []
    for _ in range(400):
        truth_id = rng.normal(1, 1, 150)
        truth_ood = rng.normal(0, 1, 150)
        noisy = [
            truth + rng.normal(0, 1, 150) for truth in (truth_id, truth_ood, truth_id, truth_ood)
        ]
        p_values.append(metrics.delong_test(*noisy).p_value)
    assert 0.02 < np.mean(np.array(p_values) < 0.05) < 0.09
    better = metrics.delong_test(truth_id + 1, truth_ood, noisy[0], noisy[1])
    assert better.difference > 0
    assert better.p_value < 0.001
    assert metrics.delong_test(truth_id, truth_ood, 2 * truth_id, 2 * truth_ood).p_value == 1
    assert metrics.delong_test([1, 2], [0, 0], [0, 0], [1, 2]).p_value == 0


def test_delong_test_wants_the_same_samples() -> None:
    with pytest.raises(ValueError, match="2 ID and 2 OOD against 3 ID and 2 OOD"):
        metrics.delong_test([1, 2], [0, 1], [1, 2, 3], [0, 1])
    with pytest.raises(ValueError, match="two samples per side"):
        metrics.delong_test([1], [0, 1], [1], [0, 1])
    with pytest.raises(ValueError, match="id_scores_b holds 1 NaN"):
        metrics.delong_test([1, 2], [0, 1], [1, math.nan], [0, 1])


def test_perfect_separation_has_an_interval() -> None:
    result = metrics.evaluate(range(1000, 2000), range(1000))
    assert result.auroc == result.aupr_in == result.aupr_out == 1
    assert result.auroc.low == pytest.approx(0.025 ** (1 / 1000), abs=1e-6)
    assert result.auroc.high == 1
    assert 0.95 < result.aupr_in.low < 1
    assert result.fpr == 0
    assert 3 / 1000 < result.fpr.high < 6 / 1000
    reverse = metrics.evaluate(range(1000), range(1000, 2000))
    assert reverse.auroc == 0
    assert reverse.auroc.high == pytest.approx(1 - result.auroc.low)


def test_constant_scores_and_single_samples_have_intervals() -> None:
    result = metrics.evaluate([-INF] * 300, [-INF] * 100)
    assert (result.auroc, result.fpr95, result.aupr_in) == (0.5, 1, 0.75)
    assert 0.3 < result.auroc.low < 0.5 < result.auroc.high < 0.7
    assert result.aupr_in.low < 0.75 < result.aupr_in.high < 0.9
    single = metrics.evaluate([1.0], [0.0])
    assert single.auroc.interval == pytest.approx((0.025, 1))


def test_the_bootstrap_agrees_with_resampling_both_sides() -> None:
    rng = np.random.default_rng(0)
    inside = rng.normal(2, 1, 800)
    outside = rng.normal(0, 1, 600)
    low, high = fpr_interval([Counts.from_scores(inside, outside)], 0.95, 0.95, 20_000, seed=0)
    resampled = [
        metrics.fpr_at_tpr(rng.choice(inside, len(inside)), rng.choice(outside, len(outside)))
        for _ in range(2000)
    ]
    assert (low, high) == pytest.approx(tuple(np.quantile(resampled, [0.025, 0.975])), abs=0.02)


# Coverage: (ID sampler, OOD sampler), AUROC from 0.64 to 0.998, FPR95 from 0.87 to 0.009.
Sampler = Callable[[np.random.Generator, int], np.ndarray]
SETTINGS: dict[str, tuple[Sampler, Sampler]] = {
    "weak": (lambda rng, n: rng.normal(0.5, 1, n), lambda rng, n: rng.normal(0, 1, n)),
    "good": (lambda rng, n: rng.normal(2, 1, n), lambda rng, n: rng.normal(0, 1, n)),
    "low_fpr": (lambda rng, n: rng.normal(4, 1, n), lambda rng, n: rng.normal(0, 1, n)),
    "ties": (
        lambda rng, n: rng.normal(3, 1, n).round(),
        lambda rng, n: rng.normal(0, 1, n).round(),
    ),
    "heavy_tails": (lambda rng, n: rng.standard_t(2, n) + 3, lambda rng, n: rng.standard_t(2, n)),
    "wide_ood": (lambda rng, n: rng.normal(3, 1, n), lambda rng, n: rng.normal(0, 3, n)),
}
SIZES = [(200, 200), (1000, 300), (200, 1000)]


def population(name: str, sizes: tuple[int, int]) -> dict[str, float]:
    """The measures of the distributions themselves, from a large sample; AUPR at the class balance
    of `sizes`."""
    rng = np.random.default_rng(123)
    n = 400_000
    inside, outside = (sampler(rng, n) for sampler in SETTINGS[name])
    counts = Counts.from_scores(inside, outside)
    balanced = counts._replace(
        positive=counts.positive * sizes[0], negative=counts.negative * sizes[1]
    )
    return {
        "auroc": metrics.auroc(inside, outside),
        "fpr": false_positive_rate(counts, 0.95),
        "aupr_in": average_precision(balanced),
        "aupr_out": average_precision(balanced.swapped()),
    }


def coverage(name: str, sizes: tuple[int, int], runs: int) -> dict[str, float]:
    truth = population(name, sizes)
    rng = np.random.default_rng(7)
    covered = dict.fromkeys(truth, 0)
    for seed in range(runs):
        inside, outside = (sampler(rng, n) for sampler, n in zip(SETTINGS[name], sizes))
        result = metrics.evaluate(inside, outside, bootstrap=1000, seed=seed)
        for measure, value in truth.items():
            estimate = getattr(result, measure)
            covered[measure] += estimate.low <= value <= estimate.high
    return {measure: count / runs for measure, count in covered.items()}


@pytest.mark.parametrize(
    ("name", "sizes"), [(name, SIZES[i % 3]) for i, name in enumerate(SETTINGS)]
)
def test_intervals_cover_the_truth(name: str, sizes: tuple[int, int]) -> None:
    runs = 300
    # 95 % coverage passes but for chance; `slow` looks closer.
    slack = 2.5 * math.sqrt(0.95 * 0.05 / runs)
    for measure, share in coverage(name, sizes, runs).items():
        assert share >= 0.95 - slack, f"{measure} covers {share:.3f}"


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [*SIZES, (1000, 1000)])
@pytest.mark.parametrize("name", SETTINGS)
def test_intervals_cover_the_truth_in_a_large_simulation(name: str, sizes: tuple[int, int]) -> None:
    for measure, share in coverage(name, sizes, 1500).items():
        assert share >= 0.93, f"{measure} covers {share:.3f}"


def test_a_binomial_interval_would_not_cover() -> None:
    """Why the interval of FPR@TPR is what it is: with the threshold taken as known, coverage
    collapses."""
    truth = population("good", (200, 1000))["fpr"]
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(300):
        inside, outside = (sampler(rng, n) for sampler, n in zip(SETTINGS["good"], (200, 1000)))
        rate = metrics.fpr_at_tpr(inside, outside)
        covered += abs(rate - truth) <= 1.96 * math.sqrt(rate * (1 - rate) / 1000)
    assert covered / 300 < 0.75


@pytest.mark.skipif(
    not GOLDEN.exists(), reason="the published OpenOOD scores are not on this machine"
)
@pytest.mark.parametrize(
    ("ood", "expected"),
    [("texture", (80.39, 83.94, 84.19, 80.27)), ("cifar100", (81.78, 81.27, 75.68, 83.24))],
)
def test_published_openood_figures_are_reproduced(ood: str, expected: tuple[float, ...]) -> None:
    data = np.load(GOLDEN)
    runs = [
        metrics.evaluate(data[f"id_s{s}"], data[f"{ood}_s{s}"], positive="ood", bootstrap=100)
        for s in range(3)
    ]
    mean = []
    for metric in ("fpr95", "auroc", "aupr_in", "aupr_out"):
        mean.append(100 * np.mean([getattr(run, metric) for run in runs]))
    assert mean[0] == pytest.approx(expected[0], abs=0.05)
    assert mean[1] == pytest.approx(expected[1], abs=0.01)
    # Published by trapezoids, here by steps.
    assert mean[2:] == pytest.approx(list(expected[2:]), abs=0.02)


@pytest.mark.slow
def test_importing_the_measures_does_not_import_scikit_learn() -> None:
    code = "import sys, fdbd.metrics; print('sklearn' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        == "False"
    )
