"""Selective prediction: measures against definitions written with loops, intervals against
simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdbd import metrics
from fdbd.metrics.comparison import standard_error
from fdbd.metrics.selective import Decisions, augrc_influences, aurc_influences, total_of

unhurried = settings(deadline=None, max_examples=60, derandomize=True)
tied = st.lists(
    st.tuples(st.sampled_from([-math.inf, 0.0, 1.0, 2.0, 5.0]), st.booleans()),
    min_size=2,
    max_size=12,
)
outside = st.lists(st.sampled_from([-math.inf, 0.0, 0.5, 2.0]), max_size=6)


def everything(samples: list[tuple[float, bool]], ood: list[float]) -> list[tuple[float, bool]]:
    """(score, failed) of all samples."""
    return [(score, not right) for score, right in samples] + [(score, True) for score in ood]


def aurc_by_thresholds(samples: list[tuple[float, bool]]) -> float:
    risks = []
    for threshold, _ in samples:
        accepted = [failed for score, failed in samples if score >= threshold]
        risks.append(sum(accepted) / len(accepted))
    return sum(risks) / len(risks)


def augrc_by_pairs(samples: list[tuple[float, bool]]) -> float:
    total = 0.0
    for score, failed in samples:
        for other, _ in samples:
            total += failed * ((other < score) + 0.5 * (other == score))
    return total / len(samples) ** 2


@unhurried
@given(tied, outside)
def test_areas_equal_their_definitions_with_ties_and_infinities(
    samples: list[tuple[float, bool]], ood: list[float]
) -> None:
    scores = [score for score, _ in samples]
    right = [is_right for _, is_right in samples]
    together = everything(samples, ood)
    given_ood = ood or None
    found = metrics.aurc(scores, right, given_ood)
    assert found == pytest.approx(aurc_by_thresholds(together))
    assert found.low <= found <= found.high
    found = metrics.augrc(scores, right, given_ood)
    assert found == pytest.approx(augrc_by_pairs(together))
    assert found.low <= found <= found.high


def test_augrc_is_the_formula_of_its_paper() -> None:
    """(1 − AUROC_f) a (1 − a) + (1 − a)²/2, a the share without failure (Traub et al., 2024)."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=300)
    right = rng.random(300) < 0.8
    auroc = metrics.auroc(scores[right], scores[~right])
    share = right.mean()
    expected = (1 - auroc) * share * (1 - share) + (1 - share) ** 2 / 2
    assert metrics.augrc(scores, right) == pytest.approx(expected)


def test_aurc_is_the_sum_that_torch_uncertainty_and_fd_shifts_take() -> None:
    """Both sort by descending confidence, divide the cumulative errors by the ranks, and integrate
    by the trapezoid rule, which leaves out half of the first and of the last risk."""
    rng = np.random.default_rng(1)
    scores = rng.normal(size=2000)
    right = rng.random(2000) < 1 / (1 + np.exp(-2 * scores))
    errors = ~right[np.argsort(-scores)]
    risks = np.cumsum(errors) / np.arange(1, 2001)
    coverages = np.arange(1, 2001) / 2000
    trapezoid = np.trapezoid(risks, coverages) / (1 - 1 / 2000)
    assert metrics.aurc(scores, right) == pytest.approx(trapezoid, abs=3e-4)
    assert metrics.aurc(scores, right) == pytest.approx(risks.mean())
    joint_risks = np.cumsum(errors) / 2000
    assert metrics.augrc(scores, right) == pytest.approx(
        np.trapezoid(joint_risks, coverages), abs=3e-4
    )


@unhurried
@given(tied, st.sampled_from([0.1, 0.5, 0.8, 0.9, 1.0]))
def test_accuracy_at_coverage_is_that_of_the_strictest_threshold(
    samples: list[tuple[float, bool]], coverage: float
) -> None:
    scores = [score for score, _ in samples]
    right = [is_right for _, is_right in samples]
    enough = [t for t in scores if sum(s >= t for s in scores) >= coverage * len(scores) - 1e-9]
    accepted = [is_right for score, is_right in samples if score >= max(enough)]
    found = metrics.accuracy_at_coverage(scores, right, coverage)
    assert found == pytest.approx(sum(accepted) / len(accepted))
    assert found.low <= found <= found.high


def test_the_curve_ends_at_the_share_of_failures() -> None:
    rng = np.random.default_rng(2)
    right = rng.random(5000) < 0.9
    coverage, risk = metrics.risk_coverage(rng.normal(size=5000), right, rng.normal(size=1000))
    assert len(coverage) <= 200
    assert coverage[-1] == 1
    assert risk[-1] == pytest.approx(((~right).sum() + 1000) / 6000)
    assert (np.diff(coverage) > 0).all()


def test_a_rejected_error_is_no_false_alarm_in_the_joint_view() -> None:
    inside = [5.0, 4.0, 0.1]
    outside = [1.0, 0.0]
    plain = metrics.evaluate(inside, outside)
    joint = metrics.evaluate_joint(inside, [True, True, False], outside)
    assert plain.auroc == pytest.approx(5 / 6)
    assert joint.auroc == 1.0
    with pytest.raises(ValueError, match="no prediction is right"):
        metrics.evaluate_joint(inside, [False] * 3, outside)


def test_full_spectrum_counts_shifted_samples_as_id() -> None:
    rng = np.random.default_rng(3)
    clean = rng.normal(2, 1, 90)
    shifted = rng.normal(1, 1, 70)
    ood = rng.normal(0, 1, 50)
    found = metrics.evaluate_full_spectrum(clean, shifted, ood)
    pairs = [(a > b) + 0.5 * (a == b) for a in [*clean, *shifted] for b in ood]
    assert found.auroc == pytest.approx(np.mean(pairs))
    assert found.num_id == 160


def test_influences_add_up_to_the_measure_and_predict_its_spread() -> None:
    """The standard error from influences against the spread over simulated samples."""
    rng = np.random.default_rng(4)
    values: dict[str, list[float]] = {"aurc": [], "augrc": []}
    errors: dict[str, list[float]] = {"aurc": [], "augrc": []}
    for _ in range(300):
        scores = rng.normal(size=400)
        right = rng.random(400) < 1 / (1 + np.exp(-2 - scores))
        decisions = Decisions.from_scores(scores, right, rng.normal(-1.5, 1, size=150))
        for name, influences in (
            ("aurc", aurc_influences(decisions)),
            ("augrc", augrc_influences(decisions)),
        ):
            values[name].append(total_of(influences))
            errors[name].append(standard_error([influences]))
    for name in values:
        assert np.mean(errors[name]) == pytest.approx(np.std(values[name]), rel=0.15)


@pytest.mark.parametrize("accuracy", [0.99, 0.9, 0.6])
def test_intervals_hold_the_value_of_the_population(accuracy: float) -> None:
    """At least 92 % of the 95 % intervals, also with a handful of errors."""
    rng = np.random.default_rng(5)
    shift = math.log(accuracy / (1 - accuracy))

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        scores = rng.normal(size=count)
        return scores, rng.random(count) < 1 / (1 + np.exp(-shift - scores))

    population = draw(400_000)
    truth = {
        "aurc": float(metrics.aurc(*population)),
        "augrc": float(metrics.augrc(*population)),
        "accuracy": float(metrics.accuracy_at_coverage(*population, 0.8)),
    }
    held = dict.fromkeys(truth, 0)
    for _ in range(200):
        scores, right = draw(300)
        found = {
            "aurc": metrics.aurc(scores, right),
            "augrc": metrics.augrc(scores, right),
            "accuracy": metrics.accuracy_at_coverage(scores, right, 0.8),
        }
        for name, value in found.items():
            held[name] += value.low <= truth[name] <= value.high
    assert min(held.values()) >= 184, held


def test_without_an_error_the_upper_limits_still_allow_some() -> None:
    found = metrics.aurc(np.arange(100.0), np.ones(100, bool))
    assert (float(found), found.low) == (0.0, 0.0)
    assert 0.03 < found.high < 0.2
    assert 0.02 < metrics.augrc(np.arange(100.0), np.ones(100, bool)).high < 0.04


def test_bad_input_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"correct has shape \(2,\), expected \(3,\)"):
        metrics.aurc([1.0, 2.0, 3.0], [True, False])
    with pytest.raises(ValueError, match="other values than True and False"):
        metrics.augrc([1.0, 2.0], [0, 3])
    with pytest.raises(ValueError, match="fraction"):
        metrics.accuracy_at_coverage([1.0, 2.0], [True, True], 1.5)
    tensor = metrics.aurc(torch.tensor([1.0, 2.0]), torch.tensor([False, True]))
    assert tensor == pytest.approx(0.25)
