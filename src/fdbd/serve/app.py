"""The service as an ASGI application: `create_app(backend)` answers over HTTP, in one process.

Two protocols lead to the same micro-batches: the Open Inference Protocol (`/v2/…`) and a plain `POST /decide`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fdbd.serve import inference_protocol
from fdbd.serve.answers import Answers, Backend, Reason
from fdbd.serve.batching import Batcher, DeadlinePassed, QueueFull, ShuttingDown
from fdbd.serve.openapi import document
from fdbd.serve.samples import Samples
from fdbd.serve.watch import Watch

log = logging.getLogger("fdbd.serve")

NEAREST = 5
"""Boundaries that an explanation names."""


@dataclass(frozen=True)
class Settings:
    """How the service behaves; every field is an option of `fdbd serve`."""

    name: str = "guard"
    """The model's name in the Open Inference Protocol."""
    token: str | None = None
    """Clients send it as `Authorization: Bearer TOKEN`; None: nobody is asked."""
    batch_size: int = 32
    delay: float = 0.001
    """Seconds that a batch waits for company."""
    queue: int = 1024
    """Rows that may wait."""
    timeout: float = 30.0
    """Seconds that a request may take from its arrival."""
    max_body: int = 32 * 1024 * 1024
    """Bytes of a request's body."""
    samples: int = 24
    """Rejected images that are kept as thumbnails for the page; 0: none."""


def create_app(backend: Backend, settings: Settings | None = None, watch: Watch | None = None) -> Starlette:
    """The application around a guard. `watch` counts what it says; None: one without a file."""
    settings = settings or Settings()
    service = Service(backend, settings, watch or Watch(backend))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    paths: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
        ("GET", "/", service.page),
        ("GET", "/openapi.json", service.openapi),
        ("GET", "/docs", service.docs),
        ("GET", "/status", service.status),
        ("GET", "/metrics", service.metrics),
        ("POST", "/decide", service.decide),
        ("GET", "/v2", service.server),
        ("GET", "/v2/health/live", service.live),
        ("GET", "/v2/health/ready", service.ready),
        ("GET", "/v2/models/{name}", service.model),
        ("GET", "/v2/models/{name}/ready", service.model_ready),
        ("POST", "/v2/models/{name}/infer", service.infer),
    ]
    routes = [Route(path, endpoint, methods=[method]) for method, path, endpoint in paths]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(_Gate, service=service)],
        exception_handlers={HTTPException: _refused, Exception: _failed},
    )
    app.state.service = service
    return app


class Service:
    """What the routes share: the guard, its batches and its watch."""

    def __init__(self, backend: Backend, settings: Settings, watch: Watch) -> None:
        self.backend, self.settings, self.watch = backend, settings, watch
        self.samples = Samples(settings.samples)
        self.batcher = Batcher(
            backend.decide,
            size=settings.batch_size,
            delay=settings.delay,
            capacity=max(settings.queue, settings.batch_size),
            observe=watch.count_batch,
        )
        self.is_ready = False

    async def start(self) -> None:
        self.batcher.start()
        await run_in_threadpool(self.watch.start, lambda: self.batcher.waiting)
        self.is_ready = True

    async def stop(self) -> None:
        """Answer what was taken, then save what was seen."""
        self.is_ready = False
        await self.batcher.stop()
        await run_in_threadpool(self.watch.stop)

    # ── the plain protocol ─────────────────────────────────────────────────────────────────────────────────────────

    async def decide(self, request: Request) -> Response:
        """One image, as multipart or raw bytes; or JSON `{"features": [[…], …]}`."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        explain = request.query_params.get("explain", "").lower() in ("1", "true", "yes")
        image: bytes | None = None
        if kind == "application/json":
            rows = self._features(await self._body(request))
        else:
            image = await (self._part(request) if kind == "multipart/form-data" else self._body(request))
            rows = await self._image(image)
        answers = await self._answers(request, rows)
        reasons = await self._reasons(rows) if explain else None
        if image is not None and answers.is_ood[0] and self.samples.size:
            await run_in_threadpool(self.samples.add, image, answers, self.backend.class_names)
        found = [self._decision(answers, row, None if reasons is None else reasons[row]) for row in range(len(rows))]
        return JSONResponse(found[0] if image is not None else {"decisions": found})

    def _features(self, body: bytes) -> NDArray[np.float32]:
        if self.backend.input_name != "features":
            raise HTTPException(415, "this guard takes images: send a JPEG or PNG as the body, not JSON")
        try:
            given = json.loads(body)["features"]
            with np.errstate(over="ignore"):
                rows = np.asarray(given, dtype=np.float64).astype(np.float32)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise HTTPException(400, 'the body is not {"features": [[numbers], …]} with rows of equal length') from None
        if rows.ndim == 1 and rows.shape == self.backend.row_shape:
            rows = rows[None]
        if rows.shape[1:] != self.backend.row_shape or not len(rows):
            raise HTTPException(
                400, f"features have shape {list(rows.shape)}, expected [N, {self.backend.row_shape[0]}] with N ≥ 1"
            )
        return rows

    async def _image(self, image: bytes) -> NDArray[np.float32]:
        if self.backend.input_name == "features":
            raise HTTPException(415, 'this guard takes features: send JSON such as {"features": [[0.1, …]]}')
        try:
            return (await run_in_threadpool(self.backend.prepare, image))[None]
        except ValueError as error:
            raise HTTPException(400, str(error)) from None

    async def _part(self, request: Request) -> bytes:
        """The first file of a multipart body."""
        try:
            async with request.form(max_files=1, max_fields=8, max_part_size=self.settings.max_body) as form:
                for value in form.values():
                    if not isinstance(value, str):
                        return await value.read()
        except MultiPartException as error:
            raise HTTPException(400, f"the multipart body cannot be read: {error.message}") from None
        raise HTTPException(400, "the multipart body holds no file: send the image as a file field")

    def _decision(self, answers: Answers, row: int, reason: Reason | None) -> dict[str, Any]:
        label = int(answers.labels[row])
        found: dict[str, Any] = {
            "label": label,
            "class": self._class(label),
            "score": _finite(answers.scores[row]),
            "p_value": _finite(answers.p_values[row]),
            "is_ood": bool(answers.is_ood[row]),
        }
        if reason is not None:
            found["boundaries"] = [
                {"label": other, "class": self._class(other), "distance": _finite(distance), "share": _finite(share)}
                for other, distance, share in zip(*reason)
            ]
        return found

    def _class(self, label: int) -> str | None:
        return self.backend.class_names[label] if label < len(self.backend.class_names) else None

    async def _reasons(self, rows: NDArray[np.float32]) -> list[Reason]:
        try:
            return await run_in_threadpool(self.backend.explain, rows, NEAREST)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None

    # ── the Open Inference Protocol ────────────────────────────────────────────────────────────────────────────────

    async def server(self, _: Request) -> Response:
        return JSONResponse({"name": "fdbd", "version": self.watch.version, "extensions": ["binary_tensor_data"]})

    async def live(self, _: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(self, _: Request) -> Response:
        return JSONResponse({"ready": self.is_ready}, 200 if self.is_ready else 503)

    async def model(self, request: Request) -> Response:
        self._check_name(request)
        return JSONResponse(inference_protocol.describe(self.settings.name, self.backend))

    async def model_ready(self, request: Request) -> Response:
        self._check_name(request)
        return JSONResponse({"name": self.settings.name, "ready": self.is_ready}, 200 if self.is_ready else 503)

    async def infer(self, request: Request) -> Response:
        self._check_name(request)
        body, length = await self._body(request), request.headers.get(inference_protocol.HEADER_LENGTH)
        try:
            inference = await run_in_threadpool(inference_protocol.read, body, length, self.backend)
        except inference_protocol.ProtocolError as error:
            raise HTTPException(400, str(error)) from None
        answers = await self._answers(request, inference.rows)
        content, headers = inference_protocol.write(self.settings.name, inference, answers)
        return Response(content, headers=headers)

    def _check_name(self, request: Request) -> None:
        name = request.path_params["name"]
        if name != self.settings.name:
            raise HTTPException(404, f"there is no model {name[:60]!r}; this service has {self.settings.name!r}")

    # ── around ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def page(self, _: Request) -> Response:
        text = resources.files("fdbd.serve").joinpath("assets", "page.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers=_PAGE_HEADERS)

    async def docs(self, _: Request) -> Response:
        text = resources.files("fdbd.serve").joinpath("assets", "docs.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers=_PAGE_HEADERS)

    async def openapi(self, _: Request) -> Response:
        return JSONResponse(document(self.settings.name, self.backend))

    async def status(self, _: Request) -> Response:
        """What the page shows: the guard, the monitor's view, the calibration scores, the latest rejected images."""
        backend = self.backend
        return JSONResponse(
            {
                "guard": backend.name,
                "promise": backend.promise,
                "input": backend.input_name,
                "classes": list(backend.class_names),
                "calibration": _quantiles(backend.calibration),
                "thresholds": [_finite(value) for value in backend.thresholds[:1]],
                "monitor": await run_in_threadpool(self.watch.view),
                "history": self.watch.history(),
                "samples": self.samples.latest(),
                "waiting": self.batcher.waiting,
            }
        )

    async def metrics(self, _: Request) -> Response:
        text = await run_in_threadpool(self.watch.exposition)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _body(self, request: Request) -> bytes:
        try:
            return await request.body()
        except ClientDisconnect:
            raise HTTPException(499, "the client left before its request was whole") from None

    async def _answers(self, request: Request, rows: NDArray[np.float32]) -> Answers:
        """The answers on rows, unless the queue is full, the deadline passes or the client leaves."""
        if len(rows) > self.settings.queue:
            raise HTTPException(
                413, f"the request has {len(rows)} rows, at most {self.settings.queue} are taken at once"
            )
        answer = asyncio.ensure_future(self.batcher.submit(rows, self.settings.timeout))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                answer.cancel()
                raise HTTPException(499, "the client left before its answer was ready")
            answers = answer.result()
        except QueueFull:
            raise HTTPException(503, "the queue is full; come again later", {"retry-after": "1"}) from None
        except ShuttingDown:
            raise HTTPException(503, "the service is shutting down", {"retry-after": "5"}) from None
        except DeadlinePassed:
            raise HTTPException(504, f"no answer within {self.settings.timeout:g} s") from None
        finally:
            gone.cancel()
        self.watch.count(answers)
        return answers


class _Gate:
    """Before every route: the token, the size of the body, a request's id, counts and one line of log."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service
        self.expected = None if service.settings.token is None else f"Bearer {service.settings.token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        identity = _identity(headers.get(b"x-request-id"))
        start, status = time.perf_counter(), 500

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", identity.encode())]
            await send(message)

        try:
            refusal = self._refusal(scope["path"], headers)
            if refusal is not None:
                await refusal(scope, receive, sending)
            else:
                await self.app(scope, _limited(receive, self.service.settings.max_body), sending)
        except _TooLarge:
            await self._too_large(scope, receive, sending)
        finally:
            seconds = time.perf_counter() - start
            route = scope.get("route")
            path = getattr(route, "path", "other")
            self.service.watch.count_request(path, status, seconds)
            if path in ("/decide", "/v2/models/{name}/infer") or status >= 400:
                log.info(
                    json.dumps({"request": identity, "path": path, "status": status, "seconds": round(seconds, 6)})
                )

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> Response | None:
        if self.expected is not None and path not in _OPEN_PATHS:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                return _error(401, "this service asks for a bearer token", {"www-authenticate": "Bearer"})
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.service.settings.max_body:
            return self._too_large_response()
        return None

    async def _too_large(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._too_large_response()(scope, receive, send)

    def _too_large_response(self) -> Response:
        limit = self.service.settings.max_body
        return _error(413, f"the body is larger than the limit of {limit:,} bytes", {"connection": "close"})


class _TooLarge(Exception):
    """A body without a stated length grew beyond the limit."""


def _limited(receive: Receive, limit: int) -> Receive:
    total = 0

    async def limited() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > limit:
            raise _TooLarge
        return message

    return limited


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone; the body has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _identity(given: bytes | None) -> str:
    """The client's own request id where it is a short plain text, else a new one."""
    if given is not None and 0 < len(given) <= 64 and all(33 <= byte < 127 for byte in given):
        return given.decode("ascii")
    return uuid.uuid4().hex


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status, headers)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail, dict(error.headers or {}))


async def _failed(_: Request, error: Exception) -> Response:
    log.error("a request failed: %r", error)
    return _error(500, "the service could not answer; its log says why")


def _finite(value: Any) -> float | None:
    """JSON has no infinity and no NaN: those become null."""
    number = float(value)
    return number if math.isfinite(number) else None


def _quantiles(scores: NDArray[np.float64]) -> list[float]:
    """At most 512 of the sorted calibration scores, evenly spaced in rank."""
    if len(scores) <= 512:
        return [float(score) for score in scores]
    return [float(score) for score in scores[np.linspace(0, len(scores) - 1, 512).round().astype(int)]]


_OPEN_PATHS = frozenset({"/", "/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready"})
"""Paths that need no token: probes of an orchestrator, and pages that hold nothing of the guard."""

_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
