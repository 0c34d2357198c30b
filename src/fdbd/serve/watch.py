"""What a service has been doing: requests, batches, decisions and drift, over all its processes and
across restarts.

Each process counts for itself and writes its state to a slot of the store once per second; the
process that is asked adds the slots up. After a kill at most the last second is lost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
import urllib.request
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from fdbd.monitor.stream import StreamMonitor, rate
from fdbd.serve.backend import Answers, Backend
from fdbd.util import files
from fdbd.util.extras import require

log = logging.getLogger("fdbd.serve")

State = dict[str, Any]  # of one process, as JSON takes it, with the number of its slot
Counts = defaultdict[tuple[str, ...], float]
"""Numbers by family and labels; a histogram's last label is the number of the bucket."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ROWS = (
    1,
    2,
    4,
    8,
    16,
    32,
    64,
    128,
    256,
)  # upper ends of the histograms of latencies and of batches
HISTORY = 300  # points of the page's chart, at most one per second


class Store:
    """Where processes put their states so that each can see all. In this one there is a single
    process."""

    def claim(self) -> int:
        """A slot that no living process has, for as long as this process lives."""
        return 0

    def put(self, slot: int, state: State) -> None:
        """Keep a state, whole or not at all. Called once per second."""

    def states(self) -> list[State]:
        """What was last put into each slot."""
        return []


class FolderStore(Store):
    """Slots as files of a folder that the processes of one machine share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._held = contextlib.ExitStack()
        self._last: State = {}

    def claim(self) -> int:
        slot = 0
        while (
            self._held.enter_context(files.lock(self.folder / f"slot-{slot}.lock", wait=False))
            is False
        ):
            slot += 1
        return slot

    def put(self, slot: int, state: State) -> None:
        if state != self._last:  # an idle service leaves the disk alone
            files.write_json(self.folder / f"slot-{slot}.json", state)
            self._last = state

    def states(self) -> list[State]:
        found = (files.read_json(path) for path in sorted(self.folder.glob("slot-*.json")))
        return [state for state in found if isinstance(state, dict)]


class Watch:
    """Counts what the service does in this process, and shows the sum over all processes.

    Args:
        backend: the guard.
        store: where the processes meet and what a restart finds; None: nothing outlives the
            process.
        processes: how many share the alarm's probability: each has delta/processes, so that all
            together raise a false alarm with probability at most delta per horizon.
        delta, window: as for `fdbd.Monitor`.
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
        self._backend, self._store, self._webhook = backend, store or Store(), webhook
        self._processes, self._delta = processes, delta
        options: Any = {"window": window, "delta": delta / processes, "on_alarm": self._alarm}
        self._monitor = StreamMonitor(
            backend.calibration.tolist(), backend.expected_rate, **options
        )
        self._counts: Counts = defaultdict(float)
        self._slot = self._waiting = 0
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        """Rate and drift over the last minutes, as this process saw them."""
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._saver = threading.Thread(target=self._save_often, name="fdbd-watch", daemon=True)

    def count(self, answers: Answers, seconds: float) -> None:
        """Note the decisions on a batch, and the model's seconds for it."""
        flags = answers.is_ood.tolist()
        self._monitor.count(answers.scores.tolist(), flags)
        with self._lock:
            self._observe(len(flags), ROWS, "batch_rows")
            self._counts["model_seconds",] += seconds
            for label, is_ood in zip(answers.labels.tolist(), flags):
                self._counts["samples", str(label)] += 1
                self._counts["ood", str(label)] += is_ood

    def count_request(self, path: str, status: int, seconds: float) -> None:
        """Note a request and its answer."""
        with self._lock:
            self._counts["requests", path, str(status)] += 1
            self._observe(seconds, SECONDS, "request_seconds", path)

    def _observe(self, value: float, ends: tuple[float, ...], name: str, *labels: str) -> None:
        """A value into a histogram: the number of its bucket, and the sum."""
        self._counts[(name, *labels, str(bisect_left(ends, value)))] += 1
        self._counts[(f"{name}_sum", *labels)] += value

    def start(self) -> None:
        """Take a slot, go on from what an earlier process left there, and save once per second from
        now on."""
        self._slot = self._store.claim()
        for state in self._store.states():
            if state.get("slot") == self._slot:
                self._restore(state)
        self._saver.start()

    def stop(self) -> None:
        """Save a last time and end."""
        self._ends.set()
        self._saver.join()
        self._save()

    def _restore(self, state: State) -> None:
        try:
            counts = _sum_of([state])
            self._monitor.restore(state["monitor"])
            self._counts = counts
        except (KeyError, TypeError, ValueError) as error:
            log.warning(
                "the monitor starts afresh: its saved state is damaged or of another guard: %s",
                error,
            )

    def _save_often(self) -> None:
        while not self._ends.wait(1.0):
            self._save()

    def _save(self) -> None:
        try:
            view = self.view()
            self.history.append(
                {
                    "time": time.time(),
                    "rate": view["rate"],
                    "log_martingale": view["log_martingale"],
                }
            )
            self._store.put(self._slot, self._state())
        except (
            Exception
        ) as error:  # a full disk, or a ledger that is being replaced, must not end the service
            log.warning("the monitor's state could not be saved: %s", error)

    def _state(self) -> State:
        with self._lock:
            counts = [[*key, number] for key, number in self._counts.items()]
        snapshot = self._monitor.snapshot()
        return {
            "slot": self._slot,
            "monitor": self._monitor.state(),
            "counts": counts,
            "snapshot": snapshot,
        }

    def _alarm(self, snapshot: dict[str, Any]) -> None:
        log.warning({"alarm": True, **snapshot})
        if self._webhook is not None:
            threading.Thread(target=_post, args=(self._webhook, snapshot), daemon=True).start()

    def view(self) -> dict[str, Any]:
        """The monitors of all processes as one."""
        return self._merged(self._all())

    def _merged(self, states: list[State]) -> dict[str, Any]:
        """Rates add up. Each of R monitors bets with delta/R, so the highest capital divided by R
        reaches 1/delta with probability at most delta (the union bound), whatever the order in
        which requests reach the processes."""
        snapshots = [state["snapshot"] for state in states]
        window = sum(s["window"] for s in snapshots)
        ood = sum(round(s["rate"] * s["window"]) for s in snapshots if s["window"])
        return {
            **{name: sum(s[name] for s in snapshots) for name in ("samples", "ood")},
            **rate(ood, window, snapshots[0]["confidence"]),
            "expected_rate": snapshots[0]["expected_rate"],
            "log_martingale": max(s["log_martingale"] for s in snapshots)
            - math.log(self._processes),
            "alarm_level": -math.log(self._delta),
            "alarm": any(s["alarm"] for s in snapshots),
            "processes": len(snapshots),
        }

    def exposition(self, waiting: int) -> bytes:
        """All numbers in the text format of Prometheus, with the number of rows that are
        waiting."""
        self._waiting = waiting
        text: bytes = require("prometheus_client", "serve").generate_latest(self)
        return text

    def collect(self) -> Iterator[Any]:
        """The numbers as metric families of Prometheus."""
        core, states = require("prometheus_client.core", "serve"), self._all()
        counts, view = _sum_of(states), self._merged(states)
        names = dict(enumerate(self._backend.class_names))
        for name, what, labels in (
            ("requests", "Requests by path and status.", ["path", "status"]),
            ("model_seconds", "Seconds that the model worked.", []),
            ("samples", "Samples by predicted class.", ["label", "class"]),
            ("ood", "OOD samples by predicted class.", ["label", "class"]),
        ):
            family = core.CounterMetricFamily(f"fdbd_{name}", what, labels=labels)
            for key in sorted(key for key in counts if key[0] == name):
                named = [names.get(int(key[1]), "")] if "class" in labels else []
                family.add_metric([*key[1:], *named], counts[key])
            yield family
        for name, what, labels, ends in (
            ("request_seconds", "Seconds from arrival to answer.", ["path"], SECONDS),
            ("batch_rows", "Rows per batch.", [], ROWS),
        ):
            family = core.HistogramMetricFamily(f"fdbd_{name}", what, labels=labels)
            for key in sorted(key for key in counts if key[0] == f"{name}_sum"):
                sums = accumulate(
                    counts[(name, *key[1:], str(bucket))] for bucket in range(len(ends) + 1)
                )
                family.add_metric(
                    key[1:], list(zip((*map(str, ends), "+Inf"), sums)), sum_value=counts[key]
                )
            yield family
        for name, what, value in (
            ("queue_rows", "Rows that wait in this process.", self._waiting),
            ("ood_rate", "Share of OOD samples in the window.", view["rate"]),
            ("ood_rate_low", "Lower end of the rate's interval.", view["rate_low"]),
            ("ood_rate_high", "Upper end of the rate's interval.", view["rate_high"]),
            (
                "ood_rate_expected",
                "The rate that the threshold was set for.",
                view["expected_rate"],
            ),
            (
                "log_martingale",
                "Natural logarithm of the drift test's capital.",
                view["log_martingale"],
            ),
            ("drift_alarm", "1 once the drift test has raised its alarm.", int(view["alarm"])),
        ):
            yield core.GaugeMetricFamily(f"fdbd_{name}", what, math.nan if value is None else value)

    def _all(self) -> list[State]:
        """States of all processes, this one's as it is now."""
        others = (
            s
            for s in self._store.states()
            if s.get("slot") != self._slot and {"snapshot", "counts"} <= s.keys()
        )
        return [self._state(), *others]


def _sum_of(states: list[State]) -> Counts:
    counts: Counts = defaultdict(float)
    for state in states:
        for *key, number in state["counts"]:
            counts[tuple(map(str, key))] += float(number)
    return counts


def _post(address: str, snapshot: dict[str, Any]) -> None:
    """Send an alarm, three tries."""
    body = json.dumps({"event": "fdbd drift alarm", **snapshot}).encode()
    for wait in (1, 5, 0):
        try:
            request = urllib.request.Request(
                address, body, {"content-type": "application/json"}, method="POST"
            )
            with urllib.request.urlopen(request, timeout=5):
                return
        except (OSError, ValueError) as error:
            log.warning("the alarm could not be sent: %s", error)
            time.sleep(wait)
