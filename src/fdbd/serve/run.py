"""From the command line to a running service: the socket, the processes, the log."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from fdbd.serve.answers import Backend
from fdbd.serve.app import App, Settings
from fdbd.serve.watch import FolderStore, Store, Watch

_ENVIRONMENT = "FDBD_SERVE"


@dataclass(frozen=True)
class Service:
    """Everything that a process needs to build the service; it travels to worker processes as JSON."""

    guard: str
    """A guard's file, or an ONNX file."""
    settings: Settings = field(default_factory=Settings)
    state: str | None = None
    """The folder of the monitor's state; None: none is kept."""
    workers: int = 1
    """Processes; with Ray: replicas."""
    max_workers: int | None = None
    """With Ray: replicas under load; None: always `workers`."""
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
        from fdbd.serve.onnx_backend import OnnxBackend

        return OnnxBackend(service.guard, threads=threads)
    import torch

    from fdbd.decision.guard_file import open_guard
    from fdbd.serve.torch_backend import TorchBackend

    if threads is not None:
        torch.set_num_threads(threads)
    model, checkpoint = service.model, service.checkpoint
    opened = open_guard(service.guard, model=model, checkpoint=checkpoint, device=service.device, trust=service.trust)
    return TorchBackend(opened)


def application(
    service: Service, backend: Backend | None = None, store: Store | None = None, processes: int | None = None
) -> Any:
    """The ASGI application of one process, which meets the others in `store`; None: in the folder of the service."""
    backend = backend or backend_of(service)
    if store is None and service.state is not None:
        store = FolderStore(Path(service.state))
    watch = Watch(
        backend,
        store,
        processes=processes or service.workers,
        delta=service.delta,
        window=service.window,
        webhook=service.webhook,
    )
    return App(backend, service.settings, watch)


def application_from_environment() -> Any:
    """What each of several worker processes builds."""
    fields = json.loads(os.environ[_ENVIRONMENT])
    _log_json()
    return application(Service(**{**fields, "settings": Settings(**fields["settings"])}))


def run(service: Service, host: str, port: int) -> None:
    """Answer until the process is told to end.

    SIGTERM and Ctrl-C finish what was taken and refuse the rest.
    """
    if os.name == "nt" and service.workers > 1:
        raise ValueError("on Windows processes cannot share a socket: use --workers 1, or several services and a proxy")
    listening = listen(host, port)
    # An error ends here, before anything answers. The guard is loaded by a thread that ends: OpenMP's threads of this
    # one would stay and slow down those of the thread that decides.
    with ThreadPoolExecutor(1) as loading:
        backend = loading.submit(backend_of, service).result()
    announce(service, backend, host, listening.getsockname()[1])
    _log_json()
    common: dict[str, Any] = dict.fromkeys(("access_log", "server_header", "proxy_headers"), False)
    common |= {"log_config": None, "ws": "none", "lifespan": "on"}
    common["timeout_graceful_shutdown"] = max(1, round(service.settings.timeout))
    if service.workers == 1:
        app = application(service, backend)
        _Server(uvicorn.Config(app, **common)).run(sockets=[listening])
        return
    os.environ[_ENVIRONMENT] = json.dumps(asdict(service))
    factory = "fdbd.serve.run:application_from_environment"
    uvicorn.run(factory, factory=True, workers=service.workers, fd=listening.fileno(), **common)


class _Server(uvicorn.Server):
    """Says that it is not ready any more as soon as it is told to end."""

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.config.app.is_ready = False  # type: ignore[union-attr]
        super().handle_exit(sig, frame)


def announce(service: Service, backend: Backend, host: str, port: int, how: str = "") -> None:
    """Say what is served, and where."""
    address = f"http://{host if ':' not in host else f'[{host}]'}:{port}"
    print(f"{Path(service.guard).name}: {backend.name}. {backend.promise}", file=sys.stderr)
    print(f"serving on {address}{how} (page /, interface /docs, metrics /metrics); Ctrl-C ends it", file=sys.stderr)
    sys.stderr.flush()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; ValueError where that address is not to be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it. Event loops set it only on sockets that they made: without it, each answer's second
    # segment waits for the client's delayed acknowledgement, 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listening.bind((host, port))
        listening.listen(2048)  # whoever reads the address may connect, and waits until the guard answers
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot listen on {host}:{port} ({reason}); choose another --port or --host") from None
    listening.set_inheritable(True)
    return listening


class _Json(logging.Formatter):
    """One JSON object per line; a message that is a dictionary becomes its fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
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
