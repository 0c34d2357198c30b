"""The same application as a Ray Serve deployment: replicas on a cluster, autoscaled, with one view
of all monitors."""

from __future__ import annotations

import math
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fdbd.jobs.ray import connect
from fdbd.serve.run import Service, application, backend_of, bind, describe, say_where
from fdbd.serve.state_store import State, Store
from fdbd.util.extras import require

_STALE_SECONDS = 10.0
"""A slot that was not written for so long is free: its replica writes every second while it lives,
later under load."""
_PATIENCE_SECONDS = 30.0
"""How long a new replica waits for the slot of a dead one, whose monitor it then goes on with."""


class Ledger:
    """An actor that holds the states of all replicas, for each guard."""

    def __init__(self) -> None:
        self._states: dict[str, dict[int, State]] = {}
        self._written: dict[tuple[str, int], float] = {}
        self._acknowledged: dict[str, State] = {}

    def claim(self, guard: str, most: int | None) -> int | None:
        """A slot that no living replica has; None if each of the first `most` is taken."""
        now = time.monotonic()
        slot = 0
        while now - self._written.get((guard, slot), -math.inf) < _STALE_SECONDS:
            slot += 1
        if most is not None and slot >= most:
            return None
        self._written[guard, slot] = now
        return slot

    def release(self, guard: str, slot: int) -> None:
        self._written.pop((guard, slot), None)

    def put(self, guard: str, slot: int, state: State) -> None:
        self._states.setdefault(guard, {})[slot] = state
        self._written[guard, slot] = time.monotonic()

    def states(self, guard: str) -> list[State]:
        return list(self._states.get(guard, {}).values())

    def set_aside(self, guard: str, slot: int) -> None:
        self._states.get(guard, {}).pop(slot, None)

    def acknowledge(self, guard: str, record: State) -> None:
        self._acknowledged[guard] = record

    def acknowledged(self, guard: str) -> State:
        return self._acknowledged.get(guard, {})


class LedgerStore(Store):
    """The ledger as the `Store` of one of `replicas`. If the ledger dies, it is replaced and the
    replicas fill the new one."""

    def __init__(self, guard: str, replicas: int) -> None:
        super().__init__()
        self._ray = require("ray", "ray")
        self._guard = guard
        self._replicas = replicas
        self._slot = 0

    def claim(self) -> int:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        most: int | None = self._replicas
        while True:
            slot = self._ask("claim", most)
            if slot is not None:
                self._slot = int(slot)
                return self._slot
            time.sleep(0.5)
            if time.monotonic() > deadline:
                most = None

    def release(self) -> None:
        self._ask("release", self._slot)

    def put(self, slot: int, state: State) -> None:
        self._ask("put", slot, state)

    def states(self) -> list[State]:
        found: list[State] = self._ask("states")
        return found

    def set_aside(self, slot: int) -> str:
        self._ask("set_aside", slot)
        return "nowhere"

    def acknowledge(self, record: State) -> None:
        self._ask("acknowledge", record)

    def acknowledged(self) -> State:
        found: State = self._ask("acknowledged")
        return found

    def _ask(self, method: str, *arguments: Any) -> Any:
        place = {
            "name": "fdbd-watch",
            "namespace": "fdbd",
            "lifetime": "detached",
            "get_if_exists": True,
        }
        ledger = self._ray.remote(Ledger).options(**place, num_cpus=0, max_restarts=-1).remote()
        answer = getattr(ledger, method).remote(self._guard, *arguments)
        return self._ray.get(answer, timeout=10)


def deployment(service: Service) -> Any:
    """A bound Ray Serve application around a guard, for `ray.serve.run`. The guards' files travel
    with it, the model's weights must be reachable from each node."""
    serve = require("ray.serve", "ray")
    least = service.workers
    most = service.max_workers or service.workers
    contents = {}
    for name, path in service.guards.items():
        contents[name] = (Path(path).name, Path(path).read_bytes())
    on_replica = replace(service, state=None, workers=1)

    def build() -> Any:
        folder = Path(tempfile.mkdtemp(prefix="fdbd-serve-"))
        guards = {}
        for name, (file_name, content) in contents.items():
            path = folder / name / file_name
            path.parent.mkdir()
            path.write_bytes(content)
            guards[name] = str(path)
        return application(
            replace(on_replica, guards=guards),
            store=lambda name: LedgerStore(name, most),
            processes=most,
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
    ray = require("ray", "ray")
    serve = require("ray.serve", "ray")
    if service.metrics_port is not None:
        raise ValueError("with --engine ray there is one port: leave --metrics-port out")
    # An error in a file ends here, before anything is deployed.
    backends = {name: backend_of(service, path) for name, path in service.guards.items()}
    # An error if the port is taken; 0 becomes one that is free.
    with bind(host, port) as bound:
        port = bound.getsockname()[1]
    connect(address)
    cores = int(ray.cluster_resources().get("CPU", 0))
    if service.workers > cores:
        raise ValueError(
            f"{service.workers} replicas need a core each, and the cluster has {cores}: lower "
            "--workers"
        )
    serve.start(http_options={"host": host, "port": port}, logging_config={"log_level": "WARNING"})
    serve.run(deployment(service), name="fdbd", route_prefix="/")
    for name, backend in backends.items():
        print(describe(name, backend), file=sys.stderr)
    say_where(host, port, f" with {service.workers} replicas on Ray")
    ended = threading.Event()
    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, lambda *_: ended.set())
    try:
        ended.wait()
    finally:
        serve.delete("fdbd")
        if address is None and not os.environ.get("RAY_ADDRESS"):
            serve.shutdown()
