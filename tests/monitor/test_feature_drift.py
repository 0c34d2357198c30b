"""The windowed test on features: its level holds, and it finds shifts that scores do not show."""

import pytest
import torch

import fdbd
from fdbd.monitor import FeatureDrift


def normal(rows: int, seed: int, width: int = 6) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def test_p_values_of_exchangeable_windows_are_at_most_as_small_as_promised() -> None:
    p_values = []
    for seed in range(300):
        drift = FeatureDrift(normal(40, seed), delta=0.5, window=15, windows=5, seed=seed)
        p_values.append(drift.update(normal(15, 10_000 + seed))[0].p_value)
    for level in (0.02, 0.1, 0.3, 0.5):
        share = sum(p_value <= level for p_value in p_values) / len(p_values)
        assert share <= level + 3 * (level * (1 - level) / len(p_values)) ** 0.5


def test_a_horizon_of_windows_keeps_its_delta() -> None:
    alarms = 0
    trials = 120
    for seed in range(trials):
        drift = FeatureDrift(normal(60, seed), delta=0.2, window=10, windows=10, seed=seed)
        drift.update(normal(100, 20_000 + seed))
        alarms += drift.alarm is not None
    assert alarms / trials <= 0.2 + 3 * (0.2 * 0.8 / trials) ** 0.5


def test_a_shift_that_the_scores_do_not_show_is_found() -> None:
    # Energy reads two of six features: the others may go where they like.
    weight = torch.zeros(2, 6)
    weight[0, 0] = weight[1, 1] = 1
    guard = fdbd.Guard(fdbd.Head(weight), "energy").fit(
        [fdbd.Batch(normal(200, 0))], progress=False
    )
    guard.calibrate([fdbd.Batch(normal(400, 1))], progress=False)
    moved = normal(400, 2)
    moved[:, 3] += 1.5
    monitor = fdbd.Monitor(guard)
    monitor.update(guard.decide(fdbd.Batch(moved)))
    assert not monitor.alarm
    drift = FeatureDrift(normal(500, 3), window=100)
    drift.update(moved)
    assert drift.alarm is not None
    assert drift.alarm.window == 1


def test_a_change_of_spread_is_found_too() -> None:
    drift = FeatureDrift(normal(500, 0), window=200)
    drift.update(1.6 * normal(200, 1))
    assert drift.alarm is not None


def test_windows_do_not_depend_on_how_the_stream_is_cut() -> None:
    stream = normal(100, 5)
    whole = FeatureDrift(normal(80, 4), window=30).update(stream)
    drift = FeatureDrift(normal(80, 4), window=30)
    pieces = []
    for rows in stream.split(7):
        pieces += drift.update(rows)
    assert pieces == whole
    assert [result.window for result in whole] == [1, 2, 3]


def test_several_spaces_share_the_level_and_name_the_one_that_moved() -> None:
    drift = FeatureDrift({"early": normal(300, 0), "late": normal(300, 1, 3)}, window=100)
    assert drift.level == pytest.approx(0.01 / 40)
    drift.update({"early": normal(100, 2), "late": normal(100, 3, 3) + 2})
    assert drift.alarm is not None
    assert drift.alarm.space == "late"
    drift.reset()
    assert drift.alarm is None


def test_rows_that_are_not_finite_are_counted_and_left_out() -> None:
    drift = FeatureDrift(normal(50, 0), window=20)
    rows = normal(25, 1)
    rows[::5, 0] = torch.nan
    assert len(drift.update(rows)) == 1
    assert drift.skipped == 5


def test_constant_features_raise_no_alarm() -> None:
    drift = FeatureDrift(torch.zeros(50, 3), window=20)
    assert drift.update(torch.zeros(20, 3))[0].p_value == 1.0


@pytest.mark.parametrize(
    ("features", "words"),
    [
        (torch.zeros(5), "expected real numbers"),
        (torch.zeros(5, 2), r"expected \(N, 6\)"),
        ({"other": torch.zeros(5, 6)}, "expected those of the reference: features"),
        ({}, "there are no features"),
    ],
)
def test_features_that_do_not_fit_are_one_sentence(features, words: str) -> None:
    drift = FeatureDrift(normal(50, 0))
    with pytest.raises(ValueError, match=words):
        drift.update(features)


@pytest.mark.parametrize("options", [{"delta": 0.0}, {"window": 1}, {"windows": 0}, {"rows": 1.5}])
def test_options_that_make_no_sense_are_refused(options) -> None:
    with pytest.raises(ValueError, match="expected"):
        FeatureDrift(normal(50, 0), **options)
