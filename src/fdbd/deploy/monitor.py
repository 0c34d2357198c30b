"""Monitor: what a guard has been saying lately, and whether the stream has drifted from its calibration data."""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from fdbd.core import artifact
from fdbd.core.artifact import ArtifactError
from fdbd.core.batch import as_tensor
from fdbd.decision.guard import Decision, Guard, NotCalibratedError
from fdbd.deploy.drift import DriftTest
from fdbd.util.extras import require


class Monitor:
    """Watches a guard in service: a rolling OOD rate with its interval, and a sequential test for drift.

    Call it in place of the guard, or give it what the service decided. Updates from several threads take turns.

    - The rate is that of the last `window` samples, with Wilson's interval.
    - The alarm goes off when the capital of a `DriftTest` on the scores reaches 1/delta. While the stream is
      exchangeable with the calibration data this happens with probability at most `delta` in each horizon, at whatever
      time one looks (Ville's inequality). Samples in bursts, such as frames of a video, are not exchangeable: give one
      of each burst. An alarm stays until `reset`.
    - Memory: at most 16 bytes for each of `horizon` samples and the calibration scores, and the window.

    Args:
        guard: calibrated. A guard without a model does for `update`: ``Monitor(fdbd.load("guard.safetensors"))``.
        window: samples of the rolling rate.
        delta: largest probability of a false alarm in a horizon, a fraction.
        horizon: samples after which the drift test starts anew.
        confidence: of the rate's interval, a fraction.
        seed: of the test's random tie-breaking.
        on_alarm: called once with the snapshot when the alarm goes off, such as a function that pages someone.

    >>> guard = Guard(torch.nn.Linear(4, 3)).fit([torch.randn(64, 4)]).calibrate([torch.randn(64, 4)])
    >>> monitor = Monitor(guard)
    >>> decision = monitor(torch.randn(8, 4))  # the guard's decision
    >>> monitor.snapshot()["samples"], monitor.alarm
    (8, False)
    """

    def __init__(
        self,
        guard: Guard,
        *,
        window: int = 1000,
        delta: float = 0.01,
        horizon: int = 100_000,
        confidence: float = 0.95,
        seed: int = 0,
        on_alarm: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        if guard.threshold is None:
            raise NotCalibratedError("the guard has no threshold: call calibrate(loader, tpr=0.95) before")
        if not isinstance(window, int) or window < 1:
            raise ValueError(f"window is {window!r}, expected a number of samples, at least 1")
        if not 0 < confidence < 1:
            raise ValueError(f"confidence is {confidence}, expected a fraction between 0 and 1")
        self.guard = guard
        self.threshold = guard.threshold
        self.window = window
        self.confidence = float(confidence)
        self.on_alarm = on_alarm
        self.samples = 0
        """Samples seen in all."""
        self.ood = 0
        """Samples that were out-of-distribution, of all."""
        self.alarm_at: int | None = None
        """Number of the sample at which the alarm went off, from 1; None: no alarm."""
        self._recent: deque[bool] = deque(maxlen=window)
        self._recent_ood = 0
        self._test = DriftTest(self.threshold.calibration.tolist(), delta, horizon, seed)
        self._lock = threading.Lock()

    @property
    def alarm(self) -> bool:
        """Whether drift was found since the last `reset`."""
        return self._test.alarm

    def __call__(self, images: Any) -> Decision:
        """The guard's decision on a batch, which is also counted."""
        decision: Decision = self.guard(images)
        self.update(decision)
        return decision

    def update(self, observed: Decision | Any, is_ood: Any = None) -> dict[str, Any]:
        """Count a batch and return the snapshot after it.

        Args:
            observed: a Decision, or scores (N,) in any form, such as the ``score`` of an exported graph.
            is_ood: (N,) decisions that go with scores; None: the guard's threshold decides.
        """
        scores, flags = self._values(observed, is_ood)
        with self._lock:
            was_quiet = not self._test.alarm
            for score, flag in zip(scores, flags):
                self._count(flag)
                self._test.update(score)
                if self._test.alarm and self.alarm_at is None:
                    self.alarm_at = self.samples
            snapshot = self._snapshot()
        if was_quiet and snapshot["alarm"] and self.on_alarm is not None:
            self.on_alarm(snapshot)  # outside the lock: it may ask the monitor
        return snapshot

    def snapshot(self) -> dict[str, Any]:
        """The state of affairs as plain JSON values.

        ``samples`` and ``ood`` count everything; ``window``, ``rate``, ``rate_low`` and ``rate_high`` are of the last
        samples (None before the first); ``expected_rate`` is what the threshold was set for; ``log_martingale`` is the
        natural logarithm of the drift test's capital now and ``peak_log_martingale`` its highest, the alarm being at
        ``alarm_level``; ``alarm_at`` is the number of the sample that set it off.
        """
        with self._lock:
            return self._snapshot()

    def reset(self) -> None:
        """Start window and drift test anew and take the alarm back; the totals go on.

        The bound holds again where the time of the reset was fixed beforehand. It does not after a reset that answers
        an alarm: the calibration scores are the same, and those that gave one false alarm are likely to give another.
        For the bound anew, calibrate the guard on fresh data and start a new Monitor.
        """
        with self._lock:
            self._recent.clear()
            self._recent_ood = 0
            self.alarm_at = None
            self._test.alarm, self._test.peak = False, 0.0
            self._test.restart()

    def prometheus(self, registry: Any = None, prefix: str = "fdbd") -> Any:
        """Register the monitor's numbers with a Prometheus registry, which reads them when it is scraped.

        Metrics: ``<prefix>_samples_total``, ``<prefix>_ood_total``, ``<prefix>_ood_rate`` with ``_low`` and ``_high``,
        ``<prefix>_log_martingale`` and ``<prefix>_drift_alarm`` (0 or 1).

        Args:
            registry: a ``prometheus_client.CollectorRegistry``; None: the default one.
            prefix: of the metrics' names; a second monitor in a registry needs another.

        Returns:
            the collector, for ``registry.unregister``.
        """
        client = require("prometheus_client", "monitor")
        collector = _Collector(self, prefix)
        (client.REGISTRY if registry is None else registry).register(collector)
        return collector

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state as one safetensors file; `load` goes on from it bit for bit."""
        with self._lock:
            description = {
                "kind": "monitor",
                "calibration": _fingerprint(self.threshold.calibration),
                "window": self.window,
                "confidence": self.confidence,
                "samples": self.samples,
                "ood": self.ood,
                "alarm_at": self.alarm_at,
                "test": self._test.state(),
            }
            tensors = {
                "reference": torch.tensor(self._test.reference.tolist(), dtype=torch.float64),
                "recent": torch.tensor(list(self._recent), dtype=torch.bool),
            }
        artifact.write(path, description, tensors)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], guard: Guard, on_alarm: Callable[[dict[str, Any]], object] | None = None
    ) -> Monitor:
        """The monitor in a file, around the guard that it was watching. ArtifactError says what is wrong."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"no monitor at {os.fspath(path)!r}: no such file")
        description, tensors = artifact.read(path)
        if description.get("kind") != "monitor":
            raise ArtifactError(f"{os.fspath(path)!r} holds no monitor; expected a file that Monitor.save wrote")
        try:
            monitor = cls(guard, window=description["window"], confidence=description["confidence"], on_alarm=on_alarm)
            calibration = monitor.threshold.calibration
            if description["calibration"] != _fingerprint(calibration):
                raise ArtifactError(
                    f"{os.fspath(path)!r} watched a guard with other calibration scores: load it with that guard, or "
                    "start a new Monitor"
                )
            reference, recent = tensors["reference"].tolist(), tensors["recent"].tolist()
            monitor._test = DriftTest.from_state(description["test"], calibration.tolist(), reference)
            monitor.samples, monitor.ood = int(description["samples"]), int(description["ood"])
            monitor.alarm_at = None if description["alarm_at"] is None else int(description["alarm_at"])
            monitor._recent.extend(bool(flag) for flag in recent)
            monitor._recent_ood = sum(monitor._recent)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, ArtifactError):
                raise
            raise ArtifactError(f"{os.fspath(path)!r} does not hold a working monitor: {error}") from None
        return monitor

    def _values(self, observed: Any, is_ood: Any) -> tuple[list[float], list[bool]]:
        if isinstance(observed, Decision):
            observed, is_ood = observed.scores, observed.is_ood
        scores = as_tensor(observed).detach().cpu()
        if scores.ndim != 1 or scores.is_complex() or scores.dtype == torch.bool:
            raise ValueError(
                f"scores have shape {tuple(scores.shape)} and dtype {scores.dtype}, expected one number a sample, (N,)"
            )
        if not scores.is_floating_point():
            scores = scores.to(torch.float64)
        if is_ood is None:
            if self.threshold.per_class:
                raise ValueError("a threshold by predicted class cannot judge scores alone: give a Decision, or is_ood")
            is_ood = self.threshold.is_ood(scores.to(self.threshold.value.device))
        flags = as_tensor(is_ood).detach().cpu()
        if flags.shape != scores.shape or flags.dtype != torch.bool:
            raise ValueError(
                f"is_ood has shape {tuple(flags.shape)} and dtype {flags.dtype}, expected bool of shape "
                f"{tuple(scores.shape)}, one a score"
            )
        return scores.tolist(), flags.tolist()

    def _count(self, flag: bool) -> None:
        if len(self._recent) == self.window:
            self._recent_ood -= self._recent[0]
        self._recent.append(flag)
        self._recent_ood += flag
        self.samples += 1
        self.ood += flag

    def _snapshot(self) -> dict[str, Any]:
        test, count = self._test, len(self._recent)
        low, high = wilson(self._recent_ood, count, self.confidence) if count else (None, None)
        target = self.threshold.target
        return {
            "samples": self.samples,
            "ood": self.ood,
            "window": count,
            "rate": self._recent_ood / count if count else None,
            "rate_low": low,
            "rate_high": high,
            "expected_rate": target if self.threshold.kind == "conformal" else 1 - target,
            "confidence": self.confidence,
            "log_martingale": test.log_martingale,
            "peak_log_martingale": test.peak,
            "alarm_level": -math.log(test.delta),
            "delta": test.delta,
            "alarm": test.alarm,
            "alarm_at": self.alarm_at,
            "horizon": test.horizon,
            "samples_in_horizon": test.count,
            "restarts": test.restarts,
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


class _Collector:
    """A monitor in the form that Prometheus registries take."""

    def __init__(self, monitor: Monitor, prefix: str) -> None:
        self.monitor, self.prefix = monitor, prefix

    def describe(self) -> Iterator[Any]:
        return self.collect()  # tells the registry the names, so that it refuses a second monitor under them

    def collect(self) -> Iterator[Any]:
        core = require("prometheus_client.core", "monitor")
        now, prefix = self.monitor.snapshot(), self.prefix
        for name, help_, value in (
            ("samples", "Samples seen.", now["samples"]),
            ("ood", "Samples that were out-of-distribution.", now["ood"]),
        ):
            yield core.CounterMetricFamily(f"{prefix}_{name}", help_, value=value)
        for name, help_, value in (
            ("ood_rate", "Share of out-of-distribution samples in the window.", now["rate"]),
            ("ood_rate_low", "Lower end of the rate's interval.", now["rate_low"]),
            ("ood_rate_high", "Upper end of the rate's interval.", now["rate_high"]),
            ("log_martingale", "Natural logarithm of the drift test's capital.", now["log_martingale"]),
            ("drift_alarm", "1 once the drift test has raised its alarm.", int(now["alarm"])),
        ):
            yield core.GaugeMetricFamily(f"{prefix}_{name}", help_, value=math.nan if value is None else value)


def _fingerprint(calibration: Tensor) -> str:
    return hashlib.sha256(calibration.detach().to("cpu", torch.float64).numpy().tobytes()).hexdigest()
