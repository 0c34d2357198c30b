"""From the command line to a running service: the socket, the processes, the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

from fdbd.serve.app import App
from fdbd.serve.backend import Backend, OnnxBackend
from fdbd.serve.decisions import DecisionLog
from fdbd.serve.guards import Guards, ServedGuard
from fdbd.serve.http_protocol import RESERVE, server
from fdbd.serve.log_lines import log_json
from fdbd.serve.memory import limit_arenas
from fdbd.serve.orders import Orders
from fdbd.serve.settings import Settings
from fdbd.serve.state_store import FolderStore, Store
from fdbd.serve.watch import Watch

log = logging.getLogger("fdbd.serve")

_START_SECONDS = 300.0
"""How long the processes may take to load the guard."""
_OTHER_FILES = 128
"""Files that a process may have open beside its connections: libraries, the guard, state, records,
pipes."""
_LOOK_SECONDS = 1.0
"""How often the supervisor looks at its processes, and each of them says that it goes on."""
_LAST_SECONDS = 5.0
"""How long after the time of a request a process that was told to end may still be there."""


@dataclass(frozen=True)
class Service:
    """Everything that a process needs to build the service."""

    guards: dict[str, str]
    """Files of guards, or ONNX files, by the names that they have in the service."""
    settings: Settings = field(default_factory=Settings)
    state: str | None = None
    """The folder of the monitor's state; with several guards each has a folder in it. None: no
    state is kept."""
    workers: int = 1
    """Processes; with Ray: replicas."""
    max_workers: int | None = None
    """With Ray: replicas under load; None: always `workers`."""
    delta: float = 0.01
    window: int = 1000
    webhook: str | None = None
    shadow: str | None = None
    """The file of a guard that decides on what the first one is asked; its decisions are only
    recorded."""
    decisions: str | None = None
    """The folder of the records of decisions; None: none are written."""
    decisions_bytes: int = 1_000_000_000
    """Of the records of one process; the oldest are deleted."""
    decisions_thumbnails: bool = False
    metrics_port: int | None = None
    """A second port for metrics and health, without a token."""
    model: str | None = None
    checkpoint: str | None = None
    device: str | None = "auto"
    trust: bool = False


def backend_of(service: Service, path: str) -> Backend:
    """A guard, by the kind of its file. An ONNX file does without torch."""
    threads = None
    if service.workers > 1:
        threads = max(1, (os.cpu_count() or 1) // service.workers)
    if path.endswith(".onnx"):
        return OnnxBackend(path, threads=threads)
    import torch

    from fdbd.decision.guard_file import open_guard
    from fdbd.serve.torch_backend import TorchBackend

    if threads is not None:
        torch.set_num_threads(threads)
    opened = open_guard(
        path,
        model=service.model,
        checkpoint=service.checkpoint,
        device=service.device,
        trust=service.trust,
    )
    return TorchBackend(opened)


def application(
    service: Service,
    store: Callable[[str], Store] | None = None,
    processes: int | None = None,
    orders: Orders | None = None,
) -> App:
    """The ASGI application of one process.

    Args:
        store: makes, from a guard's name, what its processes share; None: files in the folder of
            the service.
        processes: how many there are; None: as the service says.
        orders: where the processes tell each other which guards are loaded.
    """
    new_store = store or (lambda name: _store_of(service, name))
    loaders = {}
    for name in service.guards:
        loaders[name] = _loader(service, name, new_store, processes or service.workers)
    guards = Guards(loaders)
    app = App(
        guards,
        service.settings,
        decisions=_decisions_of(service, guards),
        thumbnails=service.decisions_thumbnails,
    )
    if orders is not None:
        orders.follow(app.process)
    return app


def _loader(
    service: Service, name: str, store: Callable[[str], Store], processes: int
) -> Callable[[], ServedGuard]:
    """What builds one guard of the service when it is called."""

    def load() -> ServedGuard:
        backend = backend_of(service, service.guards[name])
        watch = Watch(
            backend,
            store(name),
            processes=processes,
            delta=service.delta,
            window=service.window,
            webhook=service.webhook,
        )
        guard = ServedGuard(name, backend, service.settings, watch)
        is_first = name == next(iter(service.guards))
        if service.shadow is not None and is_first:
            guard.shadow = _shadow(service, service.shadow, backend)
        return guard

    return load


def _shadow(service: Service, path: str, backend: Backend) -> ServedGuard:
    shadow = backend_of(service, path)
    takes_images = backend.preprocess is not None and shadow.preprocess is not None
    takes_texts = backend.tokenizer is not None
    if shadow.input_name != backend.input_name:
        raise ValueError(
            f"the shadow takes {shadow.input_name}, the guard {backend.input_name}: they must take "
            "the same"
        )
    # Images and texts are prepared for each of the two as it needs them.
    is_prepared = takes_images or takes_texts
    if shadow.row_shape != backend.row_shape and not is_prepared:
        raise ValueError(
            f"the shadow takes rows of {list(shadow.row_shape)}, the guard of "
            f"{list(backend.row_shape)}: they must take the same"
        )
    return ServedGuard("shadow", shadow, service.settings)


def _store_of(service: Service, name: str) -> Store:
    if service.state is None:
        return Store()
    folder = Path(service.state)
    if len(service.guards) > 1:
        folder = folder / name
    return FolderStore(folder)


def _decisions_of(service: Service, guards: Guards) -> DecisionLog | None:
    if service.decisions is None:
        return None

    def count_dropped(number: int) -> None:
        for guard in guards.loaded()[:1]:
            if guard.watch is not None:
                guard.watch.count_event("decisions_dropped", number)

    return DecisionLog(Path(service.decisions), service.decisions_bytes, count_dropped)


def run(
    service: Service,
    host: str,
    port: int,
    *,
    when_up: Callable[[str], object] | None = None,
) -> None:
    """Answer until SIGTERM or Ctrl-C, which finish what was taken and refuse the rest.

    Args:
        when_up: called with the service's address once a service of one process answers.
    """
    if os.name == "nt" and service.workers > 1:
        raise ValueError(
            "on Windows processes cannot share a port: use --workers 1, or several services and a "
            "proxy"
        )
    if service.workers == 1:
        _run_alone(service, host, port, when_up)
        return
    # Nobody listens on these sockets: they keep the ports for the processes.
    with bind(host, port, shared=True) as bound:
        port = bound.getsockname()[1]
        if service.metrics_port is None:
            _Supervisor(service, host, port).run()
            return
        with bind(host, service.metrics_port, shared=True):
            _Supervisor(service, host, port).run()


def _run_alone(
    service: Service, host: str, port: int, when_up: Callable[[str], object] | None
) -> None:
    """Answer in this process."""
    listening = _listen(host, port)
    metrics = None
    if service.metrics_port is not None:
        metrics = _listen(host, service.metrics_port)
    port = listening.getsockname()[1]
    log_json()

    def is_up(app: App) -> None:
        print(_describe_all(app), file=sys.stderr)
        say_where(host, port)
        if when_up is not None:
            # In a thread: starting a browser may take seconds, and the service answers meanwhile.
            threading.Thread(target=when_up, args=(_address(host, port),), daemon=True).start()

    orders = Orders.in_new_folder()
    _reload_at_hangup(service, Orders(orders.folder))
    try:
        _answer(service, listening, metrics, orders, is_up)
    finally:
        orders.remove()


def _reload_at_hangup(service: Service, orders: Orders) -> None:
    """Have SIGHUP order that all guards are loaded from their files again."""
    is_windows = not hasattr(signal, "SIGHUP")
    if is_windows:
        return

    def order() -> None:
        for name in service.guards:
            orders.give(name, True)

    def handle(*_: Any) -> None:
        # In a thread: the interrupted code may hold the lock of the orders.
        threading.Thread(target=order, name="fdbd-reload").start()

    signal.signal(signal.SIGHUP, handle)


def _listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket on which clients may connect from now on, and wait until the guard answers."""
    listening = bind(host, port, shared=shared)
    listening.listen(2048)
    return listening


def _answer(
    service: Service,
    listening: socket.socket,
    metrics: socket.socket | None,
    orders: Orders | None,
    is_up: Callable[[App], object],
    *,
    ends_if_stuck: bool = False,
) -> None:
    """Answer on a socket until this process is told to end."""
    limit_arenas()
    _allow_open_files(service)
    app = application(service, orders=orders)
    running = server(
        app,
        service.settings,
        metrics=metrics,
        is_up=lambda: is_up(app),
        is_told_to_end=lambda: _end_in_any_case(service.settings.timeout + _LAST_SECONDS),
    )
    if ends_if_stuck:
        threading.Thread(target=_end_if_stuck, args=(app,), daemon=True).start()
    running.run(sockets=[listening])
    if not all(guard.is_ready for guard in app.guards.loaded()):
        # Python would wait for the model's threads, which do not end.
        logging.shutdown()
        os._exit(1)


def _allow_open_files(service: Service) -> None:
    """Have the system allow as many open files as there may be connections; beyond its limit it
    would refuse probes as well. ValueError if it does not allow them."""
    if os.name == "nt":
        return
    import resource

    ports = 1 if service.metrics_port is None else 2
    needed = ports * (service.settings.connections + RESERVE) + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(
            f"the system allows this process {hard:,} open files, and --connections "
            f"{service.settings.connections} needs {needed:,}: give fewer connections, or raise "
            "the limit (ulimit -n)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _end_in_any_case(seconds: float) -> None:
    """End this process after so many seconds, whatever its threads do."""

    def end() -> None:
        log.error("the service did not end within %g s and is ended", seconds)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _end_if_stuck(app: App) -> None:
    """End a process of several whose model does not come back, so that it is replaced. A service of
    one process leaves that to what probes it."""
    while app.process.is_alive:
        time.sleep(1)
    log.error("the model of this process does not come back: the process ends and is replaced")
    logging.shutdown()
    os._exit(1)


@dataclass
class _Worker:
    """One process of several, and whether it goes on."""

    process: multiprocessing.process.BaseProcess
    beats: Any
    """A shared number to which the process adds one now and then, once it answers."""
    beats_seen: int = 0
    silent_for: float = 0.0
    """Seconds of the supervisor's without a beat. If all were stopped together, as by a machine
    that is suspended, none of them has been silent."""

    def listen(self, seconds: float) -> None:
        """Look for beats of the last seconds."""
        beats = self.beats.value
        if beats == self.beats_seen:
            self.silent_for += seconds
        else:
            self.silent_for = 0.0
        self.beats_seen = beats


class _Supervisor:
    """Keeps processes answering on a port that this one has bound, until it is told to end."""

    def __init__(self, service: Service, host: str, port: int) -> None:
        self._service = service
        self._host = host
        self._port = port
        self._spawn = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._is_ending = False
        self._orders = Orders.in_new_folder()

    def run(self) -> None:
        signal.signal(signal.SIGINT, self._end)
        signal.signal(signal.SIGTERM, self._end)
        _reload_at_hangup(self._service, self._orders)
        try:
            self._start_all()
            self._keep()
        finally:
            self._orders.remove()

    def _start_all(self) -> None:
        """Start all processes, and say so once they answer."""
        reports = [self._start() for _ in range(self._service.workers)]
        deadline = time.monotonic() + _START_SECONDS
        first: dict[str, str] = {}
        for report in reports:
            said = _next_report(report, deadline)
            if self._is_ending:
                return
            if "error" in said:
                self._end()
                self._join_all()
                raise ValueError(said["error"])
            first = first or said
        log_json()
        print(first["what"], file=sys.stderr)
        say_where(self._host, self._port)

    def _start(self) -> connection.Connection:
        """Start one process. Returns the connection on which it reports that it answers, or why it
        cannot."""
        receiving, sending = self._spawn.Pipe(duplex=False)
        beats = self._spawn.Value("Q", lock=False)
        arguments = (self._service, self._host, self._port, self._orders, sending, beats)
        process = self._spawn.Process(target=_work, args=arguments)
        process.start()
        sending.close()
        self._workers.append(_Worker(process, beats))
        return receiving

    def _keep(self) -> None:
        """Replace processes that end or do not go on, until all are told to end."""
        while not self._is_ending:
            start = time.monotonic()
            sentinels = [worker.process.sentinel for worker in self._workers]
            connection.wait(sentinels, timeout=_LOOK_SECONDS)
            self._kill_silent(min(time.monotonic() - start, 2 * _LOOK_SECONDS))
            self._replace_ended()
        self._join_all()

    def _kill_silent(self, seconds: float) -> None:
        """Kill processes that have not gone on for longer than a hanging model may take: they were
        stopped, or something in them does not let go of Python's lock."""
        for worker in self._workers:
            worker.listen(seconds)
            patience = 2 * self._service.settings.timeout + _LAST_SECONDS
            if not worker.beats_seen:
                patience = _START_SECONDS
            if worker.silent_for > patience and worker.process.is_alive():
                log.error("a process has not gone on for %.0f s and is killed", worker.silent_for)
                worker.process.kill()
                worker.process.join()

    def _replace_ended(self) -> None:
        """Start a process for each that has ended, or could not be started before."""
        for worker in list(self._workers):
            if not worker.process.is_alive():
                self._workers.remove(worker)
                message = "a process ended and is replaced"
                log.warning({"message": message, "exit_code": worker.process.exitcode})
        while len(self._workers) < self._service.workers and not self._is_ending:
            # Not at once: a process that cannot start would take the processor from the others.
            time.sleep(0.2)
            try:
                self._start()
            except OSError as error:
                # The system has no memory or no process left; the next look tries again.
                log.error("a process could not be started: %s", error)
                return

    def _end(self, *_: Any) -> None:
        self._is_ending = True
        for worker in self._workers:
            worker.process.terminate()

    def _join_all(self) -> None:
        """Wait for the processes as long as they may take, then kill them."""
        # Once more: one of them may have been starting when the others were told.
        self._end()
        deadline = time.monotonic() + self._service.settings.timeout + 2 * _LAST_SECONDS
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers.clear()


def _next_report(report: connection.Connection, deadline: float) -> dict[str, str]:
    """What a process says when it has started; an error if it ended without a word."""
    try:
        if report.poll(max(0.0, deadline - time.monotonic())):
            said: dict[str, str] = report.recv()
            return said
        return {"error": f"a process of the service did not start within {_START_SECONDS:g} s"}
    except EOFError:
        return {"error": "a process of the service could not start; the lines above say why"}


def _work(
    service: Service,
    host: str,
    port: int,
    orders: Orders,
    report: connection.Connection,
    beats: Any,
) -> None:
    """One of several processes. Each has a socket of its own, and the system spreads new
    connections over them: on one common socket, the process that wakes first might take a whole
    burst."""
    # Signals to the whole group reach the supervisor, too, which tells the others what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    log_json()
    threading.Thread(target=_end_with_supervisor, daemon=True).start()

    def is_up(app: App) -> None:
        app.process.spawn(_beat(beats))
        # Nobody reads the report of a process that replaces another.
        with contextlib.suppress(OSError):
            report.send({"what": _describe_all(app)})

    try:
        listening = bind(host, port, shared=True)
        metrics = None
        if service.metrics_port is not None:
            metrics = bind(host, service.metrics_port, shared=True)
        _answer(service, listening, metrics, orders, is_up, ends_if_stuck=True)
    except (ValueError, OSError) as error:
        with contextlib.suppress(OSError):
            report.send({"error": str(error)})
        raise SystemExit(2) from None


async def _beat(beats: Any) -> None:
    """Tell the supervisor that this process goes on, as long as its event loop does."""
    while True:
        beats.value += 1
        await asyncio.sleep(_LOOK_SECONDS)


def _end_with_supervisor() -> None:
    supervisor = multiprocessing.parent_process()
    assert supervisor is not None
    supervisor.join()
    os.kill(os.getpid(), signal.SIGTERM)


def describe(name: str, backend: Backend) -> str:
    """A guard in one line."""
    return f"{name} ({backend.id}): {backend.name}. {backend.promise}"


def _describe_all(app: App) -> str:
    lines = []
    for guard in app.guards.loaded():
        lines.append(describe(guard.name, guard.backend))
        if guard.shadow is not None:
            lines.append(describe(f"shadow of {guard.name}", guard.shadow.backend))
    return "\n".join(lines)


def say_where(host: str, port: int, how: str = "") -> None:
    """Say where the service is, once it answers."""
    address = _address(host, port)
    places = "page /, interface /docs, metrics /metrics"
    print(f"serving on {address}{how} ({places}); Ctrl-C ends it", file=sys.stderr)
    sys.stderr.flush()


def _address(host: str, port: int) -> str:
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}"


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket at an address, which several processes may share; ValueError if that is not
    possible."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Connections inherit it. Event loops set it only on sockets that they made: without it, each
    # answer's second segment waits for the client's delayed acknowledgement, 40 ms.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"cannot listen on {host}:{port} ({reason}); choose another --port or --host"
        ) from None
    return bound
