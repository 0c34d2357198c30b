"""The numbers of a service in Prometheus' text format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from fdbd.serve.backend import Backend
from fdbd.serve.watch import ROWS, SECONDS, Counts, Watch
from fdbd.util.extras import require
from fdbd.util.version import __version__


@dataclass
class Observed:
    """One guard of the service, as the metrics see it."""

    name: str
    backend: Backend
    watch: Watch
    waiting: int
    is_ready: bool


def exposition(guards: Iterable[Observed], gauges: dict[str, tuple[str, float]]) -> bytes:
    """All numbers of all guards, and those of the process: by name, what it is and its value."""
    collector = _Collector(list(guards), gauges)
    text: bytes = require("prometheus_client", "serve").generate_latest(collector)
    return text


class _Collector:
    """What prometheus_client asks for metric families."""

    def __init__(self, guards: list[Observed], gauges: dict[str, tuple[str, float]]) -> None:
        self._core = require("prometheus_client.core", "serve")
        self._guards = guards
        self._gauges = gauges
        self._counts = {guard.name: guard.watch.counts() for guard in guards}
        self._views = {guard.name: guard.watch.view() for guard in guards}

    def collect(self) -> Iterator[Any]:
        yield self._info()
        yield self._counter("requests", "Requests by path and status.", ["path", "status"])
        yield self._counter("model_seconds", "Seconds that the model worked.", [])
        yield self._by_class("samples", "Samples by predicted class.")
        yield self._by_class("ood", "OOD samples by predicted class.")
        yield self._counter("decisions_dropped", "Decision records that were dropped.", [])
        yield self._counter("shadow_samples", "Samples that the shadow guard decided.", [])
        yield self._counter(
            "shadow_disagreements", "Samples on which the shadow guard's is_ood differs.", []
        )
        yield self._counter("shadow_dropped", "Samples that the shadow guard was not asked.", [])
        yield self._histogram(
            "request_seconds", "Seconds from arrival to answer.", ["path"], SECONDS
        )
        yield self._histogram("batch_rows", "Rows per batch.", [], ROWS)
        yield from self._monitor()
        for name, (what, value) in self._gauges.items():
            yield self._core.GaugeMetricFamily(f"fdbd_{name}", what, value)

    def _info(self) -> Any:
        family = self._core.InfoMetricFamily(
            "fdbd_guard", "The guard that decides.", labels=["guard"]
        )
        for guard in self._guards:
            about = {
                "id": guard.backend.id,
                "guard_version": guard.backend.version,
                "what": guard.backend.name,
                "fdbd": __version__,
            }
            family.add_metric([guard.name], about)
        return family

    def _counter(self, name: str, what: str, labels: list[str]) -> Any:
        family = self._core.CounterMetricFamily(f"fdbd_{name}", what, labels=["guard", *labels])
        for guard, counts in self._counts.items():
            for key in _keys(counts, name):
                family.add_metric([guard, *key[1:]], counts[key])
        return family

    def _by_class(self, name: str, what: str) -> Any:
        labels = ["guard", "label", "class"]
        family = self._core.CounterMetricFamily(f"fdbd_{name}", what, labels=labels)
        for guard in self._guards:
            names = guard.backend.class_names
            counts = self._counts[guard.name]
            for key in _keys(counts, name):
                label = int(key[1])
                class_name = names[label] if label < len(names) else ""
                family.add_metric([guard.name, key[1], class_name], counts[key])
        return family

    def _histogram(self, name: str, what: str, labels: list[str], ends: tuple[float, ...]) -> Any:
        family = self._core.HistogramMetricFamily(f"fdbd_{name}", what, labels=["guard", *labels])
        upper_ends = [*map(str, ends), "+Inf"]
        for guard, counts in self._counts.items():
            for key in _keys(counts, f"{name}_sum"):
                in_buckets = []
                for bucket in range(len(upper_ends)):
                    in_buckets.append(counts[(name, *key[1:], str(bucket))])
                # Prometheus counts in each bucket what the smaller ones hold, too.
                up_to = list(zip(upper_ends, accumulate(in_buckets)))
                family.add_metric([guard, *key[1:]], up_to, sum_value=counts[key])
        return family

    def _monitor(self) -> Iterator[Any]:
        is_ready = [guard.is_ready for guard in self._guards]
        waiting = [guard.waiting for guard in self._guards]
        yield self._gauge("ready", "1 if the guard answers.", is_ready)
        yield self._gauge("queue_rows", "Rows that wait in this process.", waiting)
        for name, key, what in (
            ("ood_rate", "rate", "Share of OOD samples in the window."),
            ("ood_rate_low", "rate_low", "Lower end of the rate's interval."),
            ("ood_rate_high", "rate_high", "Upper end of the rate's interval."),
            ("ood_rate_expected", "expected_rate", "The rate that the threshold was set for."),
            ("log_martingale", "log_martingale", "Natural logarithm of the drift test's capital."),
            ("drift_alarm", "alarm", "1 once the drift test has raised its alarm."),
        ):
            values = [self._views[guard.name][key] for guard in self._guards]
            yield self._gauge(name, what, values)

    def _gauge(self, name: str, what: str, values: Sequence[float | None]) -> Any:
        """A number of each guard; None if it is not known yet."""
        family = self._core.GaugeMetricFamily(f"fdbd_{name}", what, labels=["guard"])
        for guard, value in zip(self._guards, values):
            family.add_metric([guard.name], math.nan if value is None else float(value))
        return family


def _keys(counts: Counts, name: str) -> list[tuple[str, ...]]:
    return sorted(key for key in counts if key[0] == name)
