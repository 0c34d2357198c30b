"""The monitor: rate and interval, the drift test's promise by simulation, metrics, state."""

from __future__ import annotations

import json
import math
import os
import random
import threading

import numpy as np
import pytest
import torch

import fdbd
from fdbd import Batch, Guard, Head, Monitor
from fdbd.monitor.drift import _BETS, DriftTest
from fdbd.monitor.stream import wilson

NEG_INF = float("-inf")


def calibrated(n: int = 200, seed: int = 0, **options) -> Guard:
    generator = torch.Generator().manual_seed(seed)
    head = Head(torch.randn(3, 6, generator=generator), torch.zeros(3))
    guard = Guard(head, "energy").fit(
        Batch(torch.randn(50, 6, generator=generator)), progress=False
    )
    guard.set_threshold(torch.randn(n, generator=generator), **options)
    return guard


def normal(count: int, seed: int, shift: float = 0.0) -> list[float]:
    return (np.random.default_rng(seed).normal(size=count) + shift).tolist()


def test_a_monitor_prints_what_it_has_seen() -> None:
    monitor = Monitor(calibrated())
    assert repr(monitor) == "Monitor(0 samples, 0 OOD, no alarm)"
    monitor.update(normal(300, 0, shift=4.0), [True] * 300)
    assert repr(monitor) == f"Monitor(300 samples, 300 OOD, ALARM at sample {monitor.alarm_at})"


# ── the drift test
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_p_value_is_the_smoothed_rank_among_all_earlier_scores():
    calibration, stream = [3.0, 1.0, 2.0], [2.0, 0.0, 2.0, NEG_INF, NEG_INF]
    test = DriftTest(calibration, seed=5)
    uniform = random.Random(5)
    seen = list(calibration)
    for score in stream:
        u = 1 - uniform.random()
        below = sum(s < score for s in seen)
        equal = sum(s == score for s in seen)
        assert test.update(score) == (below + u * (1 + equal)) / (1 + len(seen))
        seen.append(score)
    assert sorted(seen) == test.reference.tolist()


def test_the_capital_is_a_mixture_of_bets_that_start_at_any_sample():
    # The definition by loops: half of the capital bet from the start, the rest in equal parts
    # before each sample.
    horizon = 50
    bets = [(e, k, side) for e, k in _BETS for side in (0, 1)]
    test = DriftTest(normal(20, 0), horizon=horizon)
    p_values = [test.update(score) for score in normal(30, 1, shift=-2)]

    def payout(bet: tuple[float, float, int], start: int) -> float:
        epsilon, kappa, side = bet
        product = 1.0
        for p in p_values[start:]:
            if side:
                p = 1 - p
            product *= 1 - epsilon + epsilon * kappa * p ** (kappa - 1)
        return product

    capital = 0.5 * (1 - len(p_values) / horizon)
    for bet in bets:
        capital += 0.5 / len(bets) * payout(bet, 0)
        capital += sum(
            0.5 / len(bets) / horizon * payout(bet, start) for start in range(len(p_values))
        )
    assert test.log_martingale == pytest.approx(math.log(capital), rel=1e-12)


@pytest.mark.parametrize(("epsilon", "kappa"), _BETS)
def test_every_bet_is_fair(epsilon, kappa):
    # ∫ κ p^(κ−1) dp = 1, here by the substitution p = x^(1/κ) on a midpoint grid.
    x = (np.arange(10_000) + 0.5) / 10_000
    p = x ** (1 / kappa)
    # dp/dx.
    slope = x ** (1 / kappa - 1) / kappa
    assert np.mean((1 - epsilon + epsilon * kappa * p ** (kappa - 1)) * slope) == pytest.approx(
        1, abs=1e-3
    )


def distance_to_uniform(p: np.ndarray) -> float:
    """Kolmogorov's, in multiples of its critical value at 1 %."""
    return np.abs(np.sort(p) - (np.arange(len(p)) + 0.5) / len(p)).max() * math.sqrt(len(p)) / 1.63


def test_p_values_of_a_drift_free_stream_are_uniform_and_uncorrelated():
    test = DriftTest(normal(50, 0), seed=3)
    p = np.array([test.update(score) for score in normal(4000, 1)])
    assert distance_to_uniform(p) < 1
    assert abs(np.corrcoef(p[:-1], p[1:])[0, 1]) < 3.3 / math.sqrt(4000)


def test_p_values_against_a_fixed_calibration_set_would_not_be_uniform():
    # Why scores join the reference: given 50 calibration scores, ranks among those alone are far
    # from uniform.
    test = DriftTest(normal(50, 0), seed=3)
    p = []
    for score in normal(4000, 1):
        p.append(test.update(score))
        test.reference = test.calibration[:]
    assert distance_to_uniform(np.array(p)) > 3


def test_tied_scores_raise_no_alarm():
    # A detector that says the same of everything: without random ties every p-value would be 1.
    test = DriftTest([1.0] * 100)
    for _ in range(3000):
        test.update(1.0)
    assert not test.alarm


def false_alarms(streams: int, calibration: int, length: int, delta: float) -> int:
    alarms = 0
    for seed in range(streams):
        draws = np.random.default_rng(seed).standard_t(3, size=calibration + length).tolist()
        test = DriftTest(draws[:calibration], delta, horizon=length, seed=seed)
        for score in draws[calibration:]:
            test.update(score)
        alarms += test.alarm
    return alarms


def test_false_alarms_stay_within_the_bound_on_streams_of_fifty_times_the_calibration():
    delta, streams = 0.2, 120
    alarms = false_alarms(streams, calibration=30, length=1500, delta=delta)
    assert alarms <= delta * streams + 3 * math.sqrt(streams * delta * (1 - delta))


@pytest.mark.slow
@pytest.mark.parametrize("delta", [0.05, 0.2])
def test_false_alarms_stay_within_the_bound_on_streams_of_ten_thousand(delta):
    streams = 200
    alarms = false_alarms(streams, calibration=200, length=10_000, delta=delta)
    print(f"delta {delta}: {alarms} false alarms in {streams} streams")
    assert alarms <= delta * streams + 3 * math.sqrt(streams * delta * (1 - delta))


@pytest.mark.parametrize(("shift", "within"), [(-3.0, 40), (3.0, 60), (-1.0, 400)])
def test_a_shift_after_a_quiet_time_is_found_soon(shift, within):
    test = DriftTest(normal(200, 0))
    for score in normal(2000, 1):
        test.update(score)
    assert not test.alarm
    for score in normal(within, 2, shift):
        test.update(score)
    assert test.alarm


def test_a_tenth_of_ood_samples_is_found_soon():
    random = np.random.default_rng(7)
    test = DriftTest(normal(500, 0))
    for score in normal(1000, 1):
        test.update(score)
    for score in random.normal(size=400):
        test.update(float(score - 6 * (random.uniform() < 0.1)))
    assert test.alarm


def test_the_test_starts_anew_after_its_horizon():
    test = DriftTest(normal(20, 0), horizon=100)
    for score in normal(100, 1):
        test.update(score)
    assert (test.count, test.restarts, len(test.reference)) == (100, 0, 120)
    test.update(0.0)
    assert (test.count, test.restarts, len(test.reference)) == (1, 1, 21)


def test_a_capital_beyond_every_float_stays_a_number():
    test = DriftTest(normal(2000, 0), horizon=1_000_000)
    for index in range(1500):
        test.update(-10.0 - index)
    assert test.alarm
    assert math.isfinite(test.log_martingale)
    assert test.log_martingale > math.log(1e250)


def test_a_fortune_that_is_lost_again_stays_a_number():
    test = DriftTest(normal(20, 0), horizon=1_000_000)
    for p, count in ((1e-12, 100), (0.5, 12_000)):
        for _ in range(count):
            test._bet(p)
    # The bet that wins most here, and loses least.
    (epsilon, kappa), *_ = _BETS
    logs = [math.log(1 - epsilon + epsilon * kappa * p ** (kappa - 1)) for p in (1e-12, 0.5)]
    expected = math.log(0.25 / len(_BETS)) + 100 * logs[0] + 12_000 * logs[1]
    assert test.log_martingale == pytest.approx(expected, rel=1e-6)
    assert (
        DriftTest.from_state(
            test.state(), normal(20, 0), sorted(normal(20, 0) + [0.0] * 12_100)
        ).count
        == 12_100
    )


def test_nan_and_minus_infinity_rank_lowest():
    test = DriftTest(normal(100, 0))
    assert test.update(NEG_INF) <= 1 / 101
    assert test.update(float("nan")) <= 2 / 102


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta": 0}, "delta is 0"),
        ({"delta": 1.5}, "delta is 1.5"),
        ({"horizon": 0}, "horizon is 0"),
        ({"horizon": 1.5}, "horizon is 1.5"),
        ({"window": 0}, "window is 0"),
        ({"confidence": 1.0}, "confidence is 1.0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Monitor(calibrated(), **options)


# ── the monitor
# ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_rate_is_that_of_the_window_with_wilsons_interval():
    monitor = Monitor(calibrated(), window=50)
    value = monitor.threshold.value.item()
    snapshot = monitor.update([value - 1] * 30 + [value] * 45 + [value - 1] * 5)
    assert (snapshot["samples"], snapshot["ood"], snapshot["window"]) == (80, 35, 50)
    assert snapshot["rate"] == 0.1
    from scipy.stats import binomtest

    interval = binomtest(5, 50).proportion_ci(0.95, method="wilson")
    assert (snapshot["rate_low"], snapshot["rate_high"]) == pytest.approx(
        (interval.low, interval.high)
    )
    assert snapshot["expected_rate"] == pytest.approx(0.05)


def test_wilsons_interval_stays_between_zero_and_one():
    assert wilson(0, 10)[0] == 0
    assert wilson(10, 10)[1] == 1


def test_two_lines_attach_it_to_a_guard():
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    guard = (
        Guard(model)
        .fit([torch.randn(100, 5)], progress=False)
        .calibrate([torch.randn(100, 5)], progress=False)
    )
    monitor = fdbd.Monitor(guard)
    inputs = torch.randn(7, 5)
    decision = monitor(inputs)
    assert torch.equal(decision.scores, guard(inputs).scores)
    assert monitor.snapshot()["ood"] == int(decision.is_ood.sum())


def test_a_decision_its_scores_and_single_scores_count_alike():
    guard = calibrated()
    decision = guard.decide(Batch(torch.randn(20, 6)))
    monitors = [Monitor(guard) for _ in range(4)]
    monitors[0].update(decision)
    monitors[1].update(decision.scores.numpy())
    monitors[2].update(decision.scores, decision.is_ood)
    for score in decision.scores:
        monitors[3].update([float(score)])
    assert all(monitor.snapshot() == monitors[0].snapshot() for monitor in monitors)


def test_a_broken_sample_counts_as_ood():
    monitor = Monitor(calibrated())
    snapshot = monitor.update([float("nan"), NEG_INF])
    assert snapshot["ood"] == 2
    json.dumps(snapshot, allow_nan=False)


def test_the_alarm_calls_once_stays_and_is_taken_back():
    heard = []
    monitor = Monitor(calibrated(), on_alarm=heard.append)
    monitor.update(normal(100, 1))
    assert heard == []
    for _ in range(5):
        monitor.update([-10.0] * 10)
    assert monitor.alarm
    assert [call["alarm"] for call in heard] == [True]
    assert 100 < monitor.alarm_at <= 120
    monitor.reset()
    snapshot = monitor.snapshot()
    assert not monitor.alarm
    assert (
        snapshot["samples"],
        snapshot["window"],
        snapshot["rate"],
        snapshot["log_martingale"],
    ) == (150, 0, None, 0)


def test_an_empty_batch_changes_nothing():
    monitor = Monitor(calibrated())
    before = monitor.snapshot()
    assert monitor.update(torch.zeros(0)) == before


@pytest.mark.parametrize(
    "bad", [torch.zeros(2, 2), torch.zeros(3, dtype=torch.complex64), [True, False]]
)
def test_what_is_no_list_of_scores_is_refused(bad):
    with pytest.raises(ValueError, match="expected one number per sample"):
        Monitor(calibrated()).update(bad)


def test_decisions_that_do_not_fit_the_scores_are_refused():
    with pytest.raises(ValueError, match="one per score"):
        Monitor(calibrated()).update([0.0, 1.0], [True])


def test_a_threshold_by_class_needs_the_decisions():
    guard = calibrated()
    guard.set_threshold(torch.randn(90), torch.arange(90) % 3, per_class=True)
    monitor = Monitor(guard)
    with pytest.raises(ValueError, match="by predicted class"):
        monitor.update([0.0])
    assert monitor.update([0.0], [True])["ood"] == 1


def test_a_guard_without_a_threshold_is_refused():
    guard = calibrated()
    guard.threshold = None
    with pytest.raises(fdbd.NotCalibratedError, match="no threshold"):
        Monitor(guard)


def test_a_restored_monitor_goes_on_bit_for_bit(tmp_path):
    guard = calibrated()
    path = tmp_path / "monitor.safetensors"
    whole = Monitor(guard, window=64, horizon=300, delta=0.02, seed=9)
    whole.update([*normal(250, 1), NEG_INF, float("nan")])
    whole.save(path)
    restored = Monitor.load(path, guard)
    assert restored.snapshot() == whole.snapshot()
    for part in (normal(100, 2), normal(40, 3, shift=-4)):
        assert restored.update(part) == whole.update(part)
    assert restored._test.reference == whole._test.reference
    assert restored.alarm


def test_drafts_of_killed_saves_are_removed(tmp_path):
    old = tmp_path / ".00c0ffee.monitor.safetensors"
    young = tmp_path / ".00c0ffef.monitor.safetensors"
    for draft in (old, young):
        draft.write_bytes(b"half of a")
    os.utime(old, (0, 0))
    Monitor(calibrated()).save(tmp_path / "monitor.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == [young.name, "monitor.safetensors"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_ood_and_ranks_lowest(bad):
    monitor = Monitor(calibrated())
    for _ in range(30):
        snapshot = monitor.update([bad])
    assert (snapshot["ood"], snapshot["alarm"]) == (30, True)


def test_a_state_of_another_guard_is_refused(tmp_path):
    path = tmp_path / "monitor.safetensors"
    Monitor(calibrated(seed=0)).save(path)
    with pytest.raises(fdbd.ArtifactError, match="other calibration scores"):
        Monitor.load(path, calibrated(seed=1))


def test_a_file_that_holds_no_monitor_is_refused(tmp_path):
    guard = calibrated()
    path = tmp_path / "guard.safetensors"
    guard.save(path)
    with pytest.raises(fdbd.ArtifactError, match="not hold a monitor"):
        Monitor.load(path, guard)
    with pytest.raises(FileNotFoundError, match="no monitor at"):
        Monitor.load(tmp_path / "missing", guard)


@pytest.mark.parametrize(
    "harm",
    [
        lambda d, t: d["test"].pop("stakes"),
        lambda d, t: d["test"].update(count=3),
        lambda d, t: d["test"].update(stakes=[float("nan")] * 8),
        lambda d, t: d["test"].update(stakes=[-1.0] * 8),
        lambda d, t: d["test"].update(stakes=[0.0] * 8, unit=0.0),
        lambda d, t: d["test"].update(stakes=[1e308] * 8),
        lambda d, t: d["test"].update(unit=-1.0),
        lambda d, t: d["test"].update(random=[3, [1, 2], None]),
        lambda d, t: d.pop("samples"),
        lambda d, t: t.pop("recent"),
        lambda d, t: t.update(reference=t["reference"].flip(0)),
    ],
)
def test_a_damaged_state_is_refused(tmp_path, harm):
    from fdbd.core import artifact

    guard = calibrated()
    path = tmp_path / "monitor.safetensors"
    monitor = Monitor(guard)
    monitor.update(normal(10, 1))
    monitor.save(path)
    description, tensors = artifact.read(path)
    harm(description, tensors)
    artifact.write(path, description, tensors)
    with pytest.raises(fdbd.ArtifactError, match="does not hold a working monitor"):
        Monitor.load(path, guard)


def test_updates_from_several_threads_are_all_counted():
    monitor = Monitor(calibrated(), window=10_000)

    def update_often(seed: int) -> None:
        for _ in range(40):
            monitor.update(normal(10, seed))

    threads = [threading.Thread(target=update_often, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    snapshot = monitor.snapshot()
    assert snapshot["samples"] == snapshot["window"] == snapshot["samples_in_horizon"] == 1600
    assert len(monitor._test.reference) == 1800
    assert sum(monitor._recent) == snapshot["ood"]


def test_prometheus_reads_the_numbers_when_it_is_scraped():
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    monitor = Monitor(calibrated())
    collector = monitor.prometheus(registry)
    monitor.update([-10.0] * 30)
    assert registry.get_sample_value("fdbd_samples_total") == 30
    assert registry.get_sample_value("fdbd_ood_total") == 30
    assert registry.get_sample_value("fdbd_ood_rate") == 1
    assert registry.get_sample_value("fdbd_drift_alarm") == 1
    assert registry.get_sample_value("fdbd_log_martingale") == monitor.snapshot()["log_martingale"]
    assert b"# TYPE fdbd_ood_rate gauge" in client.generate_latest(registry)
    with pytest.raises(ValueError, match="Duplicated"):
        monitor.prometheus(registry)
    Monitor(calibrated()).prometheus(registry, prefix="second")
    registry.unregister(collector)
    assert registry.get_sample_value("fdbd_samples_total") is None


def test_an_acknowledged_alarm_says_when_and_why_the_test_began_anew(tmp_path):
    guard = calibrated()
    monitor = Monitor(guard)
    monitor.update(torch.tensor(normal(200, 1)) - 5)
    went_off_at = monitor.alarm_at
    with pytest.raises(ValueError, match="with a reason"):
        monitor.acknowledge("  ")
    assert monitor.alarm
    assert monitor.acknowledge("a lens was dirty")["alarm"] is False
    with pytest.raises(ValueError, match="no alarm to acknowledge"):
        monitor.acknowledge("again")
    monitor.save(tmp_path / "monitor.safetensors")
    again = Monitor.load(tmp_path / "monitor.safetensors", guard)
    first, last = again.beginnings
    assert (first["why"], first["alarm_at"]) == ("started", None)
    assert (last["why"], last["alarm_at"], last["samples"]) == (
        "a lens was dirty",
        went_off_at,
        200,
    )
    assert last["time"] >= first["time"]


def test_the_list_of_beginnings_stays_short():
    monitor = Monitor(calibrated())
    for number in range(300):
        monitor.reset(f"reset {number}")
    assert len(monitor.beginnings) == 100
    assert monitor.beginnings[0]["why"] == "started"
    assert monitor.beginnings[-1]["why"] == "reset 299"


def test_a_guard_with_the_same_scores_and_another_id_begins_its_own():
    from fdbd.monitor import StreamMonitor

    scores = [float(score) for score in range(50)]
    state = StreamMonitor(scores, 0.05, guard_id="0123").state()
    other = StreamMonitor(scores, 0.05, guard_id="4567")
    with pytest.raises(ValueError, match="it watched the guard 0123, not 4567"):
        other.restore(state)
    # Who does not say takes any.
    StreamMonitor(scores, 0.05).restore(state)


def test_a_forged_state_is_refused_and_the_monitor_goes_on():
    from fdbd.monitor import StreamMonitor

    scores = [float(score) for score in range(50)]
    good = StreamMonitor(scores, 0.05)
    good.count([3.0, 4.0], [False, True])
    harms = [
        ("horizon", 10**400),
        ("horizon", 0),
        ("delta", "0.1"),
        ("delta", 10**400),
        ("count", -1),
        ("count", 10**30),
        ("stakes", "x"),
        ("stakes", [0.1]),
        ("stakes", [float("nan")] * 8),
        ("random", [3, [0] * 625, None]),
        ("random", [3, [2**70] * 625, None]),
        ("random", 5),
        ("alarm", 1),
        ("peak", None),
    ]
    outer = [
        ("window", 10**400),
        ("window", 0),
        ("samples", -1),
        ("samples", 1e300),
        ("ood", 3),
        ("alarm_at", 99),
        ("recent", "0" * 2000),
        ("recent", "ab"),
        ("recent", 5),
        ("confidence", 10**400),
        ("test", []),
        ("test", None),
        ("reference", "x"),
        ("reference", 7),
        ("reference", "AAAA"),
        ("beginnings", [{}] * 101),
        ("beginnings", [[]]),
        ("beginnings", [{"why": "x", "time": "now", "samples": 0}]),
    ]
    for name, value in harms:
        state = good.state()
        state["test"] = {**state["test"], name: value}
        assert_refused(good, state)
    for name, value in outer:
        assert_refused(good, {**good.state(), name: value})


def assert_refused(monitor, state):
    before = monitor.state()
    with pytest.raises(ValueError, match=r"state|its|window|delta|horizon|count"):
        monitor.restore(state)
    assert monitor.state() == before
    monitor.count([], [])
