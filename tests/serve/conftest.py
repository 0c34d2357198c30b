"""Guards behind the service: one for features, one for images, small and real."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from starlette.testclient import TestClient
from torch import nn

import fdbd
from fdbd.core.preprocessing import Preprocess
from fdbd.decision.guard_file import OpenedGuard
from fdbd.serve.app import App
from fdbd.serve.backend import Backend
from fdbd.serve.guards import Guards, ServedGuard
from fdbd.serve.http_protocol import BoundedServer, server
from fdbd.serve.settings import Settings
from fdbd.serve.torch_backend import TorchBackend
from fdbd.serve.watch import Watch

# A script for another environment.
collect_ignore = ["ask_with_clients.py"]

SIDE, CLASSES, WIDTH = 8, 4, 6
NAMES = ("ant", "bee", "cat", "dog")


DEFAULTS = Settings()


def app_of(backend: Backend, settings: Settings = DEFAULTS, **options: object) -> App:
    """The application around one guard that is called "guard"."""
    load = lambda: ServedGuard("guard", backend, settings, Watch(backend))  # noqa: E731
    return App(Guards({"guard": load}), settings, **options)


def client_of(app: App) -> TestClient:
    """A client that asks an application under an address that it answers to."""
    return TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)


@pytest.fixture(scope="session")
def feature_guard() -> fdbd.Guard:
    generator = torch.Generator().manual_seed(0)
    head = fdbd.Head(torch.randn(CLASSES, WIDTH, generator=generator), torch.zeros(CLASSES))
    guard = fdbd.Guard(head, "fdbd").fit([fdbd.Batch(torch.randn(200, WIDTH, generator=generator))])
    return guard.calibrate([fdbd.Batch(torch.randn(200, WIDTH, generator=generator))], alpha=0.1)


@pytest.fixture(scope="session")
def image_guard() -> fdbd.Guard:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, WIDTH, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(WIDTH, CLASSES),
    )
    guard = fdbd.Guard(model.eval(), "fdbd").fit([torch.rand(100, 3, SIDE, SIDE)])
    return guard.calibrate([torch.rand(100, 3, SIDE, SIDE)], tpr=0.9)


@pytest.fixture(scope="session")
def features(feature_guard) -> TorchBackend:
    return TorchBackend(OpenedGuard(feature_guard, None, NAMES))


@pytest.fixture(scope="session")
def images(image_guard) -> TorchBackend:
    return TorchBackend(OpenedGuard(image_guard, Preprocess(SIDE), NAMES))


@pytest.fixture(scope="session")
def serving() -> Iterator[Callable[[Backend], str]]:
    """Starts services on loopback, in threads; the address of each."""
    running: list[tuple[BoundedServer, threading.Thread]] = []

    def start(backend: Backend, settings: Settings = DEFAULTS) -> str:
        listening = socket.create_server(("127.0.0.1", 0))
        running_server = server(app_of(backend, settings), settings)
        thread = threading.Thread(target=running_server.run, kwargs={"sockets": [listening]})
        thread.start()
        running.append((running_server, thread))
        while not running_server.started:
            time.sleep(0.05)
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield start
    for running_server, thread in running:
        running_server.should_exit = True
        thread.join()
