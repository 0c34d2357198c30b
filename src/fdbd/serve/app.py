"""The service as an ASGI application: `App(backend)` answers over HTTP, in one process.

Two protocols lead to the same micro-batches: the Open Inference Protocol (`/v2/…`) and a plain
`POST /decide`. Requests and responses are Starlette's; a table of fixed paths stands in for its
router and middleware, which cost time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from fdbd.core.pixels import thumbnail
from fdbd.serve import inference_protocol
from fdbd.serve.backend import Answers, Backend, finite
from fdbd.serve.batching import Batcher
from fdbd.serve.watch import Watch
from fdbd.util.version import __version__

log = logging.getLogger("fdbd.serve")

T = TypeVar("T")

NEAREST = 5  # boundaries that an explanation names
LARGE = 65_536  # bytes from which on a body is parsed outside the event loop
LINGER = 2.0  # seconds for which the rest of a body that is too large is read, so that its client gets to read why
_OPEN_PATHS = frozenset({"/", "/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready"})
"""Paths that need no token: probes of an orchestrator, and pages that hold nothing of the guard."""
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Settings:
    """How the service behaves; every field is an option of `fdbd serve`."""

    name: str = "guard"  #: the model's name in the Open Inference Protocol
    token: str | None = (
        None  #: clients send it as `Authorization: Bearer TOKEN`; None: no token is needed
    )
    batch_size: int = 32
    delay: float = 0.001  #: seconds that a batch waits for more requests
    queue: int = 1024  #: rows that may wait
    timeout: float = 30.0  #: seconds that a request waits for its answer
    max_body: int = 32 * 1024 * 1024  #: bytes of a request's body
    samples: int = 24  #: rejected images that are kept as thumbnails for the page; 0: none


class App:
    """The guard, its batches and its watch behind fixed paths. `watch` counts; None: one without a
    file."""

    def __init__(
        self, backend: Backend, settings: Settings = Settings(), watch: Watch | None = None
    ) -> None:
        self.backend, self.settings, self.watch = backend, settings, watch or Watch(backend)
        self.batcher = Batcher(
            backend.decide,
            size=settings.batch_size,
            delay=settings.delay,
            capacity=max(settings.queue, settings.batch_size),
            enter=backend.enter,
            observe=self.watch.count,
        )
        self.is_ready = False
        self._rejected: deque[dict[str, Any]] = deque(maxlen=settings.samples)
        self._authorization = (
            None if settings.token is None else f"Bearer {settings.token}".encode()
        )
        model = f"/v2/models/{settings.name}"
        self._gets: dict[str, Callable[[], Awaitable[Response]]] = {
            "/": lambda: _page("page.html"),
            "/docs": lambda: _page("docs.html"),
            "/openapi.json": self.openapi,
            "/status": self.status,
            "/metrics": self.metrics,
            "/v2": lambda: _json(
                name="fdbd", version=__version__, extensions=["binary_tensor_data"]
            ),
            "/v2/health/live": lambda: _json(live=True),
            "/v2/health/ready": self._readiness,
            model: lambda: _json(**inference_protocol.describe(settings.name, backend)),
            f"{model}/ready": lambda: self._readiness(name=settings.name),
        }
        self._posts = {"/decide": self.decide, f"{model}/infer": self.infer}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            await self._answer(Request(scope, receive), send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        self.batcher.start()
        await asyncio.to_thread(self.watch.start)
        self.is_ready = True
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self.is_ready = False
        await self.batcher.stop()  # what was taken is answered, then what was seen is saved
        await asyncio.to_thread(self.watch.stop)
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, request: Request, send: Send) -> None:
        """One request: an answer or a refusal, a count and, for decisions and refusals, a line of
        log."""
        start, status = time.perf_counter(), 500
        path = request.scope["path"]
        known = path if path in self._gets or path in self._posts else "other"
        identity = request.headers.get("x-request-id", "")
        if not re.fullmatch("[!-~]{1,64}", identity):  # a short plain text is kept
            identity = uuid.uuid4().hex
        try:
            try:
                response = await self._route(request, path)
            except HTTPException as error:
                response = JSONResponse({"error": error.detail}, error.status_code, error.headers)
            except ClientDisconnect:
                response = JSONResponse(
                    {"error": "the client left before its request was whole"}, 499
                )
            except Exception as error:
                log.error("a request failed: %r", error)
                response = JSONResponse(
                    {"error": "the service could not answer; its log says why"}, 500
                )
            status = response.status_code
            response.raw_headers.append((b"x-request-id", identity.encode()))
            await response(request.scope, request.receive, send)
        finally:
            seconds = time.perf_counter() - start
            self.watch.count_request(known, status, seconds)
            if known in self._posts or status >= 400:
                log.info(
                    {
                        "request": identity,
                        "path": known,
                        "status": status,
                        "seconds": round(seconds, 6),
                    }
                )

    async def _route(self, request: Request, path: str) -> Response:
        if self._authorization is not None and path not in _OPEN_PATHS:
            given = request.headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self._authorization):
                raise HTTPException(
                    401, "this service asks for a bearer token", {"www-authenticate": "Bearer"}
                )
        if path not in self._posts and path not in self._gets:
            raise HTTPException(
                404, f"there is nothing at {path[:80]!r}; /docs lists what there is"
            )
        methods = ("POST",) if path in self._posts else ("GET", "HEAD")
        if request.method not in methods:
            raise HTTPException(405, f"{path} takes {methods[0]}", {"allow": ", ".join(methods)})
        if path in self._posts:
            return await self._posts[path](request, await self._body(request))
        return await self._gets[path]()

    async def _body(self, request: Request) -> bytes:
        limit, body = self.settings.max_body, bytearray()
        stated = request.headers.get("content-length", "")
        if not (stated.isdecimal() and int(stated[:20]) > limit):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    break
            else:
                return bytes(body)
        if (
            "expect" not in request.headers
        ):  # a client that has begun to send reads the answer after its last byte
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(
                    _until(request.receive, lambda message: not message.get("more_body")), LINGER
                )
        raise HTTPException(
            413, f"the body is larger than the limit of {limit:,} bytes", {"connection": "close"}
        )

    async def decide(self, request: Request, body: bytes) -> Response:
        """One image, as multipart or raw bytes; or JSON `{"features": [[…], …]}`."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        explain = request.query_params.get("explain", "").lower() in ("1", "true", "yes")
        is_json = kind == "application/json"
        if is_json != (self.backend.input_name == "features"):
            images = "images: send a JPEG or PNG as the body, not JSON"
            features = 'features: send JSON such as {"features": [[0.1, …]]}'
            raise HTTPException(415, f"this guard takes {images if is_json else features}")
        if is_json:
            rows = await _checked(
                inference_protocol.read_features, body, self.backend, aside=len(body) > LARGE
            )
        else:
            image = await _part(request, body) if kind == "multipart/form-data" else body
            rows = (await _checked(self.backend.prepare, image))[None]
        answers = await self._answers(request, rows)
        found = self._rows(
            answers.labels.tolist(),
            score=answers.scores,
            p_value=answers.p_values,
            is_ood=answers.is_ood,
        )
        if explain:
            reasons = await _checked(self.backend.explain, rows, NEAREST)
            for decision, (labels, distances, shares) in zip(found, reasons):
                decision["boundaries"] = self._rows(labels, distance=distances, share=shares)
        if is_json:
            return JSONResponse({"decisions": found})
        if found[0]["is_ood"] and self.settings.samples:
            picture = await asyncio.to_thread(thumbnail, image)
            self._rejected.appendleft({"time": time.time(), **found[0], "image": picture})
        return JSONResponse(found[0])

    def _rows(self, labels: list[int], **columns: Any) -> list[dict[str, Any]]:
        """One JSON object per label: the class with its name, and a value of each column."""
        names = self.backend.class_names or [None] * self.backend.num_classes
        values = zip(labels, [names[label] for label in labels], *map(finite, columns.values()))
        return [dict(zip(("label", "class", *columns), row)) for row in values]

    async def infer(self, request: Request, body: bytes) -> Response:
        """A tensor by the Open Inference Protocol."""
        length = request.headers.get(inference_protocol.HEADER_LENGTH)
        inference = await _checked(
            inference_protocol.read, body, length, self.backend, aside=len(body) > LARGE
        )
        answers = await self._answers(request, inference.rows)
        content, headers = inference_protocol.write(self.settings.name, inference, answers)
        return Response(content, headers=headers)

    async def _answers(self, request: Request, rows: NDArray[np.float32]) -> Answers:
        """The answers on rows, unless the queue is full, the deadline passes or the client
        leaves."""
        queue, timeout = self.settings.queue, self.settings.timeout
        if len(rows) > queue:
            raise HTTPException(
                413, f"the request has {len(rows)} rows, at most {queue} are taken at once"
            )
        answer = self.batcher.submit(rows)
        gone = asyncio.ensure_future(
            _until(request.receive, lambda message: message["type"] == "http.disconnect")
        )
        try:
            waited: list[asyncio.Future[Any]] = [answer, gone]
            await asyncio.wait(waited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            if gone.done():
                raise HTTPException(499, "the client left before its answer was ready")
            raise HTTPException(504, f"no answer within {timeout:g} s")
        finally:
            answer.cancel()
            gone.cancel()

    async def _readiness(self, **more: str) -> Response:
        return JSONResponse({**more, "ready": self.is_ready}, 200 if self.is_ready else 503)

    async def openapi(self) -> Response:
        """The description of the interface, filled in for this guard."""
        backend, kind = self.backend, self.backend.input_name
        found = json.loads(_asset("openapi.json"))
        found["info"] = {
            "title": f"fdbd: {backend.name}",
            "version": __version__,
            "description": backend.promise,
        }
        found["paths"] = {
            path.replace("{model}", self.settings.name): it for path, it in found["paths"].items()
        }
        decide = found["paths"]["/decide"]["post"]
        decide["requestBody"]["$ref"] = f"#/components/requestBodies/{kind}"
        decide["responses"]["200"]["$ref"] = f"#/components/responses/{kind}"
        found["components"]["schemas"]["Tensor"]["properties"]["name"]["enum"] = [kind]
        return JSONResponse(found)

    async def status(self) -> Response:
        """What the page shows: the guard, the monitor's view, the calibration scores, the latest
        rejected images."""
        backend = self.backend
        ranks = (
            np.linspace(0, len(backend.calibration) - 1, min(512, len(backend.calibration)))
            .round()
            .astype(int)
        )
        return await _json(
            guard=backend.name,
            promise=backend.promise,
            input=backend.input_name,
            classes=list(backend.class_names),
            calibration=finite(backend.calibration[ranks]),
            thresholds=finite(backend.thresholds[:1]),
            monitor=await asyncio.to_thread(self.watch.view),
            history=list(self.watch.history),
            samples=list(self._rejected),
            waiting=self.batcher.waiting,
        )

    async def metrics(self) -> Response:
        text = await asyncio.to_thread(self.watch.exposition, self.batcher.waiting)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _checked(function: Callable[..., T], *arguments: Any, aside: bool = True) -> T:
    """What a function makes of a client's data, outside the event loop where `aside`; its
    ValueError is the answer."""
    try:
        return await asyncio.to_thread(function, *arguments) if aside else function(*arguments)
    except ValueError as error:
        raise HTTPException(400, str(error)) from None


async def _part(request: Request, body: bytes) -> bytes:
    """The first file of a multipart body."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    try:
        async with Request(request.scope, receive).form(max_files=1, max_fields=8) as form:
            for value in form.values():
                if not isinstance(value, str):
                    return await value.read()
    except (MultiPartException, ValueError) as error:
        reason = getattr(error, "message", error)
        raise HTTPException(400, f"the multipart body cannot be read: {reason}") from None
    raise HTTPException(400, "the multipart body holds no file: send the image as a file field")


async def _until(receive: Receive, is_last: Callable[[Message], bool]) -> None:
    while not is_last(await receive()):
        pass


async def _json(**fields: Any) -> Response:
    return JSONResponse(fields)


def _asset(name: str) -> str:
    return resources.files("fdbd.serve").joinpath("assets", name).read_text(encoding="utf-8")


async def _page(name: str) -> Response:
    return HTMLResponse(_asset(name), headers=_PAGE_HEADERS)
