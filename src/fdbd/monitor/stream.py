"""What was decided lately, and whether scores have drifted from the calibration scores: without
torch or a guard."""

from __future__ import annotations

import base64
import hashlib
import math
import threading
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, TypeAlias

from fdbd.monitor.drift import DriftTest

Snapshot: TypeAlias = dict[str, object]


class StreamMonitor:
    """Counts decisions, keeps the OOD rate of the last samples, and tests whether scores have
    drifted from calibration.

    `fdbd.Monitor`, which explains the other options, is this around a guard; a service holds one
    per process.

    Args:
        calibration: the calibration scores.
        expected_rate: the share of in-distribution samples that the threshold rejects, as it was
            set.

    >>> monitor = StreamMonitor([0.1, 0.2, 0.3, 0.4], expected_rate=0.05)
    >>> monitor.count([0.15, 0.35], [False, False])["rate"]
    0.0
    """

    def __init__(
        self,
        calibration: Sequence[float],
        expected_rate: float,
        *,
        window: int = 1000,
        delta: float = 0.01,
        horizon: int = 100_000,
        confidence: float = 0.95,
        seed: int = 0,
        on_alarm: Callable[[Snapshot], object] | None = None,
    ) -> None:
        if not isinstance(window, int) or window < 1:
            raise ValueError(f"window is {window!r}, expected a number of samples, at least 1")
        if not 0 < confidence < 1:
            raise ValueError(f"confidence is {confidence}, expected a fraction between 0 and 1")
        self.calibration, self.expected_rate = array("d", calibration), expected_rate
        self.window, self.confidence, self.on_alarm = window, float(confidence), on_alarm
        self.samples = self.ood = 0
        """Samples seen in all, and those of them that were out-of-distribution."""
        self.alarm_at: int | None = None
        """Number of the sample at which the alarm went off, from 1; None: no alarm."""
        self._recent: deque[bool] = deque(maxlen=window)
        self._test = DriftTest(self.calibration, delta, horizon, seed)
        self._lock = threading.RLock()
        self._fingerprint = hashlib.sha256(self.calibration.tobytes()).hexdigest()

    @property
    def alarm(self) -> bool:
        """Whether drift was found since the last `reset`."""
        return self._test.alarm

    def count(self, scores: Sequence[float], flags: Sequence[bool]) -> Snapshot:
        """Count samples by their scores and decisions, and return the snapshot after them."""
        with self._lock:
            was_quiet = not self.alarm
            for number, score in enumerate(scores, self.samples + 1):
                self._test.update(score)
                if self.alarm and self.alarm_at is None:
                    self.alarm_at = number
            self.samples += len(flags)
            self.ood += sum(flags)
            self._recent.extend(flags)
            snapshot = self.snapshot()
        if was_quiet and snapshot["alarm"] and self.on_alarm is not None:
            self.on_alarm(snapshot)  # outside the lock: it may ask the monitor
        return snapshot

    def snapshot(self) -> Snapshot:
        """The present state as plain JSON values: ``samples`` and ``ood`` of everything;
        ``window``, ``rate``, ``rate_low`` and ``rate_high`` of the last samples (None before the
        first); the natural logarithm of the drift test's capital now (``log_martingale``) and at
        its highest, with the ``alarm_level``; and what was set."""
        with self._lock:
            test = self._test
            return {
                **{
                    name: getattr(self, name)
                    for name in ("samples", "ood", "expected_rate", "confidence", "alarm_at")
                },
                **{
                    name: getattr(test, name)
                    for name in ("log_martingale", "delta", "alarm", "horizon", "restarts")
                },
                **rate(self._recent.count(True), len(self._recent), self.confidence),
                "peak_log_martingale": test.peak,
                "alarm_level": -math.log(test.delta),
                "samples_in_horizon": test.count,
            }

    def reset(self) -> None:
        """Restart window and drift test and take the alarm back; the totals go on. After an alarm
        the bound does not hold again (calibration scores that gave a false one are likely to give
        another): calibrate the guard on fresh data, and start a new monitor."""
        with self._lock:
            self._recent.clear()
            self.alarm_at = None
            self._test.alarm, self._test.peak = False, 0.0
            self._test.restart()

    def state(self) -> Snapshot:
        """Everything as JSON values; `restore` continues from it bit for bit."""
        with self._lock:
            return {
                "calibration": self._fingerprint,
                **{
                    name: getattr(self, name)
                    for name in ("window", "confidence", "samples", "ood", "alarm_at")
                },
                "test": self._test.state(),
                "reference": base64.b64encode(self._test.reference.tobytes()).decode(),
                "recent": "".join("01"[flag] for flag in self._recent),
            }

    def restore(self, state: Mapping[str, object]) -> None:
        """Go on from what `state` gave. A state of another calibration, or a damaged one, is a
        ValueError."""
        values: dict[str, Any] = dict(state)
        try:
            if values["calibration"] != self._fingerprint:
                other = "it watched a guard with other calibration scores"
                raise ValueError(f"{other}: use it with that guard, or start a new monitor")
            reference = array("d", base64.b64decode(values["reference"], validate=True))
            test = DriftTest.from_state(values["test"], self.calibration, reference)
            recent = deque((flag == "1" for flag in values["recent"]), maxlen=int(values["window"]))
            samples, ood, confidence = (
                int(values["samples"]),
                int(values["ood"]),
                float(values["confidence"]),
            )
            alarm_at = None if values["alarm_at"] is None else int(values["alarm_at"])
            if not (recent.maxlen and 0 < confidence < 1 and 0 <= ood <= samples):
                raise ValueError("its counts do not fit each other")
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"the state of a monitor cannot be read: {error!r}") from None
        with self._lock:
            self._test, self._recent, self.window, self.confidence = (
                test,
                recent,
                recent.maxlen,
                confidence,
            )
            self.samples, self.ood, self.alarm_at = samples, ood, alarm_at


def rate(ood: int, window: int, confidence: float) -> Snapshot:
    """The part of a snapshot about the last samples: how many, the OOD rate, and its interval (None
    where none)."""
    low, high = wilson(ood, window, confidence) if window else (None, None)
    return {
        "window": window,
        "rate": ood / window if window else None,
        "rate_low": low,
        "rate_high": high,
    }


def wilson(successes: int, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's interval (1927) of a rate, both ends within [0, 1].

    >>> [round(end, 3) for end in wilson(5, 100)]
    [0.022, 0.112]
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate, extra = successes / count, z * z / count
    centre = (rate + extra / 2) / (1 + extra)
    half = z / (1 + extra) * math.sqrt(rate * (1 - rate) / count + extra / (4 * count))
    return (centre - half if successes else 0.0), (centre + half if successes < count else 1.0)
