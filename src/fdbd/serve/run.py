"""From the command line to a running service: the socket, the processes, the log."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from multiprocessing import connection
from pathlib import Path
from typing import Any

import uvicorn

from fdbd.serve.app import App, Settings
from fdbd.serve.backend import Backend, OnnxBackend
from fdbd.serve.watch import FolderStore, Store, Watch

log = logging.getLogger("fdbd.serve")


@dataclass(frozen=True)
class Service:
    """Everything that a process needs to build the service."""

    guard: str  #: a guard's file, or an ONNX file
    settings: Settings = field(default_factory=Settings)
    state: str | None = None  #: the folder of the monitor's state; None: none is kept
    workers: int = 1  #: processes; with Ray: replicas
    max_workers: int | None = None  #: with Ray: replicas under load; None: always `workers`
    delta: float = 0.01
    window: int = 1000
    webhook: str | None = None
    model: str | None = None
    checkpoint: str | None = None
    device: str | None = "auto"
    trust: bool = False


def backend_of(service: Service) -> Backend:
    """The guard, by the kind of its file. An ONNX file does without torch."""
    threads = max(1, (os.cpu_count() or 1) // service.workers) if service.workers > 1 else None
    if service.guard.endswith(".onnx"):
        return OnnxBackend(service.guard, threads=threads)
    import torch

    from fdbd.decision.guard_file import open_guard
    from fdbd.serve.torch_backend import TorchBackend

    if threads is not None:
        torch.set_num_threads(threads)
    options = {name: getattr(service, name) for name in ("model", "checkpoint", "device", "trust")}
    return TorchBackend(open_guard(service.guard, **options))


def application(
    service: Service,
    backend: Backend | None = None,
    store: Store | None = None,
    processes: int | None = None,
) -> App:
    """The ASGI application of one process, which meets the others in `store`; None: in the folder
    of the service."""
    backend = backend or backend_of(service)
    if store is None and service.state is not None:
        store = FolderStore(Path(service.state))
    options: Any = {name: getattr(service, name) for name in ("delta", "window", "webhook")}
    return App(
        backend,
        service.settings,
        Watch(backend, store, processes=processes or service.workers, **options),
    )


def run(service: Service, host: str, port: int) -> None:
    """Answer until SIGTERM or Ctrl-C, which finish what was taken and refuse the rest."""
    if os.name == "nt" and service.workers > 1:
        raise ValueError(
            "on Windows processes cannot share a port: use --workers 1, or several services and a proxy"
        )
    listening = bind(host, port)
    listening.listen(2048)  # clients may connect from now on, and wait until the guard answers
    port = listening.getsockname()[1]
    # An error ends here, before anything answers. The guard is loaded by a thread that ends:
    # OpenMP's threads of this one would stay and slow down those of the thread that decides.
    with ThreadPoolExecutor(1) as loading:
        backend = loading.submit(backend_of, service).result()
    _log_json()
    if service.workers == 1:
        announce(service, backend, host, port)
        _answer(application(service, backend), listening)
    else:
        listening.close()  # nobody else has the port: from now on it is shared
        with bind(host, port, shared=True):
            _supervise(service, backend, host, port)


def _answer(app: App, listening: socket.socket) -> None:
    """Answer on a socket until this process is told to end."""
    options: dict[str, Any] = dict.fromkeys(("access_log", "server_header", "proxy_headers"), False)
    options["timeout_graceful_shutdown"] = max(1, round(app.settings.timeout))
    _Server(uvicorn.Config(app, log_config=None, ws="none", lifespan="on", **options)).run(
        sockets=[listening]
    )


def _supervise(service: Service, backend: Backend, host: str, port: int) -> None:
    """Keep `service.workers` processes answering on a port that this one has bound, until it is
    told to end."""
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(service.workers + 1, timeout=300)
    processes: list[multiprocessing.process.BaseProcess] = []
    is_ending = False

    def start(barrier: threading.Barrier | None = None) -> None:
        process = spawn.Process(target=_work, args=(service, host, port, barrier))
        process.start()
        processes.append(process)

    def end(*_: Any) -> None:
        nonlocal is_ending
        is_ending = True
        barrier.abort()
        for process in processes:
            process.terminate()

    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)
    for _ in range(service.workers):
        start(barrier)
    try:
        barrier.wait()
        announce(service, backend, host, port)
    except threading.BrokenBarrierError:
        if not is_ending:
            end()
            raise ValueError(
                "a process of the service could not start; the lines above say why"
            ) from None
    while processes:
        connection.wait([process.sentinel for process in processes])
        for ended in [process for process in processes if not process.is_alive()]:
            processes.remove(ended)
            if not is_ending:
                log.warning(
                    {"message": "a process ended and is replaced", "exit_code": ended.exitcode}
                )
                time.sleep(0.2)  # one that cannot start does not take the processor from the others
                start()


def _work(service: Service, host: str, port: int, barrier: threading.Barrier | None) -> None:
    """One of several processes. Each has a socket of its own, among which the system shares new
    connections out: with a common one, a burst of them may all end at the process that wakes first.
    The first processes wait for each other, for the same reason."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the supervisor, which ends the others by SIGTERM
    _log_json()
    threading.Thread(target=_end_with_supervisor, daemon=True).start()
    try:
        app = application(service)
        listening = bind(host, port, shared=True)
        listening.listen(2048)
        if barrier is not None:
            barrier.wait()
    except BaseException:
        if barrier is not None:
            barrier.abort()
        raise
    _answer(app, listening)


def _end_with_supervisor() -> None:
    supervisor = multiprocessing.parent_process()
    assert supervisor is not None
    supervisor.join()
    os.kill(os.getpid(), signal.SIGTERM)


class _Server(uvicorn.Server):
    """Says that it is not ready any more as soon as it is told to end."""

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.config.app.is_ready = False  # type: ignore[union-attr]
        super().handle_exit(sig, frame)


def announce(service: Service, backend: Backend, host: str, port: int, how: str = "") -> None:
    """Say what is served, and where."""
    address = f"http://{host if ':' not in host else f'[{host}]'}:{port}"
    print(f"{Path(service.guard).name}: {backend.name}. {backend.promise}", file=sys.stderr)
    print(
        f"serving on {address}{how} (page /, interface /docs, metrics /metrics); Ctrl-C ends it",
        file=sys.stderr,
    )
    sys.stderr.flush()


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket at an address, which several processes may share; ValueError where that is not
    possible."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT) if shared else (socket.SO_REUSEADDR,):
        bound.setsockopt(socket.SOL_SOCKET, option, 1)
    # Connections inherit it. Event loops set it only on sockets that they made: without it, each
    # answer's second segment waits for the client's delayed acknowledgement, 40 ms.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"cannot listen on {host}:{port} ({reason}); choose another --port or --host"
        ) from None
    return bound


class _Json(logging.Formatter):
    """One JSON object per line; a message that is a dictionary becomes its fields."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, timezone.utc).isoformat(
            timespec="milliseconds"
        )
        line: dict[str, Any] = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
        }
        line |= record.msg if isinstance(record.msg, dict) else {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _log_json() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json())
    for name in ("fdbd.serve", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
