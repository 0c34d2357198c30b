"""One request: its deadline, its memory, and its body, read within both."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from fdbd.serve.deadline import Deadline
from fdbd.serve.memory import MemoryShare

KEY = "fdbd.asked"
LINGER_SECONDS = 2.0
"""How long the rest of a refused body is read, so that its client gets to read why."""
SMALL_BODY = 65_536
"""Largest size in bytes of a body that holds neither an image nor a tensor."""
_MAX_PARTS = 16
_PIECE_OF_FORM = 65_536
"""Bytes of a form that are read until the clock is looked at again."""


@dataclass(eq=False)
class Asked:
    """What the service knows of a request while it works on it."""

    id: str
    deadline: Deadline
    memory: MemoryShare
    has_whole_body: bool = False
    has_answer: bool = False
    """Whether an answer is on its way."""
    service_is_ending: bool = False
    guard: str | None = None
    """The name of the guard that it asks, once that is known."""
    log: dict[str, object] = field(default_factory=dict)
    """Further fields of its line in the log."""


def asked_of(scope: Scope) -> Asked:
    """The record that the application has made of a request."""
    found: Asked = scope[KEY]
    return found


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request. Its bytes are taken from the memory budget as they come."""
    asked = asked_of(request.scope)
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated[:20]) > limit:
        raise _too_large(limit)
    content = io.BytesIO()
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        # BytesIO allocates up to an eighth more than it holds.
        asked.memory.take(len(chunk) + len(chunk) // 8)
        content.write(chunk)
        if not message.get("more_body", False):
            asked.has_whole_body = True
            return content.getvalue()


async def read_the_rest(request: Request) -> bool:
    """Let a client finish sending what is not looked at any more, for a moment: one that has begun
    to send reads the answer only after its last byte. Returns whether it has come to an end."""
    if "expect" in request.headers:
        return False

    async def until_the_end() -> bool:
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                return False
            if not message.get("more_body", False):
                return True

    try:
        return await asyncio.wait_for(until_the_end(), LINGER_SECONDS)
    except asyncio.TimeoutError:
        return False


def checked(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function makes of a client's data; its ValueError is the answer."""
    try:
        return function(*arguments)
    except ValueError as error:
        raise HTTPException(400, str(error)) from None


def _too_large(limit: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than the limit of {limit:,} bytes")


def file_of_form(body: bytes, content_type: str, asked: Asked) -> bytes:
    """The first file of a multipart body. ValueError says what is wrong with it; TimeoutError once
    the deadline has passed: bytes that look like the end of a part are read one by one."""
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise ValueError("the multipart body cannot be read: its content type names no boundary")
    # The file is copied out of the body.
    asked.memory.take(len(body))
    form = _Form()
    parser = MultipartParser(boundary, form.callbacks())  # type: ignore[arg-type]
    try:
        for start in range(0, len(body), _PIECE_OF_FORM):
            if asked.deadline.remaining == 0:
                raise TimeoutError
            parser.write(body[start : start + _PIECE_OF_FORM])
        parser.finalize()
    except (MultipartParseError, ValueError) as error:
        raise ValueError(f"the multipart body cannot be read: {error}") from None
    if form.file is None:
        raise ValueError("the multipart body holds no file: send the image as a file field")
    if not form.is_whole:
        raise ValueError("the multipart body cannot be read: it ends within its file")
    return b"".join(form.file)


class _Form:
    """Collects the first part that has a file name."""

    def __init__(self) -> None:
        self.file: list[bytes] | None = None
        self.is_whole = False
        self._parts = 0
        self._name = b""
        self._value = b""
        self._is_file = False
        self._is_wanted = False

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._add_to_name,
            "on_header_value": self._add_to_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add,
            "on_part_end": self._end,
        }

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise ValueError(f"it has more than {_MAX_PARTS} parts")
        self._name = b""
        self._value = b""
        self._is_file = False

    def _add_to_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _add_to_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._name.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._is_file = b"filename" in options
        self._name = b""
        self._value = b""

    def _end_headers(self) -> None:
        self._is_wanted = self._is_file and self.file is None
        if self._is_wanted:
            self.file = []

    def _add(self, data: bytes, start: int, end: int) -> None:
        if self._is_wanted and self.file is not None:
            self.file.append(data[start:end])

    def _end(self) -> None:
        if self._is_wanted:
            self.is_whole = True
        self._is_wanted = False
