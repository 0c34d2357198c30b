"""What outlives a restart: counts and the drift test of the same guard under the same promise."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from fdbd.serve.backend import Answers, Backend
from fdbd.serve.state_store import FolderStore
from fdbd.serve.watch import Watch, part_of_delta


class Scores(Backend):
    """A guard that is only watched."""

    def __init__(self, identity: str = "one") -> None:
        self.id = identity
        self.version = "1"
        self.name = "scores"
        self.promise = "none"
        self.calibration = np.linspace(0.0, 1.0, 200)
        self.expected_rate = 0.05
        self.class_names = ()
        self.num_classes = 2

    def decide(self, rows):
        raise NotImplementedError

    def explain(self, rows, nearest):
        raise NotImplementedError


def answers(scores: list[float]) -> Answers:
    labels = np.zeros(len(scores), np.int64)
    values = np.array(scores, np.float64)
    return Answers(np.zeros((len(scores), 2), np.float32), labels, values, values, values < 0.05)


def watch(folder: Path, identity: str = "one", **options) -> Watch:
    made = Watch(Scores(identity), FolderStore(folder), **options)
    made.start()
    return made


def drifted(folder: Path, **options) -> None:
    """A service that has raised its alarm, and ended."""
    first = watch(folder, **options)
    first.count(answers([-1.0] * 60), 0.1)
    assert first.view()["alarm"]
    first.stop()


def aside(folder: Path) -> list[Path]:
    return list(folder.glob("aside-*.json"))


def test_the_same_guard_under_the_same_promise_goes_on(tmp_path: Path) -> None:
    drifted(tmp_path)
    again = watch(tmp_path)
    assert again.view()["samples"] == 60
    assert again.view()["alarm"]
    again.stop()
    assert not aside(tmp_path)


@pytest.mark.parametrize(
    "changed", [{"identity": "two"}, {"delta": 0.001}, {"window": 10}], ids=lambda value: str(value)
)
def test_another_guard_or_another_promise_begins_its_own_state(
    tmp_path: Path, changed, caplog
) -> None:
    drifted(tmp_path)
    again = watch(tmp_path, **changed)
    view = again.view()
    assert not view["alarm"]
    assert view["samples"] == 0
    assert next(iter(changed)).replace("identity", "guard") in view["began"]["why"]
    assert "starts afresh" in caplog.text
    assert len(aside(tmp_path)) == 1
    again.stop()


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.update(counts=[["requests", 3, 4]]),
        lambda state: state.update(counts=5),
        lambda state: state["monitor"]["test"].update(horizon=10**400),
        lambda state: state["monitor"].pop("recent"),
        lambda state: state.pop("began"),
        lambda state: state.update(alarm_time="now"),
        lambda state: state.update(alarm_time=float("nan")),
        lambda state: state.update(counts=[["requests", "/decide", 4]]),
        lambda state: state.update(counts=[["samples", "first", 4]]),
        lambda state: state.update(counts=[["samples", "0", float("inf")]]),
        lambda state: state.update(counts=[["samples", "0", True]]),
        lambda state: state.update(counts=[[]]),
        lambda state: state.update(snapshot={}),
        lambda state: state["snapshot"].update(log_martingale=float("nan")),
    ],
)
def test_a_damaged_state_is_set_aside_with_a_sentence(tmp_path: Path, damage, caplog) -> None:
    drifted(tmp_path)
    path = tmp_path / "slot-0.json"
    state = json.loads(path.read_text())
    damage(state)
    path.write_text(json.dumps(state))
    again = watch(tmp_path)
    assert again.view()["samples"] == 0
    assert again.counts() == {}
    assert "damaged" in caplog.text
    assert len(aside(tmp_path)) == 1
    again.stop()


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.update(alarm_time="now"),
        lambda state: state.update(counts=[["samples", "first", 4]]),
        lambda state: state.update(slot=-2000),
        lambda state: state["snapshot"].update(rate=float("nan")),
        lambda state: state["snapshot"].update(samples=10**400),
    ],
)
def test_the_damaged_state_of_another_process_counts_for_nothing(tmp_path: Path, damage) -> None:
    drifted(tmp_path)
    path = tmp_path / "slot-0.json"
    state = json.loads(path.read_text()) | {"slot": 1}
    path.unlink()
    damage(state)
    (tmp_path / "slot-1.json").write_text(json.dumps(state))
    again = watch(tmp_path, processes=2)
    assert again.view()["samples"] == 0
    assert not again.view()["alarm"]
    again.stop()


@pytest.mark.parametrize("moment", [float("nan"), float("inf"), 1e300, "now", -1.0, None, True])
def test_an_acknowledgement_at_no_possible_time_hides_no_alarm(tmp_path: Path, moment) -> None:
    drifted(tmp_path)
    (tmp_path / "acknowledged.json").write_text(json.dumps({"time": moment, "note": "seen"}))
    again = watch(tmp_path)
    assert again.view()["alarm"]
    again.stop()


def test_an_alarm_of_before_the_clock_was_set_back_can_be_acknowledged(tmp_path: Path) -> None:
    drifted(tmp_path)
    path = tmp_path / "slot-0.json"
    state = json.loads(path.read_text())
    state["began"]["time"] += 86_400
    state["alarm_time"] += 86_400
    path.write_text(json.dumps(state))
    again = watch(tmp_path)
    assert again.view()["alarm"]
    assert not again.acknowledge("seen")["alarm"]
    again.stop()


def test_an_alarm_of_after_the_clock_was_set_back_is_shown_and_can_be_acknowledged(
    tmp_path: Path,
) -> None:
    half_an_hour_ahead = time.time() + 1800
    acknowledged = {"time": half_an_hour_ahead, "note": "of before"}
    (tmp_path / "acknowledged.json").write_text(json.dumps(acknowledged))
    again = watch(tmp_path)
    again.count(answers([-1.0] * 60), 0.1)
    assert again.view()["alarm"]
    assert not again.acknowledge("seen")["alarm"]
    again.stop()


def test_a_state_that_cannot_be_read_is_kept_and_named(tmp_path: Path, caplog) -> None:
    drifted(tmp_path)
    path = tmp_path / "slot-0.json"
    path.write_bytes(path.read_bytes()[:-20])
    again = watch(tmp_path)
    assert again.view()["samples"] == 0
    again.stop()
    assert "its state cannot be read" in caplog.text
    assert len(aside(tmp_path)) == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_a_fifo_among_the_states_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "slot-0.json")
    os.mkfifo(tmp_path / "acknowledged.json")
    again = watch(tmp_path)
    assert again.view()["samples"] == 0
    again.stop()


@pytest.mark.parametrize("text", ["[" * 100_000, "", "7", "{}", '{"slot": 0}'])
def test_a_state_that_is_not_one_does_not_keep_the_service_from_starting(
    tmp_path: Path, text
) -> None:
    (tmp_path / "slot-0.json").write_text(text)
    (tmp_path / "slot-1.json").write_text(text)
    again = watch(tmp_path, processes=2)
    assert again.view()["samples"] == 0
    again.stop()


def test_the_deltas_of_any_number_of_processes_sum_to_no_more_than_was_promised(
    tmp_path: Path,
) -> None:
    assert sum(part_of_delta(slot) for slot in range(100_000)) <= 1
    used = 0.0
    for processes in (4, 1, 8, 2):
        together = [watch(tmp_path, processes=processes) for _ in range(processes)]
        for each in together:
            each.count(answers([0.5]), 0.1)
        for each in together:
            each.stop()
    for path in tmp_path.glob("slot-*.json"):
        used += json.loads(path.read_text())["monitor"]["test"]["delta"]
    assert len(list(tmp_path.glob("slot-*.json"))) == 8
    assert used <= 0.01
    assert not aside(tmp_path), "no test began anew, which would spend its delta twice"


def test_an_acknowledged_alarm_is_over_in_all_processes_and_stays_so(tmp_path: Path) -> None:
    first = watch(tmp_path, processes=2)
    second = watch(tmp_path, processes=2)
    second.count(answers([-1.0] * 200), 0.1)
    second._save()
    first._save()
    assert first.view()["alarm"]
    view = first.acknowledge("the camera was turned")
    assert not view["alarm"]
    second._save()
    first._save()
    assert not second.view()["alarm"]
    assert "the camera was turned" in second.view()["began"]["why"]
    first.stop()
    second.stop()
    again = watch(tmp_path, processes=2)
    assert not again.view()["alarm"]
    assert again.view()["samples"] == 200, "what was counted stays counted"
    again.stop()
