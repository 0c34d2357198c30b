"""Answers that the server gives without the application."""

from __future__ import annotations

import json
import socket
from http.client import HTTPResponse

import pytest

pytest.importorskip("uvicorn")

from fdbd.serve.http_protocol import refusal


def received(content: bytes) -> tuple[HTTPResponse, bytes]:
    """What the standard library's client makes of an answer, read until the connection closes."""
    server, client = socket.socketpair()
    with server, client:
        server.sendall(content)
        server.shutdown(socket.SHUT_WR)
        response = HTTPResponse(client)
        response.begin()
        body = response.read()
        left_over = client.recv(1)
    assert left_over == b""
    return response, body


@pytest.mark.parametrize(
    "reason",
    [
        "the headers were not complete within 5 s",
        'the name is "a", and the path is C:\\new',
        'closed", "status": "fine',
        "two lines\r\nx-injected: yes\r\n\r\n",
        "größer als die Grenze \u2028 \x00",
    ],
)
def test_any_reason_of_a_refusal_is_read_back_as_it_was_written(reason: str) -> None:
    response, body = received(refusal(408, reason))

    assert response.status == 408
    assert response.getheader("content-type") == "application/json"
    assert response.getheader("x-injected") is None
    assert json.loads(body) == {"error": reason}


def test_only_a_service_that_is_busy_asks_the_client_to_come_again() -> None:
    busy, _ = received(refusal(503, "all connections are in use"))
    too_large, _ = received(refusal(431, "the headers are too large"))

    assert busy.getheader("retry-after") == "1"
    assert too_large.getheader("retry-after") is None
    assert busy.getheader("connection") == "close"
    assert too_large.getheader("connection") == "close"
