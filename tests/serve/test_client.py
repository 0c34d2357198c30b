"""The client on real services: decisions, refusals, and repetitions that respect Retry-After."""

from __future__ import annotations

import email.utils
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import fdbd
from fdbd.serve.settings import Settings

TOKEN = "a-token-of-enough-letters"
ROWS = [[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [9.0, -9.0, 9.0, -9.0, 9.0, -9.0]]


@pytest.fixture(scope="module")
def url(features, serving) -> str:
    return serving(features, Settings(token=TOKEN))


def test_decisions_are_the_guards(url, features) -> None:
    import numpy as np

    with fdbd.Client(url, TOKEN) as client:
        found = client.decide_features(ROWS, explain=True)
        assert client.decide_features(np.array(ROWS)) == [
            {key: value for key, value in each.items() if key != "boundaries"} for each in found
        ]
        assert client.is_ready()
        assert client.status()["id"] == features.id
        assert client.acknowledge("seen")["alarm"] is False
    answers = features.decide(np.array(ROWS, np.float32))
    assert [each["is_ood"] for each in found] == answers.is_ood.tolist()
    assert all(each["boundaries"] for each in found)


def test_a_refusal_is_an_error_with_the_services_reason(url) -> None:
    with pytest.raises(fdbd.ServiceError, match="asks for a bearer token") as refused:
        fdbd.Client(url).decide_features(ROWS)
    assert refused.value.status == 401
    with pytest.raises(fdbd.ServiceError, match="is not the one that this service asks for"):
        fdbd.Client(url, f"{TOKEN}x").decide_features(ROWS)
    with pytest.raises(fdbd.ServiceError, match="features have shape"):
        fdbd.Client(url, TOKEN).decide_features([[1.0]])


class Busy(BaseHTTPRequestHandler):
    """Refuses twice, for a second and until a date, and then answers."""

    times: list[float] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.times.append(time.monotonic())
        is_busy = len(self.times) < 3
        body = b'{"error": "busy"}' if is_busy else b'{"decisions": []}'
        self.send_response(503 if is_busy else 200)
        if is_busy:
            later = email.utils.formatdate(time.time() + 2, usegmt=True)
            self.send_header("retry-after", "1" if len(self.times) == 1 else later)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_a_busy_service_is_asked_again_after_the_time_that_it_names() -> None:
    Busy.times = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert fdbd.Client(address, timeout=20).decide_features(ROWS) == []
        gaps = [after - before for before, after in zip(Busy.times, Busy.times[1:])]
        assert len(gaps) == 2
        assert min(gaps) >= 1.0
        Busy.times = []
        with pytest.raises(fdbd.ServiceError, match="busy") as refused:
            fdbd.Client(address, timeout=0.5).decide_features(ROWS)
        assert refused.value.status == 503
        assert len(Busy.times) == 1, "a second try would have come too late"
        server.shutdown()


class Page(BaseHTTPRequestHandler):
    """Something else than fdbd serve."""

    def do_GET(self) -> None:
        body = b"<html></html>"
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_an_answer_of_something_else_is_one_sentence() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(fdbd.ServiceError, match="is fdbd serve at this address"):
            fdbd.Client(f"http://127.0.0.1:{server.server_port}").status()
        server.shutdown()


def test_a_service_that_does_not_answer_ends_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        with pytest.raises(fdbd.ServiceError, match="did not answer within"):
            fdbd.Client(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.5).decide(b"x")
        assert time.monotonic() - start < 2


def test_the_client_imports_no_torch() -> None:
    code = "import sys, fdbd; fdbd.Client('http://127.0.0.1:1'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one such as"):
        fdbd.Client("guard.example:8000")
