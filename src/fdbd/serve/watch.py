"""What a service has been doing: requests, batches, decisions and drift, over all its processes and
across restarts.

Each process counts for itself and writes its state to a slot of the store once per second; the
process that is asked adds up what it read then, so that no request waits for the disk. After a kill
at most the last second is lost.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
import urllib.request
from bisect import bisect_left
from collections import defaultdict, deque
from typing import Any

from fdbd.monitor.stream import StreamMonitor, rate
from fdbd.serve.backend import Answers, Backend
from fdbd.serve.state_store import State, Store

log = logging.getLogger("fdbd.serve")

Counts = defaultdict[tuple[str, ...], float]
"""Numbers by family and labels; a histogram's last label is the number of the bucket."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper ends of the buckets of latencies."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Upper ends of the buckets of batch sizes."""
HISTORY = 300
"""Points of the page's chart, at most one per second."""
_MAX_COUNTERS = 500_000
"""A state with more counters than this is not one of ours: a guard has two per class."""
_MAX_SLOTS = 10_000
_LARGEST_COUNT = 1e18
_CLOCK_SECONDS = 3600.0
"""How far an acknowledgement's time may lie ahead, for clocks that are set back."""
_LABELS = {
    "samples": 1,
    "ood": 1,
    "requests": 2,
    "request_seconds": 2,
    "request_seconds_sum": 1,
    "batch_rows": 1,
}
"""How many labels the counters of a name have; those of other names have none."""


def part_of_delta(slot: int) -> float:
    """The part of the alarm's probability that the process of a slot may use.

    1/2, 1/6, 1/12, 1/20, …: the parts of any number of slots sum to less than 1. So the promise
    holds however often the number of processes is changed, while each slot goes on with its test.
    """
    return 1 / ((slot + 1) * (slot + 2))


class Watch:
    """Counts what the service does with one guard in this process, and shows the sum over all.

    Args:
        backend: the guard.
        store: where the processes meet and what a restart finds; None: nothing outlives the
            process.
        processes: how many there are; states of slots beyond that are of processes that have ended.
        delta: probability of a false alarm per horizon, of all processes together.
        window: samples of the rolling rate.
        webhook: an address that gets the snapshot as JSON by POST when the alarm goes off.
    """

    def __init__(
        self,
        backend: Backend,
        store: Store | None = None,
        *,
        processes: int = 1,
        delta: float = 0.01,
        window: int = 1000,
        webhook: str | None = None,
    ) -> None:
        self._backend = backend
        self._store = store or Store()
        self._webhook = webhook
        self._processes = processes
        self._delta = delta
        self._window = window
        self._slot = 0
        self._monitor = self._new_monitor()
        self._counts: Counts = defaultdict(float)
        self._others: list[State] = []
        """States of the other processes, as they were a second ago."""
        self._began: State = {"time": time.time(), "why": "the service started for the first time"}
        self._alarm_time: float | None = None
        self._acknowledged: State = {}
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        """Rate and drift over the last minutes, as this process saw them."""
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._saver = threading.Thread(target=self._save_often, name="fdbd-watch", daemon=True)

    def _new_monitor(self) -> StreamMonitor:
        return StreamMonitor(
            self._backend.calibration.tolist(),
            self._backend.expected_rate,
            window=self._window,
            delta=self._delta * part_of_delta(self._slot),
            on_alarm=self._alarm,
        )

    # ── counting

    def count(self, answers: Answers, seconds: float) -> None:
        """Note the decisions on a batch, and the model's seconds for it."""
        flags = answers.is_ood.tolist()
        self._monitor.count(answers.scores.tolist(), flags)
        with self._lock:
            self._observe(len(flags), ROWS, "batch_rows")
            self._counts[("model_seconds",)] += seconds
            for label, is_ood in zip(answers.labels.tolist(), flags):
                self._counts["samples", str(label)] += 1
                self._counts["ood", str(label)] += is_ood

    def count_request(self, path: str, status: int, seconds: float) -> None:
        """Note a request and its answer."""
        with self._lock:
            self._counts["requests", path, str(status)] += 1
            self._observe(seconds, SECONDS, "request_seconds", path)

    def count_event(self, name: str, number: int = 1) -> None:
        """Note something else that is counted, such as a record that was dropped."""
        with self._lock:
            self._counts[(name,)] += number

    def _observe(self, value: float, ends: tuple[float, ...], name: str, *labels: str) -> None:
        """A value into a histogram: the number of its bucket, and the sum."""
        bucket = bisect_left(ends, value)
        self._counts[(name, *labels, str(bucket))] += 1
        self._counts[(f"{name}_sum", *labels)] += value

    # ── the state

    def start(self) -> None:
        """Take a slot, go on from what an earlier process left there, and save once per second from
        now on."""
        self._slot = self._store.claim()
        self._monitor = self._new_monitor()
        self._acknowledged = self._store.acknowledged()
        own = [state for state in self._store.states() if state.get("slot") == self._slot]
        if own:
            self._take_over(own[0])
        elif self._store.is_taken(self._slot):
            self._begin_anew("its state cannot be read")
        self._others = self._read_others()
        self._saver.start()

    def stop(self) -> None:
        """Save a last time, give the slot back and end."""
        is_first_call = not self._ends.is_set()
        self._ends.set()
        if is_first_call and self._saver.ident is not None:
            self._saver.join(timeout=10)
            self._save()
            self._store.release()

    def _difference_of(self, state: State) -> str | None:
        """Why a state is of another guard or of other settings; None if it is of these."""
        expected = {"guard": self._backend.id, "--delta": self._delta, "--window": self._window}
        for what, mine in expected.items():
            found = state.get(what.removeprefix("--"), "another version's")
            if found != mine:
                return f"its state was of {what} {found}, not {mine}"
        return None

    def _take_over(self, state: State) -> None:
        """Go on from a state if it is of this guard and was begun with the same settings."""
        difference = self._difference_of(state)
        if difference is not None:
            self._begin_anew(difference)
            return
        fresh = self._monitor.snapshot()
        try:
            check_state(state)
            counts = sum_of([state])
            alarm_time = state["alarm_time"]
            beginning = state["began"]
            began = {"time": float(beginning["time"]), "why": str(beginning["why"])}
            for name in ("delta", "horizon"):
                if state["monitor"]["test"][name] != fresh[name]:
                    raise ValueError(f"its {name} is not {fresh[name]}")
            self._monitor.restore(state["monitor"])
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            self._monitor = self._new_monitor()
            self._begin_anew(f"its state is damaged ({error})")
            return
        self._counts = counts
        self._alarm_time = alarm_time
        self._began = began

    def _begin_anew(self, why: str) -> None:
        place = self._store.set_aside(self._slot)
        self._began = {"time": time.time(), "why": why}
        log.warning("the monitor starts afresh: %s; the old state is kept as %s", why, place)

    def _save_often(self) -> None:
        while not self._ends.wait(1.0):
            self._save()

    def _save(self) -> None:
        try:
            self._others = self._read_others()
            self._follow_acknowledgement(self._store.acknowledged())
            view = self.view()
            point = {"time": time.time()}
            for name in ("rate", "log_martingale"):
                point[name] = view[name]
            self.history.append(point)
            self._store.put(self._slot, self._state(with_monitor=True))
        except Exception as error:
            # A full disk, or a ledger that is being replaced, must not end the service.
            log.warning("the monitor's state could not be saved: %s", error)

    def _read_others(self) -> list[State]:
        others = []
        for state in self._store.states():
            is_of_this_guard = state.get("guard") == self._backend.id
            if state.get("slot") == self._slot or not is_of_this_guard:
                continue
            try:
                check_state(state)
            except (LookupError, TypeError, ValueError, OverflowError):
                # Its own process sets a damaged state aside when it starts again.
                continue
            others.append(state)
        return others

    def _state(self, *, with_monitor: bool = False) -> State:
        with self._lock:
            counts = [[*key, number] for key, number in self._counts.items()]
        state: State = {
            "slot": self._slot,
            "guard": self._backend.id,
            "delta": self._delta,
            "window": self._window,
            "began": self._began,
            "alarm_time": self._alarm_time,
            "counts": counts,
            "snapshot": self._monitor.snapshot(),
        }
        if with_monitor:
            state["monitor"] = self._monitor.state()
        return state

    # ── the alarm

    def _alarm(self, snapshot: dict[str, Any]) -> None:
        self._alarm_time = self._later_than_acknowledged()
        log.warning({"alarm": True, "guard": self._backend.id, **snapshot})
        if self._webhook is not None:
            event = {"event": "fdbd drift alarm", "guard": self._backend.id, **snapshot}
            threading.Thread(target=_post, args=(self._webhook, event), daemon=True).start()

    def acknowledge(self, note: str) -> dict[str, Any]:
        """Somebody has seen the alarm: all processes begin a new test. Returns the view then."""
        record = {"time": self._later_than_acknowledged(), "note": note}
        self._store.acknowledge(record)
        self._follow_acknowledgement(record)
        log.warning({"acknowledged": True, "guard": self._backend.id, "note": note})
        return self.view()

    def _follow_acknowledgement(self, record: State) -> None:
        moment: Any = record.get("time")
        if not _is_past(moment) or moment <= self._acknowledged_time():
            return
        self._acknowledged = record
        # A test that begins in the future began before the clock was set back.
        is_older = self._began["time"] < moment or self._began["time"] > time.time()
        if is_older:
            self._monitor.reset()
            self._alarm_time = None
            note = str(record.get("note", ""))[:200]
            self._began = {"time": moment, "why": f"the alarm was acknowledged: {note}"}

    def _later_than_acknowledged(self) -> float:
        """The time now; but later than the latest acknowledgement, also if the clock was set back
        meanwhile."""
        return max(time.time(), self._acknowledged_time() + 0.001)

    def _acknowledged_time(self) -> float:
        moment = self._acknowledged.get("time", 0.0)
        return moment if _is_past(moment) else 0.0

    # ── the sum over all processes

    def view(self) -> dict[str, Any]:
        """The monitors of all processes as one."""
        states = [self._state(), *self._others]
        merged = _merged(states, self._processes, self._delta, self._acknowledged_time())
        return {**merged, "began": self._began}

    def counts(self) -> Counts:
        """The counters of all processes together."""
        return sum_of([self._state(), *self._others])


def _merged(
    states: list[State], processes: int, delta: float, acknowledged: float
) -> dict[str, Any]:
    """The monitors of several processes as one.

    Rates add up. The process of slot i bets with its own part of delta: its capital reaches
    1/(part_i · delta) with probability at most part_i · delta. So the capital times part_i reaches
    1/delta no more often than that, and the largest of these products does so with probability at
    most delta (the union bound, since the parts sum to less than 1), whatever the order in which
    requests reach the processes.
    """
    living = [state for state in states if state["slot"] < processes]
    if not living:
        living = states[:1]
    snapshots = [state["snapshot"] for state in living]
    window = 0
    ood_in_window = 0
    log_martingales = []
    for state in living:
        snapshot = state["snapshot"]
        window += snapshot["window"]
        if snapshot["window"]:
            ood_in_window += round(snapshot["rate"] * snapshot["window"])
        log_part = math.log(part_of_delta(state["slot"]))
        log_martingales.append(snapshot["log_martingale"] + log_part)
    alarm_times = [state["alarm_time"] for state in states if state["alarm_time"] is not None]
    return {
        "samples": sum(state["snapshot"]["samples"] for state in states),
        "ood": sum(state["snapshot"]["ood"] for state in states),
        **rate(ood_in_window, window, snapshots[0]["confidence"]),
        "expected_rate": snapshots[0]["expected_rate"],
        "log_martingale": max(log_martingales),
        "alarm_level": -math.log(delta),
        "alarm": any(_has_alarm(state, acknowledged) for state in states),
        "alarm_time": max(alarm_times, default=None),
        "processes": len(living),
    }


def _is_past(moment: Any) -> bool:
    """Whether this is a time at which somebody can have seen an alarm. One far in the future, from
    a damaged file, would hide all alarms until then."""
    return isinstance(moment, float) and 0.0 <= moment <= time.time() + _CLOCK_SECONDS


def _has_alarm(state: State, acknowledged: float) -> bool:
    """Whether a process has an alarm that nobody has seen yet."""
    if not state["snapshot"]["alarm"]:
        return False
    return (state["alarm_time"] or math.inf) > acknowledged


def sum_of(states: list[State]) -> Counts:
    """The counters of several states."""
    counts: Counts = defaultdict(float)
    for state in states:
        for *key, number in state["counts"]:
            counts[tuple(key)] += float(number)
    return counts


def check_state(state: State) -> None:
    """ValueError, LookupError or TypeError if a state that was read from a file is damaged in what
    the sums over all processes need: a damaged one would fail every later request."""
    _check_number("slot", state["slot"], 0, _MAX_SLOTS)
    if not isinstance(state["slot"], int):
        raise ValueError("its slot is not a whole number")
    if state["alarm_time"] is not None:
        _check_number("alarm_time", state["alarm_time"], 0.0, math.inf)
    _check_snapshot(state["snapshot"])
    counts = state["counts"]
    if not isinstance(counts, list) or len(counts) > _MAX_COUNTERS:
        raise ValueError("its counters are not a list, or too many")
    for entry in counts:
        *key, number = entry
        _check_number("counters", number, 0, _LARGEST_COUNT)
        _check_key(key)


def _check_snapshot(snapshot: Any) -> None:
    """The numbers of a monitor that `_merged` adds up."""
    for name in ("samples", "ood", "window"):
        _check_number(name, snapshot[name], 0, 2**63)
        if not isinstance(snapshot[name], int):
            raise ValueError(f"its {name} is not a whole number")
    if snapshot["window"]:
        _check_number("rate", snapshot["rate"], 0.0, 1.0)
    for name in ("confidence", "expected_rate"):
        _check_number(name, snapshot[name], 0.0, 1.0)
    _check_number("log_martingale", snapshot["log_martingale"], -math.inf, math.inf)
    if not isinstance(snapshot["alarm"], bool):
        raise ValueError("its alarm is neither true nor false")


def _check_number(name: str, value: object, low: float, high: float) -> None:
    """A finite number between `low` and `high`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:  # type: ignore[arg-type, operator]
        raise ValueError(f"its {name} is not a number that it can be")


def _check_key(key: list[Any]) -> None:
    """The name of a counter and its labels, as many as the metrics expect."""
    if not key or not all(isinstance(part, str) for part in key):
        raise ValueError("its counters are malformed")
    name, *labels = key
    if len(labels) != _LABELS.get(name, 0):
        raise ValueError("its counters have other labels")
    is_of_class = name in ("samples", "ood")
    if is_of_class and not (labels[0].isascii() and labels[0].isdigit() and len(labels[0]) < 10):
        raise ValueError("its counters are of no class")


def _post(address: str, event: dict[str, Any]) -> None:
    """Send an alarm, three tries."""
    body = json.dumps(event).encode()
    headers = {"content-type": "application/json"}
    for wait in (1, 5, 0):
        try:
            request = urllib.request.Request(address, body, headers, method="POST")
            with urllib.request.urlopen(request, timeout=5):
                return
        except (OSError, ValueError) as error:
            log.warning("the alarm could not be sent: %s", error)
            time.sleep(wait)
