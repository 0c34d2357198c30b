"""The HTTP server: uvicorn, with bounds on headers, connections and time that it lacks.

Why not Granian, which has a limit and a timeout for headers and replaces its processes: tried with
this application (2.8.7), it needed the same processor time per request, but
- at its bound of connections it stops accepting, so that with 64 unfinished bodies a health probe
  waited for more than 5 s, as long as the bodies did;
- it does not tell the application when a request's first byte came, from which the deadline counts;
- after its only process was killed nobody listened for 6 s, and a client was refused 57 times.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from fdbd.serve.deadline import FIRST_BYTE
from fdbd.serve.log_lines import flush_log
from fdbd.serve.settings import Settings

if TYPE_CHECKING:
    from fdbd.serve.app import App

OVER_LIMIT = "fdbd.over_limit"
"""Key of an ASGI scope: the connection is beyond the limit, so only probes are answered on it."""
RESERVE = 32
"""Connections beyond the limit, for health and metrics while all others wait for answers."""
PIPELINE = 8
"""Requests that a client may send ahead on one connection."""
SMALL_CHUNKS = 4096
"""Chunks of a body that may be of any size."""
LEAST_CHUNK = 96
"""Bytes that each further chunk of a body must have on average. A chunk costs the event loop as
much time as a few hundred bytes, and all clients share the event loop."""
_SWEEP_SECONDS = 0.25
_GRACE_SECONDS = 3.0
"""How long after its deadline a connection may still be sending its answer."""


class _Parser(httptools.HttpRequestParser):
    """Parses the requests of one connection.

    The parser that it extends leaves out the body of a request that also offers another protocol,
    as Java's client offers HTTP/2 with its first request: such a request is parsed once more
    without the offer.
    """

    def __init__(self, protocol: BoundedProtocol) -> None:
        super().__init__(protocol)
        self._protocol = protocol
        # As the server does with its own parser, so that a client which sends more behind a request
        # with `connection: close` is answered. httptools before 0.6.3 always allows that.
        with contextlib.suppress(AttributeError):
            self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            was_refused = self._protocol.transport.is_closing()
            if was_refused:
                return
            (place,) = offer.args
            head = self._protocol.head_without_offer()
            self._protocol.parser = _Parser(self._protocol)
            self._protocol.parser.feed_data(head + data[place:])


class BoundedProtocol(HttpToolsProtocol):
    """One connection: its headers are limited in size, number and time, and it cannot stay half
    sent or half read."""

    settings: Settings

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.settings = self.app_state["settings"]
        self.parser = _Parser(self)
        self._is_over_limit = False
        self._opened = time.monotonic()
        # When the first byte of the request that is being received came; None between requests.
        self._first_byte: float | None = None
        # The same of the request that is being answered.
        self._asked_at = self._opened
        # When the sweep first saw that the connection is being closed.
        self._closing_since: float | None = None
        self._header_bytes = 0
        self._is_in_header = False
        self._began_in_this_chunk = False
        # Whether the application has begun with the request that is being received.
        self._is_begun = False
        # The body of the request that is being received, as far as it came: its bytes, those
        # between them (lengths of chunks, the trailer after the last), the number of its pieces,
        # and those pieces that were received just now. A chunk is one piece, or several.
        self._body_bytes = 0
        self._bytes_beside_body = 0
        self._piece_count = 0
        self._pieces: list[bytes] = []
        # Requests that are answered or wait for their turn; the server knows the latest alone.
        self._unanswered: list[RequestResponseCycle] = []

    # ── the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        limit = self.settings.connections
        others = len(self.connections)
        if others >= limit:
            self._make_room()
            # A connection that was closed just now is still in the set.
            others = sum(not each.transport.is_closing() for each in self.connections)
        if others >= limit + RESERVE:
            transport.abort()
            return
        self._is_over_limit = others >= limit
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._give_up_requests()
        # One that was aborted at once has no transport.
        if self.transport is not None:
            super().connection_lost(exc)

    def _abort(self) -> None:
        """Break the connection at once."""
        self._give_up_requests()
        self.transport.abort()

    def _give_up_requests(self) -> None:
        """Tell all requests of the connection that there is nobody to answer."""
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._unanswered.clear()

    @property
    def is_receiving(self) -> bool:
        """Whether the client has to send before the service can do anything."""
        if self.cycle is None or self.cycle.response_complete:
            return True
        return self.cycle.more_body

    def _make_room(self) -> None:
        """Close the connection whose client has kept the service waiting for longest."""
        waiting = []
        for each in self.connections:
            if each.is_receiving and not each.transport.is_closing():  # type: ignore[union-attr]
                waiting.append(each)
        if waiting:
            oldest = min(waiting, key=lambda each: each.waits_since)  # type: ignore[union-attr]
            oldest.refuse(503, "all connections are in use; come again later")  # type: ignore[union-attr]

    @property
    def waits_since(self) -> float:
        """Since when the client has had the turn."""
        return self._opened if self._first_byte is None else self._first_byte

    def sweep(self, now: float) -> None:
        """Close the connection if its time is over. Called several times per second."""
        # The application answers in time; what takes longer is a client that does not read.
        is_overdue = now - self._asked_at > self.settings.timeout + _GRACE_SECONDS
        if self.transport.is_closing():
            # It closes once all is sent, which for such a client would be never.
            self._closing_since = self._closing_since or now
            if is_overdue and now - self._closing_since > _GRACE_SECONDS:
                self._abort()
            return
        is_being_answered = self.cycle is not None and not self.cycle.response_complete
        if is_being_answered:
            if is_overdue:
                self._abort()
            return
        is_between_requests = self._first_byte is None
        if is_between_requests:
            # After a first request, uvicorn's own timer closes a connection that is kept for more.
            has_asked_nothing = self.cycle is None
            if has_asked_nothing and now - self._opened > self.settings.header_timeout:
                self.transport.close()
            return
        if now - self.waits_since > self.settings.header_timeout:
            seconds = f"{self.settings.header_timeout:g}"
            self.refuse(408, f"the headers were not complete within {seconds} s")

    # ── the request

    def data_received(self, data: bytes) -> None:
        if self._first_byte is None:
            self._first_byte = time.monotonic()
        self._began_in_this_chunk = False
        body_bytes = self._body_bytes
        is_first_request = self.cycle is None
        super().data_received(data)
        self._hand_over_pieces()
        if self.transport.is_closing():
            return
        if not self._is_in_header:
            if not self._began_in_this_chunk:
                self._limit_bytes_beside_body(len(data) - (self._body_bytes - body_bytes))
            return
        if self._began_in_this_chunk and not is_first_request:
            # The chunk may hold the rest of the request before: count from the next one on.
            return
        # A line of the header that goes on for ever never reaches `on_header`.
        self._header_bytes += len(data)
        if self._header_bytes > self.settings.max_header:
            self._refuse_header()

    def _limit_bytes_beside_body(self, size: int) -> None:
        """Refuse what goes on for ever beside headers and body: the trailer, extensions of chunks,
        blank lines before a request."""
        is_receiving = self._first_byte is not None
        if not is_receiving:
            return
        self._bytes_beside_body += size
        allowed = self.settings.max_header + self._body_bytes // 4
        if self._bytes_beside_body > allowed:
            limit = f"{self.settings.max_header:,} bytes"
            self.refuse(
                431,
                f"the request has more than {limit} and a quarter of its body beside its headers "
                "and its body",
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        # What comes after the last chunk of a body is a trailer, which nobody asks for.
        if self._is_in_header:
            super().on_header(name, value)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self._body_bytes = 0
        self._bytes_beside_body = 0
        self._piece_count = 0
        self._is_in_header = True
        self._is_begun = False
        self._began_in_this_chunk = True
        if self._first_byte is None:
            self._first_byte = time.monotonic()

    def head_without_offer(self) -> bytes:
        """The line and headers of the latest request, without the offer of another protocol."""
        method = self.parser.get_method()
        version = b"HTTP/" + self.parser.get_http_version().encode()
        lines = [b" ".join([method, self.url, version])]
        for name, value in self.headers:
            if name not in (b"connection", b"upgrade", b"http2-settings"):
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_headers_complete(self) -> None:
        self._is_in_header = False
        if self.transport.is_closing():
            return
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.settings.max_header or len(self.headers) > self.settings.max_headers:
            self._refuse_header()
            return
        if self.parser.get_method() == b"CONNECT":
            self.refuse(405, "this is not a proxy: there is nothing to connect to")
            return
        if self.parser.should_upgrade():
            # It is parsed once more, without the offer.
            return
        if len(self.pipeline) >= PIPELINE:
            self.refuse(400, f"at most {PIPELINE} requests may be sent ahead")
            return
        self._asked_at = self._first_byte or time.monotonic()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[FIRST_BYTE] = self._asked_at
        scope[OVER_LIMIT] = self._is_over_limit
        super().on_headers_complete()
        self._is_begun = True
        self._unanswered = [each for each in self._unanswered if not each.response_complete]
        self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        # Called for each chunk, of which there may be thousands in what was received at once.
        self._pieces.append(body)

    def _hand_over_pieces(self) -> None:
        """Add what was received to the body at once: bytes that grow chunk by chunk are copied for
        each. A body in many tiny chunks is refused."""
        if not self._pieces:
            return
        body = b"".join(self._pieces)
        self._body_bytes += len(body)
        self._piece_count += len(self._pieces)
        self._pieces.clear()
        if self._piece_count > SMALL_CHUNKS + self._body_bytes // LEAST_CHUNK:
            self.refuse(
                400,
                f"the body has more than {SMALL_CHUNKS:,} chunks of less than {LEAST_CHUNK} bytes: "
                "send larger chunks",
            )
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._hand_over_pieces()
        if self.parser.should_upgrade():
            return
        if not self.transport.is_closing():
            super().on_message_complete()
        self._first_byte = None
        self._is_begun = False

    def send_400_response(self, msg: str) -> None:
        """Called by the server for what its parser does not understand."""
        self.refuse(400, f"{msg.rstrip('.')}: it is not HTTP/1.1 as this service reads it")

    def _refuse_header(self) -> None:
        limit = f"{self.settings.max_header:,} bytes in {self.settings.max_headers} headers"
        self.refuse(431, f"the headers are larger than the limit of {limit}")

    def refuse(self, status: int, reason: str) -> None:
        """Answer without the application, if no answer has begun, and close."""
        if self.transport.is_closing():
            return
        # The request that is being received, if the application has begun with it.
        current = self.cycle if self._is_begun else None
        if current is not None and current.response_complete:
            # A client may go on to send a body that nobody has waited for.
            self.transport.close()
            return
        has_begun = current is not None and current.response_started
        earlier = [each for each in self._unanswered if each is not current]
        has_earlier = not all(each.response_complete for each in earlier)
        has_unread = self.transport.get_write_buffer_size() > 0
        if has_unread or has_begun or has_earlier:
            # An answer here would not be read, or would be taken for that of another request.
            self._abort()
            return
        if self._first_byte is not None:
            self.transport.write(refusal(status, reason))
        self.transport.close()


def refusal(status: int, reason: str) -> bytes:
    """A whole HTTP answer whose body is `{"error": reason}`, after which the connection closes."""
    content = json.dumps({"error": reason}).encode()
    lines = [
        f"HTTP/1.1 {status} Refused",
        "content-type: application/json",
        f"content-length: {len(content)}",
        "connection: close",
    ]
    if status == 503:
        lines.append("retry-after: 1")
    head = "\r\n".join(lines).encode()
    return head + b"\r\n\r\n" + content


class BoundedServer(Server):
    """A server that sweeps its connections, has a second port for metrics, and tells its
    application at once when it is to end."""

    def __init__(
        self,
        config: Config,
        application: App,
        metrics: socket.socket | None,
        is_up: Callable[[], object],
        is_told_to_end: Callable[[], object],
    ) -> None:
        super().__init__(config)
        self._application = application
        self._metrics = metrics
        self._metrics_state = ServerState()
        self._is_up = is_up
        self._is_told_to_end = is_told_to_end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # Before the lifespan protocol, which would hide the error that a guard is refused with.
        await self._application.process.begin()
        await super().startup(sockets)
        if self._metrics is not None:
            await self._listen_for_metrics(self._metrics)
        self._is_up()

    async def _listen_for_metrics(self, listening: socket.socket) -> None:
        config = _config(self._application.metrics_only, self._application.settings)
        config.load()

        def connect() -> BoundedProtocol:
            return BoundedProtocol(config, self._metrics_state, self.lifespan.state)

        loop = asyncio.get_running_loop()
        self.servers.append(await loop.create_server(connect, sock=listening))

    async def _serve(self, sockets: list[socket.socket] | None = None) -> None:
        sweeping = asyncio.get_running_loop().create_task(self._sweep())
        try:
            await super()._serve(sockets)
        finally:
            sweeping.cancel()
            # uvicorn ends the process by the signal that told it to end: nothing comes after this.
            flush_log()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            now = time.monotonic()
            for state in (self.server_state, self._metrics_state):
                for connection in list(state.connections):
                    connection.sweep(now)  # type: ignore[union-attr]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for connection in list(self._metrics_state.connections):
            connection.shutdown()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._application.process.begin_to_end()
        self._is_told_to_end()
        super().handle_exit(sig, frame)


def server(
    application: App,
    settings: Settings,
    *,
    metrics: socket.socket | None = None,
    is_up: Callable[[], object] = lambda: None,
    is_told_to_end: Callable[[], object] = lambda: None,
) -> BoundedServer:
    """A server for the service.

    Args:
        metrics: a socket on which only metrics and health are answered, without a token.
        is_up: called once clients are answered.
        is_told_to_end: called when a signal says so.
    """
    return BoundedServer(
        _config(application, settings), application, metrics, is_up, is_told_to_end
    )


def _config(application: Any, settings: Settings) -> Config:
    return Config(
        application,
        http=BoundedProtocol,
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=max(5, round(settings.header_timeout)),
        timeout_graceful_shutdown=max(1, round(settings.timeout + _GRACE_SECONDS)),
    )
