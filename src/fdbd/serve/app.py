"""The service as an ASGI application: `App(guards, settings)` answers over HTTP, in one process.

Two protocols lead to the same micro-batches: the Open Inference Protocol (`/v2/…`) and a plain
`POST /decide`. Routes are Starlette's. Around them stands what bounds a request: its deadline and
its memory (`fdbd.serve.asked`), and who may ask (`fdbd.serve.access`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import Message, Receive, Scope, Send

from fdbd.core.pixels import Pixels, import_pillow, thumbnail
from fdbd.serve import inference_protocol
from fdbd.serve.access import OPEN_PATHS, check_access, has_token
from fdbd.serve.asked import KEY, Asked, asked_of, file_of_form, read_body, read_the_rest
from fdbd.serve.backend import Answers, finite
from fdbd.serve.batching import ModelFailure
from fdbd.serve.deadline import FIRST_BYTE, Deadline
from fdbd.serve.decisions import DecisionLog
from fdbd.serve.guards import Guards, ServedGuard, record_of
from fdbd.serve.http_protocol import OVER_LIMIT
from fdbd.serve.images import ImageDecoder
from fdbd.serve.memory import MemoryBudget, budget_of_process, resident_memory
from fdbd.serve.metrics import Observed, exposition
from fdbd.serve.settings import Settings
from fdbd.util.version import __version__

log = logging.getLogger("fdbd.serve")

DEFAULTS = Settings()

NEAREST = 5
"""Boundaries that an explanation names."""
MOST_EXPLAINED = 64
"""Rows of one request that are explained."""
_ASIDE_FROM = 65_536
"""Bytes from which on a body is parsed outside the event loop."""
_LAST_UPLOADS_SECONDS = 2.0
"""How long bodies may still arrive once the service is told to end."""
_LOOK_AFTER_SECONDS = 0.5
_SHADOW_REQUESTS = 64
"""Requests that wait for the shadow guard at most."""
_SMALL_BODY = 65_536
"""Bytes of a body that is no image and no tensor."""
_OWN_PORT = "fdbd.own_port"
"""Key of an ASGI scope: the request came by the port for metrics."""
_GUARD_HEADER = "x-fdbd-guard"
_IMAGE_TYPES = ("application/octet-stream", "application/x-www-form-urlencoded", "")
"""Beside image/…: what programs send that name no type; the second is curl's for --data-binary."""
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


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
        self.guards = guards
        self.settings = settings
        self.is_started = False
        self.is_ending = False
        self._decisions = decisions
        self._thumbnails = thumbnails
        self.changed: Callable[[str, bool], object] = lambda name, is_loaded: None
        """Called with the name of a guard and whether it is loaded, after a request loaded or
        unloaded it, so that other processes follow."""
        self.at_start: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """What else runs while the service does."""
        self._under_way: set[Asked] = set()
        self._background: set[asyncio.Task[None]] = set()
        # Replaced in `begin`, once the guards are loaded and it is known what they take.
        self.budget = MemoryBudget(0)
        self._decoder = self._new_decoder()
        self._explaining = ThreadPoolExecutor(1, "fdbd-explain")
        self._counting = ThreadPoolExecutor(1, "fdbd-metrics")
        self._router = Router(self._routes(), redirect_slashes=False, default=_nothing_here)

    def _routes(self) -> list[BaseRoute]:
        """What there is, and what answers."""
        routes: list[BaseRoute] = []

        def get(path: str, answer: Callable[[Request], Awaitable[Response]]) -> None:
            routes.append(Route(path, answer, methods=["GET"]))

        def post(path: str, answer: Callable[[Request], Awaitable[Response]]) -> None:
            routes.append(Route(path, answer, methods=["POST"]))

        post("/decide", self.decide)
        # The metadata list version 1, so clients may name it.
        for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            post(f"{model}/infer", self.infer)
            get(f"{model}/ready", self.model_ready)
            get(model, self.model)
        get("/", self.page)
        get("/docs", self.docs)
        get("/openapi.json", self.openapi)
        get("/status", self.status)
        get("/metrics", self.metrics)
        get("/v2", self.server)
        get("/v2/health/live", self.live)
        get("/v2/health/ready", self.ready)
        post("/v2/repository/index", self.repository)
        post("/v2/repository/models/{model}/load", self.load)
        post("/v2/repository/models/{model}/unload", self.unload)
        post("/monitor/acknowledge", self.acknowledge)
        return routes

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

    # ── from the start to the end

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if "state" in scope:
            scope["state"]["settings"] = self.settings
        try:
            await self.begin()
        except (ValueError, OSError) as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._end()
        await send({"type": "lifespan.shutdown.complete"})

    async def begin(self) -> None:
        """Load the guards and begin to answer. Called by the lifespan protocol, or before it by a
        server that wants to see the error."""
        if self.is_started:
            return
        for name in self.guards.names:
            await self.guards.load(name)
        if any(guard.backend.preprocess is not None for guard in self.guards.loaded()):
            import_pillow().preinit()  # its decoders, so that no request waits for their import
        self.budget = budget_of_process(self.settings.memory)
        self._decoder = self._new_decoder()
        self._spawn(self._look_after())
        for work in self.at_start:
            self._spawn(work())
        self.is_started = True

    async def _end(self) -> None:
        self.begin_to_end()
        for task in list(self._background):
            task.cancel()
        await self.guards.stop()
        self._decoder.stop()
        self._explaining.shutdown(wait=False, cancel_futures=True)
        self._counting.shutdown(wait=False, cancel_futures=True)
        if self._decisions is not None:
            await asyncio.to_thread(self._decisions.stop)

    def _new_decoder(self) -> ImageDecoder:
        return ImageDecoder(
            self.budget,
            threads=self.settings.decoders,
            max_pixels=self.settings.max_pixels,
            keep_small=self.settings.samples > 0 or self._thumbnails,
        )

    def begin_to_end(self) -> None:
        """Be ready no more; called when the process is told to end, before the server closes."""
        self.is_ending = True

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered: no guard has failed on its latest batch or is late."""
        if not self.is_started or self.is_ending:
            return False
        return all(guard.is_ready for guard in self.guards.loaded())

    @property
    def is_alive(self) -> bool:
        """Whether the process is worth keeping: false once a model or a decoder has been at one
        piece of work for twice the time that a request may take."""
        longest = self._decoder.longest_running
        for guard in self.guards.loaded():
            longest = max(longest, guard.batcher.running_for)
        return longest < 2 * self.settings.timeout

    async def _look_after(self) -> None:
        """Try models that failed, and hurry up when the service ends."""
        while True:
            await asyncio.sleep(_LOOK_AFTER_SECONDS)
            if self.is_ending:
                self._hurry()
            for guard in self.guards.loaded():
                if guard.batcher.is_failing:
                    with contextlib.suppress(Exception):
                        await guard.look_after()

    def _hurry(self) -> None:
        """Give up on what cannot be answered before the service ends."""
        soon = time.monotonic() + _LAST_UPLOADS_SECONDS
        is_hopeless = not all(guard.is_ready for guard in self.guards.loaded())
        for asked in list(self._under_way):
            if not asked.service_is_ending and (is_hopeless or not asked.has_whole_body):
                asked.service_is_ending = True
                asked.deadline.move_closer(soon)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # ── one request

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An answer or a refusal, a count and, for decisions and refusals, a line of log."""
        started = scope.get(FIRST_BYTE) or time.monotonic()
        asked = Asked(
            id=_identity(scope),
            deadline=Deadline(started + self.settings.timeout),
            memory=self.budget.share(),
        )
        scope[KEY] = asked
        scope["app"] = self
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
            await send(message)

        self._under_way.add(asked)
        try:
            with asked.deadline:
                refusal = await self._route(scope, receive, send_with_id, asked)
            if refusal is not None:
                await refusal(scope, receive, send_with_id)
        finally:
            self._under_way.discard(asked)
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
            refusal = JSONResponse({"error": error.detail}, error.status_code, error.headers)
        except ClientDisconnect:
            return _refusal(499, "the client left before its request was whole")
        except ModelFailure:
            return _refusal(500, "the model failed; the service's log says why")
        except TimeoutError:  # a thread began with the request too late
            return self._too_late(asked)
        except asyncio.CancelledError:
            if not asked.deadline.has_passed:
                raise
            asked.deadline.acknowledge()
            return None if asked.has_answer else self._too_late(asked)
        except Exception as error:
            log.error("a request failed: %r", error, exc_info=error)
            return _refusal(500, "the service could not answer; its log says why")
        if not asked.has_whole_body and request.method not in ("GET", "HEAD"):
            try:
                asked.has_whole_body = await read_the_rest(request)
            except asyncio.CancelledError:
                if not asked.deadline.has_passed:
                    raise
                asked.deadline.acknowledge()
        return refusal

    def _check(self, request: Request) -> None:
        path = request.scope["path"]
        if not path.startswith("/v2/health/") and not request.scope.get(_OWN_PORT):
            check_access(request, self.settings)
        is_probe = path in OPEN_PATHS or path in ("/metrics", "/status")
        if request.scope.get(OVER_LIMIT) and not is_probe:
            reason = "all connections are in use; come again later"
            raise HTTPException(503, reason, {"retry-after": "1", "connection": "close"})
        if self.is_ending and request.method == "POST":
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
        with contextlib.suppress(HTTPException):  # a guard that is not loaded counts nothing
            watch = self.guards.get(name).watch
            if watch is not None:
                watch.count_request(path, status, seconds)
        if scope["method"] == "POST" or status >= 400:
            line = {"request": asked.id, "path": path, "status": status}
            log.info({**line, "seconds": round(seconds, 6), **asked.log})

    def _known_path(self, scope: Scope) -> str:
        """The path for the metrics, which must not have as many as clients can invent."""
        path: str = scope["path"]
        if scope.get("endpoint") is None:
            return "other"
        model = scope.get("path_params", {}).get("model")
        if model is not None and model not in self.guards.names:
            return "other"
        return re.sub("/versions/[^/]*", "", path)

    # ── decisions

    async def decide(self, request: Request) -> Response:
        """One image, as multipart or raw bytes; or JSON `{"features": [[…], …]}`."""
        guard = self._guard(request, request.query_params.get("guard", self.guards.default))
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        explain = request.query_params.get("explain", "").lower() in ("1", "true", "yes")
        if guard.backend.input_name == "features":
            return await self._decide_features(request, guard, kind, explain)
        return await self._decide_image(request, guard, kind, explain)

    async def _decide_features(
        self, request: Request, guard: ServedGuard, kind: str, explain: bool
    ) -> Response:
        if kind != "application/json":
            wanted = 'JSON such as {"features": [[0.1, …]]}, as application/json'
            raise HTTPException(415, f"this guard takes features: send {wanted}")
        body = await read_body(request, self.settings.max_body)
        asked = asked_of(request.scope)
        rows = await self._parse(asked, body, inference_protocol.read_features, guard.backend)
        answers = await self._answers(request, guard, rows)
        decisions = _decisions(guard, answers)
        if explain:
            await self._explain(asked, guard, rows, decisions)
        self._record(asked, guard, answers, body, [None] * len(rows))
        self._ask_shadow(asked, guard, answers, rows, None)
        return JSONResponse({"decisions": decisions}, headers=_guard_header(guard))

    async def _decide_image(
        self, request: Request, guard: ServedGuard, kind: str, explain: bool
    ) -> Response:
        is_form = kind == "multipart/form-data"
        if not is_form and not kind.startswith("image/") and kind not in _IMAGE_TYPES:
            wanted = "a JPEG or PNG as the body or in a form"
            raise HTTPException(415, f"this guard takes images: send {wanted}, not {kind[:40]!r}")
        content = await read_body(request, self.settings.max_body)
        asked = asked_of(request.scope)
        preprocess = guard.backend.preprocess
        if preprocess is None:
            reason = "this guard does not say how images are prepared: send tensors to /v2"
            raise HTTPException(400, f"{reason}, or export it again")
        if is_form:
            content_type = request.headers["content-type"]
            content = _checked(file_of_form, content, content_type, asked.memory)
        shape = guard.backend.row_shape
        # The row, its copy in a batch and what the model makes of its copy.
        asked.memory.take(3 * 4 * int(np.prod(shape)))
        try:
            image = await self._decoder.decode(content, preprocess, shape, asked)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        rows = image.row[None]
        answers = await self._answers(request, guard, rows)
        decisions = _decisions(guard, answers)
        if explain:
            await self._explain(asked, guard, rows, decisions)
        self._keep_rejected(guard, decisions[0], image.small)
        self._record(asked, guard, answers, content, [image.small])
        self._ask_shadow(asked, guard, answers, rows, content)
        return JSONResponse(decisions[0], headers=_guard_header(guard))

    async def infer(self, request: Request) -> Response:
        """A tensor by the Open Inference Protocol."""
        guard = self._model(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in ("application/json", "application/octet-stream", ""):
            wanted = "application/json or application/octet-stream"
            raise HTTPException(415, f"the content type is {kind[:40]!r}, expected {wanted}")
        body = await read_body(request, self.settings.max_body)
        asked = asked_of(request.scope)
        length = request.headers.get(inference_protocol.HEADER_LENGTH)
        json_bytes = _checked(inference_protocol.header_of, body, length)

        def read(body: bytes, backend: Any) -> inference_protocol.Inference:
            return inference_protocol.read(body, length, backend)

        inference = await self._parse(asked, body, read, guard.backend, json_bytes)
        answers = await self._answers(request, guard, inference.rows)
        self._record(asked, guard, answers, body, [None] * len(inference.rows))
        self._ask_shadow(asked, guard, answers, inference.rows, None)
        content, headers = inference_protocol.write(guard.name, inference, answers)
        return Response(content, headers={**headers, **_guard_header(guard)})

    async def _parse(
        self,
        asked: Asked,
        body: bytes,
        function: Callable[[bytes, Any], Any],
        backend: Any,
        json_bytes: int | None = None,
    ) -> Any:
        """What a function makes of a body, within the memory that this may take; outside the event
        loop if it is large. The function's ValueError is the answer."""
        text = body if json_bytes is None else body[:json_bytes]
        # Binary tensors are copied twice: out of the body, and into a batch.
        asked.memory.take(inference_protocol.memory_of_json(text) + 2 * (len(body) - len(text)))
        if len(body) <= _ASIDE_FROM:
            return _checked(function, body, backend)
        try:
            return await self._decoder.run(asked, function, body, backend)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None

    async def _answers(
        self, request: Request, guard: ServedGuard, rows: NDArray[np.float32]
    ) -> Answers:
        """The answers on rows, unless the queue is full, the deadline passes or the client
        leaves."""
        most = self.settings.queue
        if len(rows) > most:
            reason = f"the request has {len(rows)} rows, at most {most} are taken at once"
            raise HTTPException(413, reason)
        asked = asked_of(request.scope)
        asked.memory.take(inference_protocol.memory_of_answer(len(rows), guard.backend))
        answer = guard.batcher.submit(rows)
        leaving = asyncio.ensure_future(_until_client_leaves(request))
        try:
            waited: list[asyncio.Future[Any]] = [answer, leaving]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            raise HTTPException(499, "the client left before its answer was ready")
        finally:
            answer.cancel()
            leaving.cancel()

    async def _explain(
        self,
        asked: Asked,
        guard: ServedGuard,
        rows: NDArray[np.float32],
        decisions: list[dict[str, Any]],
    ) -> None:
        """Add the nearest boundaries to decisions."""
        if len(rows) > MOST_EXPLAINED:
            reason = f"the request has {len(rows)} rows, at most {MOST_EXPLAINED} are explained"
            raise HTTPException(413, reason)
        asked.memory.take(len(rows) * guard.backend.num_classes * 64)
        asked.memory.hold()
        future = self._explaining.submit(guard.backend.explain, rows, NEAREST)
        future.add_done_callback(lambda _: asked.memory.let_go())
        try:
            reasons = await asyncio.wrap_future(future)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        for decision, (labels, distances, shares) in zip(decisions, reasons):
            boundaries = []
            for label, distance, share in zip(labels, finite(distances), finite(shares)):
                boundaries.append(
                    {
                        "label": label,
                        "class": _class_name(guard, label),
                        "distance": distance,
                        "share": share,
                    }
                )
            decision["boundaries"] = boundaries

    # ── what follows a decision

    def _keep_rejected(
        self, guard: ServedGuard, decision: dict[str, Any], small: Pixels | None
    ) -> None:
        if decision["is_ood"] and self.settings.samples and small is not None:
            kept = {"time": time.time(), **decision, "image": thumbnail(small)}
            kept.pop("boundaries", None)
            guard.rejected.appendleft(kept)

    def _record(
        self,
        asked: Asked,
        guard: ServedGuard,
        answers: Answers,
        content: bytes,
        small: list[Pixels | None],
    ) -> None:
        asked.log["guard"] = guard.backend.id
        asked.log["ood"] = int(answers.is_ood.sum())
        if self._decisions is None:
            return
        sha256 = hashlib.sha256(content).hexdigest()
        for row in range(len(answers.labels)):
            record = record_of(guard, answers, row, asked.id, sha256)
            picture = small[row] if row < len(small) else None
            if self._thumbnails and picture is not None and record["is_ood"]:
                record["thumbnail"] = thumbnail(picture)
            self._decisions.add(record)

    def _ask_shadow(
        self,
        asked: Asked,
        guard: ServedGuard,
        answers: Answers,
        rows: NDArray[np.float32],
        content: bytes | None,
    ) -> None:
        """Have the shadow decide the same rows, if it keeps up. The answer does not wait for it."""
        shadow = guard.shadow
        if shadow is None:
            return
        if guard.pending_for_shadow >= _SHADOW_REQUESTS:
            self._count(guard, "shadow_dropped", len(rows))
            return
        guard.pending_for_shadow += 1
        asked.memory.hold()
        self._spawn(self._decide_by_shadow(asked, guard, shadow, answers, rows, content))

    async def _decide_by_shadow(
        self,
        asked: Asked,
        guard: ServedGuard,
        shadow: ServedGuard,
        answers: Answers,
        rows: NDArray[np.float32],
        content: bytes | None,
    ) -> None:
        try:
            if content is not None and shadow.backend.preprocess != guard.backend.preprocess:
                rows = await self._rows_of_shadow(asked, shadow, content)
            found = await asyncio.wait_for(shadow.batcher.submit(rows), self.settings.timeout)
            disagreements = int((found.is_ood != answers.is_ood).sum())
            self._count(guard, "shadow_samples", len(rows))
            self._count(guard, "shadow_disagreements", disagreements)
            if self._decisions is not None:
                sha256 = hashlib.sha256(content).hexdigest() if content is not None else ""
                for row in range(len(rows)):
                    record = record_of(shadow, found, row, asked.id, sha256)
                    self._decisions.add({**record, "role": "shadow"})
        except (Exception, asyncio.TimeoutError) as error:
            # Whatever goes wrong with the shadow, the service answers by its guard.
            self._count(guard, "shadow_dropped", len(rows))
            log.debug("the shadow did not decide: %r", error)
        finally:
            guard.pending_for_shadow -= 1
            asked.memory.let_go()

    async def _rows_of_shadow(
        self, asked: Asked, shadow: ServedGuard, content: bytes
    ) -> NDArray[np.float32]:
        preprocess = shadow.backend.preprocess
        if preprocess is None:
            raise ValueError("the shadow does not say how images are prepared")
        shape = shadow.backend.row_shape
        image = await self._decoder.decode(content, preprocess, shape, asked)
        return image.row[None]

    def _count(self, guard: ServedGuard, name: str, number: int) -> None:
        if guard.watch is not None:
            guard.watch.count_event(name, number)

    # ── the guards

    def _guard(self, request: Request, name: str) -> ServedGuard:
        asked_of(request.scope).guard = name
        return self.guards.get(name)

    def _model(self, request: Request) -> ServedGuard:
        """The guard that a path of the Open Inference Protocol names."""
        version = request.path_params.get("version", inference_protocol.VERSION)
        guard = self._guard(request, request.path_params["model"])
        if version != inference_protocol.VERSION:
            known = inference_protocol.VERSION
            raise HTTPException(404, f"there is no version {version[:20]!r}, only {known}")
        return guard

    async def model(self, request: Request) -> Response:
        """The metadata of one guard."""
        guard = self._model(request)
        about = inference_protocol.describe(guard.name, guard.backend)
        return JSONResponse(about, headers=_guard_header(guard))

    async def model_ready(self, request: Request) -> Response:
        """Whether one guard answers."""
        guard = self._model(request)
        is_ready = guard.is_ready and self.is_started and not self.is_ending
        return JSONResponse({"name": guard.name, "ready": is_ready}, 200 if is_ready else 503)

    async def repository(self, request: Request) -> Response:
        """All guards, as the model repository extension lists them."""
        await read_body(request, _SMALL_BODY)
        return JSONResponse(self.guards.index())

    async def load(self, request: Request) -> Response:
        """Load a guard from its file again."""
        name = await self._managed(request)
        try:
            guard = await asyncio.shield(self.guards.load(name))
        except (ValueError, OSError) as error:
            raise HTTPException(400, f"the guard {name!r} cannot be loaded: {error}") from None
        self.changed(name, True)
        return JSONResponse({"name": name, "id": guard.backend.id}, headers=_guard_header(guard))

    async def unload(self, request: Request) -> Response:
        """Answer no more with a guard."""
        name = await self._managed(request)
        await asyncio.shield(self.guards.unload(name))
        self.changed(name, False)
        return JSONResponse({"name": name})

    async def _managed(self, request: Request) -> str:
        """The name of a guard that is to be loaded or unloaded, which takes a token."""
        if self.settings.token is None:
            reason = "guards are loaded and unloaded only by clients with a token"
            raise HTTPException(403, f"{reason}: start the service with --token-file")
        name: str = request.path_params["model"]
        if name not in self.guards.names:
            raise HTTPException(404, f"there is no guard {name[:80]!r} here")
        await read_body(request, _SMALL_BODY)
        return name

    async def acknowledge(self, request: Request) -> Response:
        """Somebody has seen the drift alarm: the test begins anew."""
        guard = self._guard(request, request.query_params.get("guard", self.guards.default))
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in ("application/json", ""):
            raise HTTPException(415, 'send {"note": "…"} as application/json, or no body')
        body = await read_body(request, _SMALL_BODY)
        note = ""
        if body:
            content = _checked(inference_protocol.parsed, body)
            given = content.get("note", "") if isinstance(content, dict) else None
            if not isinstance(given, str):
                raise HTTPException(400, 'the body is not {"note": "…"}')
            note = given[:200]
        if guard.watch is None:
            raise HTTPException(404, "this guard has no monitor")
        loop = asyncio.get_running_loop()
        view = await loop.run_in_executor(self._counting, guard.watch.acknowledge, note)
        return JSONResponse({"monitor": view})

    # ── the service itself

    async def live(self, request: Request) -> Response:
        """Whether the process is worth keeping."""
        return JSONResponse({"live": self.is_alive}, 200 if self.is_alive else 503)

    async def ready(self, request: Request) -> Response:
        """Whether requests are answered."""
        return JSONResponse({"ready": self.is_ready}, 200 if self.is_ready else 503)

    async def server(self, request: Request) -> Response:
        """The server's metadata."""
        extensions = ["binary_tensor_data", "model_repository"]
        return JSONResponse({"name": "fdbd", "version": __version__, "extensions": extensions})

    async def page(self, request: Request) -> Response:
        """The page for people."""
        return HTMLResponse(_asset("page.html"), headers=_PAGE_HEADERS)

    async def docs(self, request: Request) -> Response:
        """The page that describes the interface."""
        return HTMLResponse(_asset("docs.html"), headers=_PAGE_HEADERS)

    async def openapi(self, request: Request) -> Response:
        """The description of the interface; with the token, filled in for the first guard."""
        found = json.loads(_asset("openapi.json"))
        found["info"]["version"] = __version__
        loaded = self.guards.loaded()
        if loaded and has_token(request, self.settings):
            _describe_guard(found, loaded[0])
        return JSONResponse(found)

    async def status(self, request: Request) -> Response:
        """What the page shows: the guard, the monitor's view, the calibration scores, the latest
        rejected images."""
        guard = self._guard(request, request.query_params.get("guard", self.guards.default))
        backend = guard.backend
        shown = min(512, len(backend.calibration))
        ranks = np.linspace(0, len(backend.calibration) - 1, shown).round().astype(int)
        watch = guard.watch
        return JSONResponse(
            {
                "guard": backend.name,
                "id": backend.id,
                "version": backend.version,
                "name": guard.name,
                "names": self.guards.names,
                "promise": backend.promise,
                "input": backend.input_name,
                "classes": list(backend.class_names),
                "calibration": finite(backend.calibration[ranks]),
                "thresholds": finite(backend.thresholds),
                "monitor": None if watch is None else watch.view(),
                "history": [] if watch is None else list(watch.history),
                "samples": list(guard.rejected),
                "waiting": guard.batcher.waiting,
                "ready": self.is_ready,
                "memory": self._memory(),
            },
            headers=_guard_header(guard),
        )

    def _memory(self) -> dict[str, int]:
        return {
            "budget": self.budget.total,
            "used": self.budget.used,
            "most_used": self.budget.most_used,
            "process": resident_memory(),
        }

    async def metrics(self, request: Request) -> Response:
        """Numbers for Prometheus."""
        observed = []
        for guard in self.guards.loaded():
            if guard.watch is not None:
                waiting = guard.batcher.waiting
                is_ready = guard.is_ready and self.is_ready
                observed.append(Observed(guard.name, guard.backend, guard.watch, waiting, is_ready))
        memory = self._memory()
        gauges: dict[str, tuple[str, float]] = {
            "memory_budget_bytes": ("Bytes that requests may hold.", memory["budget"]),
            "memory_used_bytes": ("Bytes that requests hold now.", memory["used"]),
            "process_memory_bytes": ("Resident memory of this process.", memory["process"]),
        }
        # A guard of many classes has many lines, so this is done outside the event loop, in a
        # thread that does nothing else.
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(self._counting, exposition, observed, gauges)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _identity(scope: Scope) -> str:
    """The id that the client gave its request if it is a short plain text, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text: str = value.decode("latin-1")
            if re.fullmatch("[!-~]{1,64}", text):
                return text
    return uuid.uuid4().hex


async def _nothing_here(scope: Scope, receive: Receive, send: Send) -> None:
    path = scope["path"]
    raise HTTPException(404, f"there is nothing at {path[:80]!r}; /docs lists what there is")


def _refusal(status: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": reason}, status, headers)


def _guard_header(guard: ServedGuard) -> dict[str, str]:
    return {_GUARD_HEADER: guard.backend.id}


def _class_name(guard: ServedGuard, label: int) -> str | None:
    names = guard.backend.class_names
    return names[label] if names else None


def _decisions(guard: ServedGuard, answers: Answers) -> list[dict[str, Any]]:
    """One JSON object per row."""
    decisions = []
    scores = finite(answers.scores)
    p_values = finite(answers.p_values)
    for row, label in enumerate(answers.labels.tolist()):
        decisions.append(
            {
                "label": label,
                "class": _class_name(guard, label),
                "score": scores[row],
                "p_value": p_values[row],
                "is_ood": bool(answers.is_ood[row]),
            }
        )
    return decisions


def _checked(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function makes of a client's data; its ValueError is the answer."""
    try:
        return function(*arguments)
    except ValueError as error:
        raise HTTPException(400, str(error)) from None


async def _until_client_leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _describe_guard(found: dict[str, Any], guard: ServedGuard) -> None:
    """Fill the description of the interface in for a guard."""
    kind = guard.backend.input_name
    found["info"]["title"] = f"fdbd: {guard.backend.name}"
    found["info"]["description"] = guard.backend.promise
    found["paths"] = {
        path.replace("{model}", guard.name): methods for path, methods in found["paths"].items()
    }
    for methods in found["paths"].values():
        methods.pop("parameters", None)
    decide = found["paths"]["/decide"]["post"]
    decide["requestBody"]["$ref"] = f"#/components/requestBodies/{kind}"
    decide["responses"]["200"]["$ref"] = f"#/components/responses/{kind}"
    found["components"]["schemas"]["Tensor"]["properties"]["name"]["enum"] = [kind]


def _asset(name: str) -> str:
    return resources.files("fdbd.serve").joinpath("assets", name).read_text(encoding="utf-8")
