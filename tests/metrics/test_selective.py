"""Selective prediction: measures against definitions written with loops, intervals against
simulation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdbd import metrics
from fdbd.metrics.comparison import standard_error
from fdbd.metrics.selective import Decisions, augrc_influences, aurc_influences, total_of

Scores = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

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


def joint_samples(decimals: int | None, seed: int) -> tuple[Scores, Flags, Scores]:
    """ID scores, which of the predictions are right, OOD scores; rounded, they tie."""
    rng = np.random.default_rng(seed)
    inside = rng.normal(0.5, 1, size=int(rng.integers(20, 500)))
    right = rng.random(len(inside)) < 1 / (1 + np.exp(-2 * inside))
    outside = rng.normal(size=int(rng.integers(5, 300)))
    if decimals is None:
        return inside, right, outside
    return inside.round(decimals), right, outside.round(decimals)


def fd_shifts_points(scores: Scores, failed: Flags) -> tuple[Scores, Scores, Scores]:
    """Coverages, selective and generalised risks as fd-shifts has them: from all samples down, one
    sample after the other is rejected, and there is a point wherever the score changes."""
    order = np.argsort(scores)
    total = len(scores)
    failures = failed.sum()
    coverages = [1.0]
    selective = [failures / total]
    generalised = [failures / total]
    for position in range(total - 1):
        failures -= failed[order[position]]
        if scores[order[position]] != scores[order[position + 1]]:
            accepted = total - position - 1
            coverages.append(accepted / total)
            selective.append(failures / accepted)
            generalised.append(failures / total)
    # At no coverage the selective risk stays, and the generalised risk is 0.
    selective.append(selective[-1])
    return np.array([*coverages, 0]), np.array(selective), np.array([*generalised, 0])


@pytest.mark.parametrize("decimals", [None, 1, 0])
@pytest.mark.parametrize("seed", range(5))
def test_areas_follow_from_those_of_fd_shifts(decimals: int | None, seed: int) -> None:
    """fd-shifts joins its points by straight lines. For AUGRC that is our rule for ties. Our AURC
    takes the risk at each sample's own threshold: the upper end of each step, not its middle."""
    inside, right, outside = joint_samples(decimals, seed)
    scores = np.concatenate([inside, outside])
    failed = np.concatenate([~right, np.ones(len(outside), bool)])
    coverages, selective, generalised = fd_shifts_points(scores, failed)
    found = metrics.augrc(inside, right, outside)
    assert found == pytest.approx(-np.trapezoid(generalised, coverages), abs=1e-12)
    steps = -np.diff(coverages)
    from_middle_to_end = (steps * (selective[:-1] - selective[1:]) / 2).sum()
    expected = -np.trapezoid(selective, coverages) + from_middle_to_end
    assert metrics.aurc(inside, right, outside) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_areas_follow_from_those_of_torch_uncertainty(seed: int) -> None:
    """torch-uncertainty has no rule for ties and uses the trapezoid rule from the first sample to
    the last, over (N − 1)/N: half of the first and of the last risk are missing there. At an OOD
    cost of a half, its SCOD losses are half of ours."""
    package = pytest.importorskip("torch_uncertainty.metrics.classification")
    inside, right, outside = joint_samples(None, seed)
    is_ood = np.concatenate([np.zeros(len(inside), bool), np.ones(len(outside), bool)])
    scores = np.concatenate([inside, outside])
    failed = np.concatenate([~right, np.ones(len(outside), bool)])
    total = len(scores)
    first = failed[np.argmax(scores)]

    def area(measure: Any) -> float:
        theirs = measure(ood_cost=0.5)
        theirs.update(*map(torch.from_numpy, (-scores, failed.astype(float), is_ood)))
        return 2 * float(theirs.compute()) * (total - 1) / total

    missing = (first + failed.mean()) / (2 * total)
    aurc = area(package.SCODAURC) + missing
    assert metrics.aurc(inside, right, outside) == pytest.approx(aurc, abs=1e-7)
    # The first generalised risk starts from no samples, where it is 0, and the last is whole.
    augrc = area(package.SCODAUGRC) + first / (2 * total**2)
    assert metrics.augrc(inside, right, outside) == pytest.approx(augrc, abs=1e-7)


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.95])
def test_accuracy_at_coverage_is_one_minus_the_risk_of_torch_uncertainty(coverage: float) -> None:
    package = pytest.importorskip("torch_uncertainty.metrics.classification")
    rng = np.random.default_rng(6)
    confidence = rng.uniform(0.5, 1, size=333)
    right = rng.random(333) < confidence
    theirs = package.RiskAtxCov(cov_threshold=coverage)
    probabilities = torch.from_numpy(np.stack([confidence, 1 - confidence], axis=1))
    theirs.update(probabilities, torch.from_numpy((~right).astype(int)))
    found = metrics.accuracy_at_coverage(confidence, right, coverage)
    assert found == pytest.approx(1 - float(theirs.compute()), abs=1e-6)


@unhurried
@given(tied, st.sampled_from([0.1, 0.5, 0.8, 0.9, 1.0]))
def test_accuracy_at_coverage_is_that_of_the_strictest_threshold(
    samples: list[tuple[float, bool]], coverage: float
) -> None:
    scores = [score for score, _ in samples]
    right = [is_right for _, is_right in samples]
    enough = []
    for threshold in scores:
        covered = sum(score >= threshold for score in scores)
        if covered >= coverage * len(scores) - 1e-9:
            enough.append(threshold)
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
    inside = np.concatenate([clean, shifted])[:, None]
    pairs = (inside > ood) + 0.5 * (inside == ood)
    assert found.auroc == pytest.approx(pairs.mean())
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
