"""The service as an ASGI application: `App(guards, settings)` answers over HTTP, in one process.

Here is what every request goes through: its deadline and its memory (`fdbd.serve.asked`), who may
ask (`fdbd.serve.access`), and the answer, count and line of log that each one ends with. The routes
are in `decision_routes`, `guard_routes` and `service_routes`; Starlette's router finds them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Router
from starlette.types import Message, Receive, Scope, Send

from fdbd.serve.access import OPEN_PATHS, check_access
from fdbd.serve.asked import KEY, Asked, read_the_rest
from fdbd.serve.batching import ModelFailure
from fdbd.serve.deadline import FIRST_BYTE, Deadline
from fdbd.serve.decision_routes import DecisionRoutes
from fdbd.serve.decisions import DecisionLog
from fdbd.serve.follow_up import FollowUp
from fdbd.serve.guard_routes import GuardRoutes
from fdbd.serve.guards import Guards
from fdbd.serve.http_protocol import OVER_LIMIT
from fdbd.serve.process import ServingProcess
from fdbd.serve.service_routes import ServiceRoutes
from fdbd.serve.settings import Settings

log = logging.getLogger("fdbd.serve")

DEFAULTS = Settings()

_LARGE_ANSWER = 65_536
"""Bytes of an answer from which on the server waits until its client has read it before it takes
more. A smaller answer it takes at once."""
_OWN_PORT = "fdbd.own_port"
"""Key of an ASGI scope: the request came by the port for metrics."""


class App:
    """The guards, their batches and their watches behind fixed paths.

    Args:
        guards: what decides.
        decisions: where each decision is recorded; None: nowhere.
        thumbnails: whether a record of a rejected image holds a small copy of it.
    """

    def __init__(
        self,
        guards: Guards,
        settings: Settings = DEFAULTS,
        *,
        decisions: DecisionLog | None = None,
        thumbnails: bool = False,
    ) -> None:
        self.settings = settings
        self.guards = guards
        keeps_small = settings.samples > 0 or thumbnails
        self.process = ServingProcess(guards, settings, keeps_small=keeps_small)
        if decisions is not None:
            self.process.at_end.append(decisions.stop)
        follow_up = FollowUp(self.process, decisions, thumbnails)
        routes = [
            *DecisionRoutes(self.process, follow_up).routes(),
            *GuardRoutes(self.process).routes(),
            *ServiceRoutes(self.process).routes(),
        ]
        self._router = Router(routes, redirect_slashes=False, default=_nothing_here)

    async def metrics_only(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application of a second port, which answers metrics and health without a token."""
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path != "/metrics" and not path.startswith("/v2/health/"):
            scope = {**scope, "path": "/not-here"}
        await self._answer({**scope, _OWN_PORT: True}, receive, send)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            await self._answer(scope, receive, send)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if "state" in scope:
            scope["state"]["settings"] = self.settings
        try:
            await self.process.begin()
        except (ValueError, OSError) as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.process.end()
        await send({"type": "lifespan.shutdown.complete"})

    # ── one request

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An answer or a refusal, a count and, for decisions and refusals, a line of log."""
        started = scope.get(FIRST_BYTE) or time.monotonic()
        asked = Asked(
            id=_identity(scope),
            deadline=Deadline(started + self.settings.timeout),
            memory=self.process.budget.share(),
        )
        scope[KEY] = asked
        scope["app"] = self
        # The client has left, unless an answer begins.
        status = 499

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                asked.deadline.disarm()
                asked.has_answer = True
                status = message["status"]
                message["headers"].append((b"x-request-id", asked.id.encode()))
                if not asked.has_whole_body and scope["method"] not in ("GET", "HEAD"):
                    message["headers"].append((b"connection", b"close"))
            for part in _in_parts(message):
                await send(part)

        self.process.under_way.add(asked)
        try:
            with asked.deadline:
                refusal = await self._route(scope, receive, send_with_id, asked)
            if refusal is not None:
                await refusal(scope, receive, send_with_id)
        finally:
            self.process.under_way.discard(asked)
            asked.memory.let_go()
            self._note(scope, asked, status, time.monotonic() - started)

    async def _route(
        self, scope: Scope, receive: Receive, send: Send, asked: Asked
    ) -> Response | None:
        """Have the request answered; returns the refusal if it is refused."""
        request = Request(scope, receive)
        try:
            self._check(request)
            await self._router(scope, receive, send)
            return None
        except HTTPException as error:
            await self._take_the_rest(request, asked)
            return JSONResponse({"error": error.detail}, error.status_code, error.headers)
        except ClientDisconnect:
            return _refusal(499, "the client left before its request was whole")
        except ModelFailure:
            return _refusal(500, "the model failed; the service's log says why")
        except TimeoutError:
            # A thread began with the request too late.
            return self._too_late(asked)
        except asyncio.CancelledError:
            if not asked.deadline.has_passed:
                raise
            asked.deadline.acknowledge()
            return None if asked.has_answer else self._too_late(asked)
        except Exception as error:
            log.error("a request failed: %r", error, exc_info=error)
            return _refusal(500, "the service could not answer; its log says why")

    async def _take_the_rest(self, request: Request, asked: Asked) -> None:
        """Read the rest of a body that is refused, until the deadline: many clients read no answer
        before they have sent everything."""
        if asked.has_whole_body or request.method in ("GET", "HEAD"):
            return
        try:
            asked.has_whole_body = await read_the_rest(request)
        except asyncio.CancelledError:
            if not asked.deadline.has_passed:
                raise
            asked.deadline.acknowledge()

    def _check(self, request: Request) -> None:
        path = request.scope["path"]
        if not path.startswith("/v2/health/") and not request.scope.get(_OWN_PORT):
            check_access(request, self.settings)
        is_probe = path in OPEN_PATHS or path in ("/metrics", "/status")
        if request.scope.get(OVER_LIMIT) and not is_probe:
            reason = "all connections are in use; come again later"
            raise HTTPException(503, reason, {"retry-after": "1", "connection": "close"})
        if self.process.is_ending and request.method == "POST":
            raise HTTPException(503, "the service is shutting down", {"retry-after": "5"})

    def _too_late(self, asked: Asked) -> Response:
        if asked.service_is_ending:
            reason = "the service is shutting down"
            return _refusal(503, reason, {"retry-after": "5", "connection": "close"})
        seconds = f"{self.settings.timeout:g}"
        if not asked.has_whole_body:
            reason = f"the request was not complete within {seconds} s"
            return _refusal(408, reason, {"connection": "close"})
        return _refusal(504, f"no answer within {seconds} s", {"retry-after": "5"})

    def _note(self, scope: Scope, asked: Asked, status: int, seconds: float) -> None:
        path = self._known_path(scope)
        name = asked.guard or self.guards.default
        # A guard that is not loaded has nothing to count with.
        with contextlib.suppress(HTTPException):
            watch = self.guards.get(name).watch
            if watch is not None:
                watch.count_request(path, status, seconds)
        if scope["method"] == "POST" or status >= 400:
            line = {"request": asked.id, "path": path, "status": status}
            log.info({**line, "seconds": round(seconds, 6), **asked.log})

    def _known_path(self, scope: Scope) -> str:
        """The path as the metrics count it: "other" for paths that clients invent, of which there
        is no end."""
        path: str = scope["path"]
        if scope.get("endpoint") is None:
            return "other"
        model = scope.get("path_params", {}).get("model")
        if model is not None and model not in self.guards.names:
            return "other"
        return re.sub("/versions/[^/]*", "", path)


def _in_parts(message: Message) -> list[Message]:
    """The end of a large answer as two messages, of which the second is empty.

    The server takes a message at once, but the next one only when the client has read nearly all of
    the one before. So the request keeps its memory for as long as the server holds its answer, and
    the server sees that the answer is not complete.
    """
    is_end = message["type"] == "http.response.body" and not message.get("more_body", False)
    if not is_end or len(message.get("body", b"")) < _LARGE_ANSWER:
        return [message]
    return [{**message, "more_body": True}, {"type": "http.response.body", "body": b""}]


def _identity(scope: Scope) -> str:
    """The id that the client gave its request if it is a short plain text, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text: str = value.decode("latin-1")
            if re.fullmatch("[!-~]{1,64}", text):
                return text
    return uuid.uuid4().hex


async def _nothing_here(scope: Scope, receive: Receive, send: Send) -> None:
    if scope.get(_OWN_PORT):
        raise HTTPException(404, "this port answers /metrics and /v2/health/… alone")
    path = scope["path"]
    raise HTTPException(404, f"there is nothing at {path[:80]!r}; /docs lists what there is")


def _refusal(status: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": reason}, status, headers)
