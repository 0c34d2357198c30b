"""The same application as a Ray Serve deployment: replicas on a cluster, autoscaled, with one view
of all monitors."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fdbd.jobs.ray import connect
from fdbd.serve.run import Service, announce, application, backend_of, bind
from fdbd.serve.watch import Store
from fdbd.util.extras import require

_STALE_SECONDS = 10.0
"""A slot that was not written for so long is free: its replica writes every second while it lives,
later under load."""
_PATIENCE_SECONDS = 30.0
"""How long a new replica waits for the slot of a dead one before it takes one beyond the stated
number."""


class Ledger:
    """An actor that holds the states of all replicas."""

    def __init__(self) -> None:
        self._states: dict[int, dict[str, Any]] = {}
        self._written: dict[int, float] = {}

    def claim(self, most: int | None) -> int | None:
        """A slot that no living replica has; None where each of the first `most` is taken."""
        now = time.monotonic()
        slot = 0
        while slot in self._written and now - self._written[slot] < _STALE_SECONDS:
            slot += 1
        if most is not None and slot >= most:
            return None
        self._written[slot] = now
        return slot

    def put(self, slot: int, state: dict[str, Any]) -> None:
        self._states[slot], self._written[slot] = state, time.monotonic()

    def states(self) -> list[dict[str, Any]]:
        return list(self._states.values())


class LedgerStore(Store):
    """The ledger as the `Store` of one of `replicas`. One that died is replaced and filled by the
    replicas."""

    def __init__(self, replicas: int) -> None:
        self._ray, self._replicas = require("ray", "ray"), replicas

    def claim(self) -> int:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        most: int | None = (
            self._replicas
        )  # each tests for drift at delta/replicas: more would break the promise
        while (slot := self._ask("claim", most)) is None:
            time.sleep(0.5)
            if time.monotonic() > deadline:
                most = None
        return int(slot)

    def put(self, slot: int, state: dict[str, Any]) -> None:
        self._ask("put", slot, state)

    def states(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("states")
        return found

    def _ask(self, method: str, *arguments: Any) -> Any:
        place = {
            "name": "fdbd-watch",
            "namespace": "fdbd",
            "lifetime": "detached",
            "get_if_exists": True,
        }
        ledger = self._ray.remote(Ledger).options(**place, num_cpus=0, max_restarts=-1).remote()
        return self._ray.get(getattr(ledger, method).remote(*arguments), timeout=10)


def deployment(service: Service) -> Any:
    """A bound Ray Serve application around a guard, for `ray.serve.run`. The guard's file travels
    with it, the model's weights must be reachable from each node."""
    serve = require("ray.serve", "ray")
    least, most = service.workers, service.max_workers or service.workers
    content, name = Path(service.guard).read_bytes(), Path(service.guard).name
    settings = replace(service, state=None, workers=1)

    def build() -> Any:
        path = Path(tempfile.mkdtemp(prefix="fdbd-serve-"), name)
        path.write_bytes(content)
        return application(
            replace(settings, guard=str(path)), store=LedgerStore(most), processes=most
        )

    scaling: dict[str, Any] = {"num_replicas": least}
    if most > least:
        scaling = {"autoscaling_config": {"min_replicas": least, "max_replicas": most}}
    decorated = serve.deployment(
        name="guard",
        max_ongoing_requests=max(100, 4 * service.settings.batch_size),
        graceful_shutdown_timeout_s=service.settings.timeout,
        health_check_period_s=2,
        ray_actor_options={"num_cpus": 1},
        **scaling,
    )(serve.ingress(build)())
    return decorated.bind()


def run_on_ray(service: Service, host: str, port: int, address: str | None) -> None:
    """Deploy on a cluster, or on Ray on this machine, and stay until told to end."""
    ray, serve = require("ray", "ray"), require("ray.serve", "ray")
    backend = backend_of(service)  # an error ends here, before anything is deployed
    with bind(host, port) as bound:  # whether the port is free; 0 becomes one that is
        port = bound.getsockname()[1]
    connect(address)
    if service.workers > (cores := int(ray.cluster_resources().get("CPU", 0))):
        raise ValueError(
            f"{service.workers} replicas need a core each, and the cluster has {cores}: lower --workers"
        )
    serve.start(http_options={"host": host, "port": port}, logging_config={"log_level": "WARNING"})
    serve.run(deployment(service), name="fdbd", route_prefix="/")
    announce(service, backend, host, port, f" with {service.workers} replicas on Ray")
    ended = threading.Event()
    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, lambda *_: ended.set())
    try:
        ended.wait()
    finally:
        serve.delete("fdbd")
        if address is None and not os.environ.get("RAY_ADDRESS"):
            serve.shutdown()
