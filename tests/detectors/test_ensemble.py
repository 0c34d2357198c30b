"""Ensemble: p-values and their combination by definition, fitting in lock-step, calibration,
saving, export."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fdbd
from fdbd import Batch, Detector, Ensemble, Head
from fdbd.core.configuration import from_config


def make_data(
    count: int, width: int = 12, classes: int = 4, seed: int = 0
) -> tuple[Tensor, Tensor, Head]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, width, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, classes, (count,), generator=generator)
    weight = torch.randn(
        classes, width, generator=torch.Generator().manual_seed(99), dtype=torch.float64
    )
    return features, labels, Head(weight)


class Column(Detector):
    """Scores by one feature: a member whose scores are known."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index

    def formula(self, batch: Batch) -> torch.Tensor:
        return batch.features[:, self.index]


def columns(count: int, combine: str = "harmonic", calibration: Tensor | None = None) -> Ensemble:
    ensemble = Ensemble([Column(i) for i in range(count)], combine=combine)  # type: ignore[arg-type]
    calibration = make_data(200, count, seed=5)[0] if calibration is None else calibration
    return ensemble.fit(
        Batch(calibration), Head(torch.eye(2, count, dtype=torch.float64))
    ).calibrate(Batch(calibration))


def p_by_definition(calibration: list[float], score: float) -> float:
    """(1 + #{calibration ≤ s}) / (n + 1), linear between calibration scores."""
    ordered = sorted(calibration)
    n = len(calibration)
    below = sum(value <= score for value in ordered)
    if below in (0, n):
        return (1 + below) / (n + 1)
    place = (score - ordered[below - 1]) / (ordered[below] - ordered[below - 1])
    return (1 + below + place) / (n + 1)


@pytest.mark.parametrize("combine", ["harmonic", "fisher", "cauchy"])
def test_the_score_is_the_combination_of_p_values(combine: str) -> None:
    calibration = make_data(200, 3, seed=5)[0]
    new = make_data(60, 3, seed=6)[0] * 1.5
    ensemble = columns(3, combine, calibration)
    p = []
    for member in range(3):
        known = calibration[:, member].tolist()
        p.append([p_by_definition(known, score) for score in new[:, member].tolist()])
    torch.testing.assert_close(ensemble.p_values(Batch(new)), torch.tensor(p, dtype=torch.float64))
    expected = []
    for values in zip(*p):
        if combine == "harmonic":
            expected.append(3 / sum(1 / value for value in values))
        elif combine == "fisher":
            expected.append(math.prod(values) ** (1 / 3))
        else:
            statistic = sum(math.tan((0.5 - value) * math.pi) for value in values) / 3
            expected.append(0.5 - math.atan(statistic) / math.pi)
    torch.testing.assert_close(
        ensemble.score(Batch(new)), torch.tensor(expected, dtype=torch.float64)
    )


@pytest.mark.parametrize("combine", ["harmonic", "fisher", "cauchy"])
def test_a_member_of_weight_two_counts_like_two_of_weight_one(combine: str) -> None:
    calibration = make_data(200, 2, seed=5)[0]
    new = make_data(60, 2, seed=6)[0] * 1.5
    head = Head(torch.eye(2, dtype=torch.float64))
    batch = Batch(calibration)
    twice = Ensemble([Column(0), Column(0), Column(1)], combine)  # type: ignore[arg-type]
    weighted = Ensemble([Column(0), Column(1)], combine, weights=[5.0, 2.5])  # type: ignore[arg-type]
    expected = twice.fit(batch, head).calibrate(batch).score(Batch(new))
    torch.testing.assert_close(
        weighted.fit(batch, head).calibrate(batch).score(Batch(new)), expected
    )


def test_weights_survive_the_configuration_and_older_ones_have_none() -> None:
    ensemble = Ensemble(["fdbd", "energy"], "fisher", weights=[3, 1])
    config = ensemble.to_config()
    assert from_config(config).shares == (0.75, 0.25)
    del config["options"]["weights"]  # type: ignore[attr-defined]
    assert from_config(config).shares == (0.5, 0.5)


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([1.0], "1 weights for 2 detectors"),
        ([1.0, 0.0], "positive"),
        ([1.0, math.nan], "positive"),
        ([1.0, math.inf], "positive"),
        ([True, 1.0], "positive"),
        ("11", "a list"),
        ([1.0, 1e-40], "1e30 times"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Ensemble(["fdbd", "energy"], weights=weights)  # type: ignore[arg-type]


def test_objections_are_the_shares_of_the_weighted_log_p_values() -> None:
    calibration = make_data(200, 2, seed=5)[0]
    new = make_data(60, 2, seed=6)[0] * 1.5
    batch = Batch(calibration)
    head = Head(torch.eye(2, dtype=torch.float64))
    ensemble = Ensemble([Column(0), Column(1)], "fisher", weights=[3, 1])  # type: ignore[arg-type]
    ensemble.fit(batch, head).calibrate(batch)
    surprise = -ensemble.p_values(Batch(new)).log() * torch.tensor([[0.75], [0.25]])
    expected = surprise / -ensemble.score(Batch(new)).log()
    torch.testing.assert_close(ensemble.objections(Batch(new)), expected)


def test_objections_are_defined_if_nobody_or_nothing_objects() -> None:
    extremes = torch.tensor([[1e6, 1e6], [torch.nan, 0.0]], dtype=torch.float64)
    shares = columns(2, "fisher").objections(Batch(extremes))
    assert shares[:, 0].tolist() == [0.5, 0.5]
    torch.testing.assert_close(shares.sum(dim=0), torch.ones(2, dtype=torch.float64))


def test_many_calibration_samples_are_exact_in_the_lower_tail_and_close_elsewhere() -> None:
    calibration = make_data(30_000, 2, seed=5)[0]
    new = make_data(500, 2, seed=6)[0]
    new[:100] -= 2
    p = columns(2, calibration=calibration).p_values(Batch(new))
    for m in range(2):
        count = (calibration[:, m] <= new[:, m, None]).sum(dim=1)
        exact = (1 + count) / 30_001
        assert ((p[m] - exact).abs() < 2e-3).all()
        tail = count < 500
        assert tail.sum() > 20
        assert ((p[m] - exact)[tail].abs() <= 1 / 30_001).all()


def test_p_values_of_new_in_distribution_samples_are_uniform() -> None:
    p = columns(2, calibration=make_data(5000, 2, seed=5)[0]).p_values(
        Batch(make_data(5000, 2, seed=6)[0])
    )
    for level in (0.01, 0.05, 0.5, 0.9):
        share = (p <= level).double().mean(dim=1)
        assert ((share - level).abs() < 4 * math.sqrt(2 * level * (1 - level) / 5000) + 1e-3).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2), st.floats(0, 3), st.sampled_from(["harmonic", "fisher", "cauchy"]))
def test_a_higher_member_never_lowers_the_score(member: int, rise: float, combine: str) -> None:
    ensemble = columns(3, combine)
    new = make_data(50, 3, seed=8)[0]
    raised = new.clone()
    raised[:, member] += rise
    assert (ensemble.score(Batch(raised)) >= ensemble.score(Batch(new)) - 1e-12).all()


def test_members_that_are_sure_of_the_distribution_are_sure_together_in_single_precision() -> None:
    ensemble = columns(2, "cauchy").float()
    high = torch.full((1, 2), 100.0)
    middle = torch.zeros(1, 2)
    assert ensemble.p_values(Batch(high)).min() == 1
    assert ensemble.score(Batch(high)) > 0.999
    assert ensemble.score(Batch(torch.tensor([[100.0, 0.0]]))) > ensemble.score(Batch(middle))


def test_it_sees_what_any_one_member_sees() -> None:
    ensemble = columns(2)
    normal = make_data(2000, 2, seed=11)[0]
    high = make_data(2000, 2, seed=12)[0]
    low = make_data(2000, 2, seed=13)[0]
    high[:, 0] -= 4
    low[:, 1] -= 4
    for outliers, blind in ((high, 1), (low, 0)):
        together = fdbd.metrics.evaluate(
            ensemble.score(Batch(normal)), ensemble.score(Batch(outliers))
        )
        alone = fdbd.metrics.evaluate(normal[:, blind], outliers[:, blind])
        assert float(together.auroc) > 0.95 > 0.6 > float(alone.auroc)


def test_members_are_fitted_in_lock_step_as_if_alone() -> None:
    features, labels, head = make_data(400)
    names = ["vim", "fdbd", "energy", "react+mds", "knn"]

    class Counted:
        passes = 0

        def __iter__(self):
            self.passes += 1
            yield from (Batch(f, None, y) for f, y in zip(features.split(64), labels.split(64)))

    data = Counted()
    ensemble = Ensemble(names).fit(data, head)
    # Two passes, the most that any member takes; the first batch was looked at in the first.
    assert data.passes == 1 + 1
    for name, member in zip(names, ensemble.members):
        alone = fdbd.create(name).fit(Batch(features, None, labels), head)
        torch.testing.assert_close(member.score(Batch(features)), alone.score(Batch(features)))


def test_an_uncalibrated_ensemble_says_what_to_do() -> None:
    features, _, head = make_data(100)
    ensemble = Ensemble(["fdbd", "energy"])
    with pytest.raises(fdbd.NotFittedError, match="not fitted"):
        ensemble.calibrate(Batch(features))
    ensemble.fit(Batch(features), head)
    with pytest.raises(fdbd.NotFittedError, match="call calibrate"):
        ensemble.score(Batch(features))
    ensemble.calibrate(Batch(features))
    assert ensemble.is_calibrated
    # Old p-values do not hold for new scores.
    assert not ensemble.fit(Batch(features), head).is_calibrated


def test_a_guard_calibrates_the_ensemble_before_its_threshold() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
    # Lists of four batches each.
    first = list(torch.randn(4, 50, 12))
    second = list(torch.randn(4, 50, 12))
    third = list(torch.randn(4, 50, 12))
    guard = fdbd.Guard(model, Ensemble(["fdbd", "energy"])).fit(first)
    with pytest.raises(fdbd.NotFittedError, match="call calibrate"):
        guard.calibrate(third)
    guard.detector.calibrate(map(guard.classifier, second))
    decision = guard.calibrate(third, tpr=0.9)(torch.cat(third))
    assert 0.05 < decision.is_ood.double().mean() <= 0.1


def test_calibration_does_not_depend_on_the_split() -> None:
    features, _, head = make_data(300)
    ensemble = Ensemble(["fdbd", "energy"]).fit(Batch(features), head).calibrate(Batch(features))
    whole = ensemble.score(Batch(features))
    ensemble.calibrate(Batch(part) for part in features.flip(0).split(70))
    torch.testing.assert_close(ensemble.score(Batch(features)), whole)


def test_bad_calibration_data_are_refused() -> None:
    features, _, head = make_data(100)
    ensemble = Ensemble(["fdbd", "energy"]).fit(Batch(features), head)
    for none in ([], Batch(features[:0]), Batch(features[:1])):
        with pytest.raises(ValueError, match="expected at least 2"):
            ensemble.calibrate(none)
    features[3, 1] = torch.nan
    with pytest.raises(ValueError, match=r"fdbd scores calibration sample 3 -inf"):
        ensemble.calibrate(Batch(features))


def test_bad_members_are_refused() -> None:
    for members in ([], ["fdbd"], "fdbd"):
        with pytest.raises(ValueError, match="at least two"):
            Ensemble(members)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="odin needs the network"):
        Ensemble(["odin", "fdbd"])
    with pytest.raises(TypeError, match="not a detector"):
        Ensemble([3, 4])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="expected 'harmonic'"):
        Ensemble(["fdbd", "energy"], combine="mean")  # type: ignore[arg-type]


class Scores(nn.Module):
    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, features: Tensor) -> Tensor:
        return self.detector.score(Batch(features))


def test_perturbed_images_would_have_other_p_values() -> None:
    with pytest.raises(ValueError, match="p-values of plain images"):
        fdbd.Guard(
            nn.Linear(4, 3), Ensemble(["fdbd", "energy"]), perturb=fdbd.InputPerturbation(0.1)
        )
