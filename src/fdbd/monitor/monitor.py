"""Monitor: what a guard has been saying lately, and whether the stream has drifted from its
calibration data."""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fdbd.core import artifact
from fdbd.core.artifact import ArtifactError
from fdbd.core.batch import ArrayLike, Batch, Inputs, as_tensor
from fdbd.decision.answers import Decision
from fdbd.decision.guard import Guard
from fdbd.monitor.stream import Snapshot, StreamMonitor, as_digits
from fdbd.util.extras import require

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.registry import Collector


class Monitor(StreamMonitor):
    """Watches a guard in service: a rolling OOD rate with its interval, and a sequential test for
    drift.

    Call it in place of the guard, or give it what the service decided, from any thread. The alarm
    of its `DriftTest` stays until `reset`; while the stream is exchangeable with the calibration
    data, it goes off with probability at most `delta` in each horizon. Samples in bursts, such as
    frames of a video, are not exchangeable: give one of each.

    Args:
        guard: calibrated. A guard without a model does for `update`:
            ``Monitor(fdbd.load("guard.safetensors"))``.
        window: latest samples of the rolling rate.
        delta: largest probability of a false alarm in a horizon, a fraction.
        horizon: samples after which the drift test restarts.
        confidence: of the rate's interval, which is Wilson's, a fraction.
        seed: of the test's random tie-breaking.
        on_alarm: called once with the snapshot when the alarm goes off, such as a function that
            pages someone.

    >>> guard = (
    ...     Guard(torch.nn.Linear(4, 3)).fit([torch.randn(500, 4)]).calibrate([torch.randn(500, 4)])
    ... )
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
        on_alarm: Callable[[Snapshot], object] | None = None,
    ) -> None:
        self.guard = guard
        self.threshold = guard.stages.require_threshold()
        super().__init__(
            self.threshold.calibration.tolist(),
            self.threshold.expected_rate,
            window=window,
            delta=delta,
            horizon=horizon,
            confidence=confidence,
            seed=seed,
            on_alarm=on_alarm,
            guard_id=guard.id,
        )

    def __call__(self, images: Inputs | Batch) -> Decision:
        """The guard's decision on a batch, which is also counted."""
        decision: Decision = self.guard(images)
        self.update(decision)
        return decision

    def update(self, observed: Decision | ArrayLike, is_ood: ArrayLike | None = None) -> Snapshot:
        """Count a batch, a Decision or scores (N,) such as an exported graph gives, and return the
        snapshot after it. `is_ood` (N,) are the decisions that go with scores; None: the guard's
        threshold decides."""
        if isinstance(observed, Decision):
            is_ood = observed.is_ood
            observed = observed.scores
        scores = as_tensor(observed).detach().cpu()
        if scores.ndim != 1 or scores.is_complex() or scores.dtype == torch.bool:
            found = f"scores have shape {tuple(scores.shape)} and dtype {scores.dtype}"
            raise ValueError(f"{found}, expected one number per sample (N,)")
        if is_ood is None:
            if self.threshold.per_class:
                raise ValueError(
                    "a threshold by predicted class cannot judge scores alone: give a Decision, or"
                    " is_ood"
                )
            if not scores.is_floating_point():
                scores = scores.double()
            is_ood = self.threshold.is_ood(scores.to(self.threshold.value.device))
        flags = as_tensor(is_ood).detach().cpu()
        if flags.shape != scores.shape or flags.dtype != torch.bool:
            found = f"is_ood has shape {tuple(flags.shape)} and dtype {flags.dtype}"
            raise ValueError(
                f"{found}, expected bool of shape {tuple(scores.shape)}, one per score"
            )
        return self.count(scores.tolist(), flags.tolist())

    def prometheus(
        self, registry: CollectorRegistry | None = None, prefix: str = "fdbd"
    ) -> Collector:
        """Register the monitor's numbers with a Prometheus registry (None: the default one), which
        reads them when scraped: ``<prefix>_samples_total``, ``_ood_total``, ``_ood_rate`` with
        ``_low`` and ``_high``, ``_log_martingale`` and ``_drift_alarm`` (0 or 1). A second monitor
        in a registry needs another prefix. Returns the collector, for ``registry.unregister``."""
        client = require("prometheus_client", "monitor")
        collector = _Collector(self, prefix)
        if registry is None:
            registry = client.REGISTRY
        registry.register(collector)
        return collector

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state as one safetensors file; `load` continues from it bit for bit."""
        state: dict[str, Any] = self.state()
        scores = bytearray(base64.b64decode(state.pop("reference")))
        flags = [flag == "1" for flag in state.pop("recent")]
        tensors = {
            "reference": torch.frombuffer(scores, dtype=torch.float64),
            "recent": torch.tensor(flags, dtype=torch.bool),
        }
        artifact.write(path, {"kind": "monitor", **state}, tensors)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        guard: Guard,
        on_alarm: Callable[[Snapshot], object] | None = None,
    ) -> Monitor:
        """The monitor in a file, around the guard that it was watching. ArtifactError says what is
        wrong."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"no monitor at {os.fspath(path)!r}: no such file")
        description, tensors = artifact.read(path)
        if description.get("kind") != "monitor":
            raise ArtifactError(
                f"{os.fspath(path)!r} does not hold a monitor; expected a file that Monitor.save"
                " wrote"
            )
        monitor = cls(guard, on_alarm=on_alarm)
        try:
            scores = tensors["reference"].double().numpy().tobytes()
            reference = base64.b64encode(scores).decode()
            recent = as_digits(tensors["recent"].tolist())
            monitor.restore({**description, "reference": reference, "recent": recent})
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ArtifactError(
                f"{os.fspath(path)!r} does not hold a working monitor: {error}"
            ) from None
        return monitor


class _Measure(NamedTuple):
    """A number of a snapshot as Prometheus shows it."""

    name: str
    key: str
    """Its name in the snapshot."""
    meaning: str
    is_total: bool = False
    """Whether it only grows."""


_MEASURES = (
    _Measure("samples", "samples", "Samples seen.", is_total=True),
    _Measure("ood", "ood", "Samples that were out-of-distribution.", is_total=True),
    _Measure("ood_rate", "rate", "Share of out-of-distribution samples in the window."),
    _Measure("ood_rate_low", "rate_low", "Lower end of the rate's interval."),
    _Measure("ood_rate_high", "rate_high", "Upper end of the rate's interval."),
    _Measure("log_martingale", "log_martingale", "Natural logarithm of the drift test's capital."),
    _Measure("drift_alarm", "alarm", "1 once the drift test has raised its alarm."),
)


class _Collector:
    """A monitor in the form that Prometheus registries take."""

    def __init__(self, monitor: Monitor, prefix: str) -> None:
        self.monitor = monitor
        self.prefix = prefix

    def describe(self) -> Iterator[Any]:
        # From these names the registry knows to refuse a second monitor with the same prefix.
        return self.collect()

    def collect(self) -> Iterator[Any]:
        core = require("prometheus_client.core", "monitor")
        now: dict[str, Any] = self.monitor.snapshot()
        for measure in _MEASURES:
            family = core.GaugeMetricFamily
            if measure.is_total:
                family = core.CounterMetricFamily
            value = now[measure.key]
            # Before the first sample there is no rate.
            number = math.nan if value is None else float(value)
            yield family(f"{self.prefix}_{measure.name}", measure.meaning, value=number)
