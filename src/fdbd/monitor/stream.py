"""What was decided lately, and whether scores have drifted from the calibration scores: without
torch or a guard."""

from __future__ import annotations

import base64
import hashlib
import math
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple, TypeAlias

from fdbd.monitor.drift import DriftTest

Snapshot: TypeAlias = dict[str, object]
MAX_WINDOW = 10_000_000
"""The most samples in the window of the rate: bounds what a forged state can ask for."""
_KEPT_BEGINNINGS = 100
_LONGEST_REASON = 500


class StreamMonitor:
    """Counts decisions, keeps the OOD rate of the last samples, and tests whether scores have
    drifted from calibration.

    `fdbd.Monitor`, which explains the other options, is this around a guard; a service holds one
    per process.

    Args:
        calibration: the calibration scores.
        expected_rate: the share of in-distribution samples that the threshold rejects, as it was
            set.
        guard_id: `Guard.id` of the guard whose scores these are; None: not known. A state of
            another guard is then refused.

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
        guard_id: str | None = None,
    ) -> None:
        _check_window(window)
        if not 0 < confidence < 1:
            raise ValueError(f"confidence is {confidence}, expected a fraction between 0 and 1")
        self.calibration = array("d", calibration)
        self.expected_rate = expected_rate
        self.guard_id = guard_id
        self.window = window
        self.confidence = float(confidence)
        self.on_alarm = on_alarm
        self.samples = 0
        """Samples seen in all."""
        self.ood = 0
        """Those of them that were out-of-distribution."""
        self.beginnings: list[dict[str, object]] = [_beginning("started", 0, None)]
        """When and why the test began, and began anew: ``time`` in seconds since 1970, ``why``,
        after how many ``samples``, and the sample at which an alarm that was acknowledged had gone
        off (``alarm_at``). The latest comes last; the first and the latest 99 are kept."""
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

    def __repr__(self) -> str:
        state = "no alarm" if self.alarm_at is None else f"ALARM at sample {self.alarm_at:,}"
        return f"{type(self).__name__}({self.samples:,} samples, {self.ood:,} OOD, {state})"

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
            # Outside the lock: it may ask the monitor.
            self.on_alarm(snapshot)
        return snapshot

    def snapshot(self) -> Snapshot:
        """The present state as plain JSON values: ``samples`` and ``ood`` of everything;
        ``window``, ``rate``, ``rate_low`` and ``rate_high`` of the last samples (None before the
        first); the natural logarithm of the drift test's capital now (``log_martingale``) and at
        its highest, with the ``alarm_level``; and what was set."""
        with self._lock:
            test = self._test
            recent = rate(self._recent.count(True), len(self._recent), self.confidence)
            return {
                "samples": self.samples,
                "ood": self.ood,
                "expected_rate": self.expected_rate,
                "confidence": self.confidence,
                "alarm_at": self.alarm_at,
                "log_martingale": test.log_martingale,
                "delta": test.delta,
                "alarm": test.alarm,
                "horizon": test.horizon,
                "restarts": test.restarts,
                **recent,
                "peak_log_martingale": test.peak,
                "alarm_level": -math.log(test.delta),
                "samples_in_horizon": test.count,
            }

    def reset(self, why: str = "reset") -> None:
        """Restart window and drift test and take the alarm back; the totals go on. After an alarm
        the bound no longer holds, since calibration scores that gave one false alarm are likely to
        give another: calibrate the guard on fresh data, and start a new monitor.

        `why` is kept in `beginnings`, with the time and the alarm that was taken back."""
        with self._lock:
            self.beginnings.append(_beginning(why, self.samples, self.alarm_at))
            if len(self.beginnings) > _KEPT_BEGINNINGS:
                # The very first beginning stays.
                del self.beginnings[1]
            self._recent.clear()
            self.alarm_at = None
            self._test.alarm = False
            self._test.peak = 0.0
            self._test.restart()

    def acknowledge(self, why: str) -> Snapshot:
        """Someone has seen the alarm: note why it may end, begin anew (`reset`), and return the
        snapshot. ValueError without a reason, or if there is no alarm.

        >>> monitor = StreamMonitor([0.1, 0.2, 0.3, 0.4], expected_rate=0.05, delta=0.5)
        >>> _ = monitor.count([-1.0] * 50, [True] * 50)
        >>> monitor.acknowledge("camera 3 was covered")["alarm"]
        False
        >>> monitor.beginnings[-1]["why"]
        'camera 3 was covered'
        """
        if not why.strip():
            raise ValueError("an alarm is acknowledged with a reason: say what was found")
        with self._lock:
            if not self.alarm:
                raise ValueError("there is no alarm to acknowledge")
            self.reset(why)
            return self.snapshot()

    def state(self) -> Snapshot:
        """Everything as JSON values; `restore` continues from it bit for bit."""
        with self._lock:
            return {
                "calibration": self._fingerprint,
                "guard": self.guard_id,
                "window": self.window,
                "confidence": self.confidence,
                "samples": self.samples,
                "ood": self.ood,
                "alarm_at": self.alarm_at,
                "beginnings": [dict(beginning) for beginning in self.beginnings],
                "test": self._test.state(),
                "reference": base64.b64encode(self._test.reference.tobytes()).decode(),
                "recent": as_digits(self._recent),
            }

    def restore(self, state: Mapping[str, object]) -> None:
        """Go on from what `state` gave. A state of another guard or calibration, or a damaged one,
        is a ValueError, and the monitor stays as it was."""
        values: dict[str, Any] = dict(state)
        try:
            if values["calibration"] != self._fingerprint:
                raise ValueError(
                    "it watched a guard with other calibration scores: use it with that guard, or "
                    "start a new monitor"
                )
            # Older states do not say which guard they belong to.
            guard_id = values.get("guard")
            if guard_id is not None and self.guard_id is not None and guard_id != self.guard_id:
                raise ValueError(
                    f"it watched the guard {str(guard_id)[:40]}, not {self.guard_id}: use it with "
                    "that guard, or start a new monitor"
                )
            restored = _Restored.from_values(values, self.calibration)
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(
                f"the state of a monitor cannot be read: {str(error)[:200]!r}"
            ) from None
        with self._lock:
            self._test = restored.test
            self._recent = restored.recent
            self.window = restored.window
            self.confidence = restored.confidence
            self.samples = restored.samples
            self.ood = restored.ood
            self.alarm_at = restored.alarm_at
            self.beginnings = restored.beginnings


class _Restored(NamedTuple):
    """The checked parts of a saved state."""

    test: DriftTest
    recent: deque[bool]
    window: int
    confidence: float
    samples: int
    ood: int
    alarm_at: int | None
    beginnings: list[dict[str, object]]

    @classmethod
    def from_values(cls, values: dict[str, Any], calibration: Sequence[float]) -> _Restored:
        """The parts; ValueError if they do not fit each other."""
        window = values["window"]
        _check_window(window)
        flags = values["recent"]
        if not isinstance(flags, str) or len(flags) > window or set(flags) - set("01"):
            raise ValueError("its last decisions cannot be read")
        confidence = values["confidence"]
        if not isinstance(confidence, float) or not 0 < confidence < 1:
            raise ValueError("its confidence is not a fraction")
        samples = _whole("samples", values["samples"])
        ood = _whole("ood", values["ood"])
        alarm_at = values["alarm_at"]
        if alarm_at is not None:
            alarm_at = _whole("alarm_at", alarm_at)
        if ood > samples or len(flags) > samples:
            raise ValueError("its counts do not fit each other")
        if alarm_at is not None and not 1 <= alarm_at <= samples:
            raise ValueError("its counts do not fit each other")
        reference = array("d")
        try:
            reference.frombytes(base64.b64decode(values["reference"], validate=True))
        except ValueError:
            raise ValueError("its scores cannot be read") from None
        test = DriftTest.from_state(values["test"], calibration, reference)
        recent = deque((flag == "1" for flag in flags), maxlen=window)
        beginnings = _read_beginnings(values.get("beginnings", []))
        return cls(test, recent, window, confidence, samples, ood, alarm_at, beginnings)


def as_digits(flags: Iterable[bool]) -> str:
    """A 1 for each flag that is set, and a 0 for each other."""
    digits = {True: "1", False: "0"}
    return "".join(digits[flag] for flag in flags)


def _check_window(window: object) -> None:
    if type(window) is not int or not 1 <= window <= MAX_WINDOW:
        raise ValueError(
            f"window is {str(window)[:40]}, expected a number of samples, at least 1 and at most "
            f"{MAX_WINDOW:,}"
        )


def _whole(name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{name} is not a count")
    return value


def _beginning(why: str, samples: int, alarm_at: int | None) -> dict[str, object]:
    return {
        "time": time.time(),
        "why": why.strip()[:_LONGEST_REASON],
        "samples": samples,
        "alarm_at": alarm_at,
    }


def _read_beginnings(values: object) -> list[dict[str, object]]:
    """The saved beginnings; one that says that the state was restored, if there are none."""
    if not isinstance(values, list) or len(values) > _KEPT_BEGINNINGS:
        raise ValueError("its beginnings cannot be read")
    found = []
    for value in values:
        if not isinstance(value, dict):
            raise ValueError("its beginnings cannot be read")
        why = value.get("why")
        moment = value.get("time")
        alarm_at = value.get("alarm_at")
        is_text = isinstance(why, str) and len(why) <= _LONGEST_REASON
        if not is_text or not isinstance(moment, float) or not math.isfinite(moment):
            raise ValueError("its beginnings cannot be read")
        if alarm_at is not None:
            alarm_at = _whole("alarm_at", alarm_at)
        samples = _whole("samples", value.get("samples"))
        found.append({"time": moment, "why": why, "samples": samples, "alarm_at": alarm_at})
    if not found:
        found.append(_beginning("restored from a state that does not say when it began", 0, None))
    return found


def rate(ood: int, window: int, confidence: float) -> Snapshot:
    """The part of a snapshot about the last samples: how many, the OOD rate, and its interval (None
    without any)."""
    if not window:
        return {"window": 0, "rate": None, "rate_low": None, "rate_high": None}
    low, high = wilson(ood, window, confidence)
    return {"window": window, "rate": ood / window, "rate_low": low, "rate_high": high}


def wilson(successes: int, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's interval (1927) of a rate, both ends within [0, 1].

    >>> [round(end, 3) for end in wilson(5, 100)]
    [0.022, 0.112]
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate = successes / count
    extra = z * z / count
    centre = (rate + extra / 2) / (1 + extra)
    half = z / (1 + extra) * math.sqrt(rate * (1 - rate) / count + extra / (4 * count))
    # Exact at the ends, where rounding would leave the interval.
    low = centre - half if successes else 0.0
    high = centre + half if successes < count else 1.0
    return low, high
