"""Connections whose clients do not read their answers, or leave while several are asked for."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

pytest.importorskip("uvicorn")

from fdbd.serve.http_protocol import BoundedServer, server
from fdbd.serve.process import ServingProcess
from fdbd.serve.settings import Settings

from .conftest import WIDTH, app_of

SMALL_BUFFER = 4096
"""Bytes that the system keeps of a connection, so that an answer soon waits for its client."""
PATIENCE = 60.0
"""Seconds until a test gives up on what should happen within a few."""


class Impatient(NamedTuple):
    running: BoundedServer
    process: ServingProcess
    send: Callable[[bytes], socket.socket]
    """Sends bytes on a new connection, which nobody reads until the test does."""


@pytest.fixture
def impatient(features) -> Iterator[Impatient]:
    """A service that gives a request one second."""
    settings = Settings(timeout=1.0, header_timeout=1.0)
    app = app_of(features, settings)
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
    address = listening.getsockname()
    running = server(app, settings)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
    thread.start()
    assert happens(lambda: running.started)
    opened: list[socket.socket] = []

    def send(content: bytes) -> socket.socket:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        client.connect(address)
        client.sendall(content)
        opened.append(client)
        return client

    yield Impatient(running, app.process, send)
    for client in opened:
        client.close()
    running.should_exit = True
    thread.join()


def happens(condition: Callable[[], bool]) -> bool:
    """Whether something becomes true while there is patience."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def read_to_the_end(client: socket.socket) -> bytes:
    """What has arrived, until the connection is closed or broken."""
    client.settimeout(PATIENCE)
    received = []
    try:
        while chunk := client.recv(65536):
            received.append(chunk)
    except ConnectionError:
        pass
    return b"".join(received)


@pytest.mark.slow
def test_a_large_answer_that_nobody_reads_keeps_its_memory_until_it_is_given_up(impatient) -> None:
    budget = impatient.process.budget
    row = {"name": "features", "datatype": "FP32", "shape": [1, WIDTH], "data": [0.0] * WIDTH}
    # The answer repeats the id.
    body = json.dumps({"id": "x" * 1_000_000, "inputs": [row]}).encode()
    head = (
        "POST /v2/models/guard/infer HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    client = impatient.send(head.encode() + body)
    assert happens(lambda: budget.most_used > 0 and budget.used == 0)

    # The memory was given back, so the connection is closed and the rest of the answer is lost.
    assert len(read_to_the_end(client)) < 1_000_000


@pytest.mark.parametrize("ahead", [4, 30])
def test_who_sends_requests_ahead_and_leaves_is_no_error_of_the_service(
    impatient, caplog, ahead: int
) -> None:
    begun = threading.Event()
    gate = threading.Event()
    [guard] = impatient.process.guards.loaded()
    decide = guard.batcher._decide

    def decide_later(rows: object) -> object:
        begun.set()
        gate.wait(PATIENCE)
        return decide(rows)

    guard.batcher._decide = decide_later
    body = json.dumps({"features": [[0.0] * WIDTH]}).encode()
    head = (
        "POST /decide HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    client = impatient.send((head.encode() + body) * ahead)
    assert begun.wait(PATIENCE)
    client.close()
    assert happens(lambda: not impatient.running.server_state.connections)
    gate.set()
    # The request under way learns of it, so it ends before its time and without an error.
    assert happens(lambda: not impatient.process.under_way)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    assert not impatient.process.under_way


@pytest.mark.slow
def test_a_connection_that_is_to_close_does_not_wait_for_its_client_for_ever(impatient) -> None:
    running = impatient.running
    client = impatient.send(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
    assert happens(lambda: bool(running.server_state.connections))

    assert happens(lambda: not running.server_state.connections)

    page = read_to_the_end(client)
    assert page.startswith(b"HTTP/1.1 200")
    assert not page.rstrip().endswith(b"</html>")
