"""Connections whose clients do not read their answers, leave while several are asked for, send for
ever beside what they ask, or offer another protocol."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

pytest.importorskip("uvicorn")

from fdbd.serve.app import App
from fdbd.serve.http_protocol import PIPELINE, BoundedServer, server
from fdbd.serve.process import ServingProcess
from fdbd.serve.settings import Settings

from .conftest import WIDTH, app_of

SMALL_BUFFER = 4096
"""Bytes that the system keeps of a connection, so that an answer soon waits for its client."""
PATIENCE = 60.0
"""Seconds until a test gives up on what should happen within a few."""


class Served(NamedTuple):
    running: BoundedServer
    process: ServingProcess
    send: Callable[[bytes], socket.socket]
    """Sends bytes on a new connection, which nobody reads until the test does."""


@pytest.fixture
def impatient(features) -> Iterator[Served]:
    """A service that gives a request one second."""
    with served(app_of(features, Settings(timeout=1.0, header_timeout=1.0))) as found:
        yield found


@pytest.fixture
def patient(features) -> Iterator[Served]:
    """A service whose requests have as much time as a test."""
    with served(app_of(features, Settings(timeout=PATIENCE, header_timeout=PATIENCE))) as found:
        yield found


@contextmanager
def served(app: App) -> Iterator[Served]:
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
    address = listening.getsockname()
    running = server(app, app.settings)
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

    yield Served(running, app.process, send)
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


def head(*headers: str) -> bytes:
    """Of a request for a decision."""
    lines = [
        "POST /decide HTTP/1.1",
        "host: 127.0.0.1",
        "content-type: application/json",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def decision(*headers: str) -> bytes:
    """A request for a decision, whole."""
    body = json.dumps({"features": [[0.0] * WIDTH]}).encode()
    return head(f"content-length: {len(body)}", *headers) + body


def test_who_sends_requests_ahead_and_leaves_is_no_error_of_the_service(impatient, caplog) -> None:
    begun = threading.Event()
    gate = threading.Event()
    [guard] = impatient.process.guards.loaded()
    decide = guard.batcher._decide

    def decide_later(rows: object) -> object:
        begun.set()
        gate.wait(PATIENCE)
        return decide(rows)

    guard.batcher._decide = decide_later
    client = impatient.send(decision() * 4)
    assert begun.wait(PATIENCE)
    client.close()
    assert happens(lambda: not impatient.running.server_state.connections)
    gate.set()
    # The request under way learns of it, so it ends before its time and without an error.
    assert happens(lambda: not impatient.process.under_way)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    assert not impatient.process.under_way


def test_who_sends_too_many_requests_ahead_loses_the_connection_and_nothing_goes_on(
    patient, caplog
) -> None:
    client = patient.send(decision() * (PIPELINE + 22))

    assert read_to_the_end(client).count(b"HTTP/1.1 200") <= PIPELINE + 1
    assert happens(lambda: not patient.running.server_state.connections)
    assert happens(lambda: not patient.process.under_way)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("endless", [b"0\r\nname:", b"0\r\n", b"", b"1;"])
def test_a_body_in_chunks_has_no_endless_trailer_and_no_endless_lengths(
    patient, endless: bytes
) -> None:
    client = patient.send(head("transfer-encoding: chunked") + b"1\r\n[\r\n")
    assert happens(lambda: bool(patient.process.under_way))

    client.sendall(endless + b"0" * (Settings().max_header + 1 - len(endless)))

    assert read_to_the_end(client).startswith(b"HTTP/1.1 431")
    assert happens(lambda: not patient.process.under_way)


@pytest.mark.parametrize(("size", "status"), [(1, 400), (32, 400), (128, 200)])
def test_a_long_body_comes_in_chunks_of_some_size(patient, size: int, status: int) -> None:
    body = json.dumps({"features": [[0.0] * WIDTH]}).encode().ljust(size * 25_000)
    client = patient.send(head("transfer-encoding: chunked"))
    assert happens(lambda: bool(patient.process.under_way))

    chunks = []
    for start in range(0, len(body), size):
        part = body[start : start + size]
        chunks.append(b"%x\r\n%s\r\n" % (len(part), part))
    with contextlib.suppress(ConnectionError):
        client.sendall(b"".join(chunks) + b"0\r\n\r\n")

    assert client.recv(4096).startswith(b"HTTP/1.1 %d" % status)


def test_a_short_body_comes_in_chunks_of_any_size(patient) -> None:
    body = json.dumps({"features": [[0.0] * WIDTH]}).encode().ljust(4000)

    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    client = patient.send(head("transfer-encoding: chunked") + chunks + b"0\r\n\r\n")

    assert client.recv(4096).startswith(b"HTTP/1.1 200")


def test_tiny_chunks_behind_the_headers_are_refused_as_well(patient) -> None:
    chunks = b"1\r\n \r\n" * 10_000
    client = patient.send(head("transfer-encoding: chunked") + chunks + b"0\r\n\r\n")

    assert client.recv(4096).startswith(b"HTTP/1.1 400")
    assert happens(lambda: not patient.process.under_way)


def test_what_is_no_http_is_refused_in_json(patient) -> None:
    client = patient.send(b"GET / HTTP/1.1\r\nno header\r\n\r\n")

    answer_head, _, body = read_to_the_end(client).partition(b"\r\n\r\n")
    assert answer_head.startswith(b"HTTP/1.1 400")
    assert "not HTTP/1.1" in json.loads(body)["error"]


@pytest.mark.parametrize(
    "behind",
    [
        b"\0 / HTTP/1.1\r\n\r\n",
        # The first is found after the headers, the second after the body has begun.
        head("transfer-encoding: gzip"),
        head("transfer-encoding: chunked") + b"no length\r\n",
    ],
)
def test_what_is_no_http_behind_a_request_is_not_taken_for_its_answer(
    patient, behind: bytes
) -> None:
    client = patient.send(decision() + behind)

    assert not read_to_the_end(client).startswith(b"HTTP/1.1 400")


@pytest.mark.slow
def test_a_body_that_nobody_waited_for_gets_no_second_answer(impatient) -> None:
    client = impatient.send(
        b"GET /v2/health/live HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000\r\n\r\n"
    )

    answers = read_to_the_end(client)

    assert answers.count(b"HTTP/1.1") == 1
    assert answers.startswith(b"HTTP/1.1 200")


def test_fields_of_a_trailer_are_no_headers(patient) -> None:
    body = json.dumps({"features": [[0.0] * WIDTH]}).encode()
    client = patient.send(head("transfer-encoding: chunked"))
    assert happens(lambda: bool(patient.process.under_way))
    [connection] = patient.running.server_state.connections

    trailer = b"name: value\r\n" * 500
    client.sendall(b"%x\r\n%s\r\n0\r\n%s\r\n" % (len(body), body, trailer))

    assert b"HTTP/1.1 200" in client.recv(4096)
    assert len(connection.headers) == 3


@pytest.mark.parametrize("pause", [False, True])
def test_the_offer_of_another_protocol_is_not_taken_and_the_request_is_answered(
    patient, pause: bool
) -> None:
    """Java's client offers HTTP/2 with its first request."""
    offer = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAEAAEAA")
    request = decision(*offer)
    if pause:
        client = patient.send(request[:-5])
        assert happens(lambda: bool(patient.process.under_way))
        client.sendall(request[-5:])
    else:
        client = patient.send(request)
    client.sendall(decision("connection: close"))

    answers = read_to_the_end(client)
    assert answers.count(b"HTTP/1.1 200") == 2
    assert answers.count(b'"decisions"') == 2


def test_nothing_is_connected_through_the_service(patient) -> None:
    client = patient.send(b"CONNECT example.org:443 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")

    assert read_to_the_end(client).startswith(b"HTTP/1.1 405")


@pytest.mark.slow
def test_a_connection_that_is_to_close_does_not_wait_for_its_client_for_ever(impatient) -> None:
    running = impatient.running
    client = impatient.send(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
    assert happens(lambda: bool(running.server_state.connections))

    assert happens(lambda: not running.server_state.connections)

    page = read_to_the_end(client)
    assert page.startswith(b"HTTP/1.1 200")
    assert not page.rstrip().endswith(b"</html>")
