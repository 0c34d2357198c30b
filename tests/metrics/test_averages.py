"""Means over OOD sets that share their ID samples: their errors against a bootstrap of the
samples."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from fdbd import metrics
from fdbd.metrics.comparison import Comparison, compare, influences


def scores(seed: int = 0) -> tuple[np.ndarray, list[np.ndarray], np.ndarray, list[np.ndarray]]:
    """Scores of two detectors, correlated as those of the same samples are, on one ID and three OOD
    sets."""
    rng = np.random.default_rng(seed)

    def both(count: int, mean: float) -> tuple[np.ndarray, np.ndarray]:
        common = rng.normal(mean, 1, count)
        return common + 0.5 * rng.normal(size=count), common + 0.5 * rng.normal(size=count)

    inside = both(300, 1.5)
    outside = [both(count, mean) for count, mean in ((120, 0.0), (200, 0.3), (80, -0.5))]
    return inside[0], [part[0] for part in outside], inside[1], [part[1] for part in outside]


def resampled(statistic, sides: list[list[np.ndarray]], draws: int = 600) -> np.ndarray:
    """The statistic on resamples: each set's rows are drawn once and serve every detector."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(draws):
        rows = [rng.integers(0, len(part), len(part)) for part in sides[0]]
        drawn = []
        for side in sides:
            drawn.append([part[chosen] for part, chosen in zip(side, rows)])
        found.append(statistic(drawn))
    return np.array(found)


def mean_of(side: list[np.ndarray], measure=metrics.auroc) -> float:
    inside, *outside = side
    return float(np.mean([measure(inside, part) for part in outside]))


def test_the_error_of_a_mean_difference_is_that_of_a_paired_bootstrap() -> None:
    id_a, ood_a, id_b, ood_b = scores()
    result = compare(
        [influences(id_a, part) for part in ood_a], [influences(id_b, part) for part in ood_b]
    )
    assert result.difference == pytest.approx(mean_of([id_a, *ood_a]) - mean_of([id_b, *ood_b]))
    drawn = resampled(
        lambda sides: mean_of(sides[0]) - mean_of(sides[1]), [[id_a, *ood_a], [id_b, *ood_b]]
    )
    assert result.standard_error == pytest.approx(drawn.std(ddof=1), rel=0.15)
    single = [metrics.delong_test(id_a, a, id_b, b).standard_error for a, b in zip(ood_a, ood_b)]
    assert result.standard_error < 0.85 * np.mean(single)


@pytest.mark.parametrize("positive", ["id", "ood"])
@pytest.mark.parametrize("metric", ["auroc", "fpr", "aupr_in", "aupr_out"])
def test_the_interval_of_a_mean_is_about_that_of_a_bootstrap(metric: str, positive: str) -> None:
    inside, outside, _, _ = scores(2)
    evaluations = [metrics.evaluate(inside, part, positive=positive) for part in outside]
    mean = metrics.average(evaluations, metric, inside, outside)
    parts = [getattr(evaluation, metric) for evaluation in evaluations]
    assert float(mean) == pytest.approx(np.mean(parts))
    assert mean.low < mean < mean.high

    measures = {
        "auroc": metrics.auroc,
        "fpr": partial(metrics.fpr_at_tpr, positive=positive),
        "aupr_in": partial(metrics.aupr, positive="id"),
        "aupr_out": partial(metrics.aupr, positive="ood"),
    }
    drawn = resampled(lambda sides: mean_of(sides[0], measures[metric]), [[inside, *outside]], 300)
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert 0.75 < (mean.high - mean.low) / (high - low) < 1.6
    assert mean.high - mean.low <= 1.001 * np.mean([part.high - part.low for part in parts])


def test_a_mean_of_one_set_and_one_without_scores_keep_the_intervals_of_the_sets() -> None:
    inside, outside, _, _ = scores()
    evaluations = [metrics.evaluate(inside, part) for part in outside]
    single = metrics.average(evaluations[:1], "auroc", inside, outside[:1])
    assert single.interval == pytest.approx(evaluations[0].auroc.interval)
    blind = metrics.average(evaluations, "auroc")
    assert blind.low == pytest.approx(np.mean([evaluation.auroc.low for evaluation in evaluations]))


def test_a_verdict_needs_a_significant_difference() -> None:
    assert Comparison.from_difference(0.0, 0.0).verdict() == "undecided"
    assert Comparison.from_difference(1e-9, 0.0).verdict() == "higher"
    assert Comparison.from_difference(-0.03, 0.01).verdict() == "lower"
    assert Comparison.from_difference(0.019, 0.01).verdict() == "undecided"
    assert Comparison.from_difference(0.019, 0.01).verdict(level=0.1) == "higher"
