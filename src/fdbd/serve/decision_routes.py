"""The routes that decide: `/decide` for people and programs, `/v2/…/infer` for clients of the Open
Inference Protocol. Both lead to the same micro-batches."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fdbd.data.label_maps import ID, OOD, as_png
from fdbd.serve import inference_protocol
from fdbd.serve.asked import Asked, asked_of, checked, file_of_form, read_body
from fdbd.serve.backend import Answers, Rows, finite
from fdbd.serve.follow_up import FollowUp
from fdbd.serve.guards import ServedGuard, guard_header, guard_of_model, named_guard
from fdbd.serve.process import ServingProcess
from fdbd.serve.texts import read_texts, rows_of_texts

NEAREST = 5
"""Boundaries that an explanation names."""
MOST_EXPLAINED = 64
"""Rows of one request that are explained."""
_ASIDE_FROM = 65_536
"""Bytes from which on a body is parsed outside the event loop."""
_LARGE_FORM = 1_000_000
"""Bytes from which on a form is read in the thread for large inputs, so that small images do not
wait for it."""
_IMAGE_TYPES = ("application/octet-stream", "application/x-www-form-urlencoded", "")
"""Beside image/…: what programs send that name no type; the second is curl's for --data-binary."""


class DecisionRoutes:
    """Answers with decisions."""

    def __init__(self, process: ServingProcess, follow_up: FollowUp) -> None:
        self._process = process
        self._follow_up = follow_up
        self._settings = process.settings

    def routes(self) -> list[Route]:
        """What there is, and what answers."""
        return [
            Route("/decide", self.decide, methods=["POST"]),
            Route("/v2/models/{model}/infer", self.infer, methods=["POST"]),
            # The metadata list version 1, so clients may name it.
            Route("/v2/models/{model}/versions/{version}/infer", self.infer, methods=["POST"]),
        ]

    async def decide(self, request: Request) -> Response:
        """One image, as multipart or raw bytes; or JSON `{"features": [[…], …]}`, or
        `{"text": "…"}`."""
        guard = named_guard(request, self._process.guards)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        explain = _is_asked(request, "explain")
        if _is_asked(request, "mask") and not guard.backend.is_of_maps:
            reason = "this guard gives one verdict per sample, so there is no mask: leave mask out"
            raise HTTPException(400, reason)
        if guard.backend.input_name == "features":
            return await self._decide_features(request, guard, kind, explain)
        if guard.backend.encoder is not None:
            return await self._decide_texts(request, guard, kind, explain)
        return await self._decide_image(request, guard, kind, explain)

    async def _decide_features(
        self, request: Request, guard: ServedGuard, kind: str, explain: bool
    ) -> Response:
        if kind != "application/json":
            wanted = 'JSON such as {"features": [[0.1, …]]}, as application/json'
            raise HTTPException(415, f"this guard takes features: send {wanted}")
        body = await read_body(request, self._settings.max_body)
        asked = asked_of(request.scope)
        rows = await self._parse(asked, body, inference_protocol.read_features, guard.backend)
        answers = await self._answers(request, guard, rows)
        decisions = _decisions(guard, answers)
        if explain:
            await self._explain(asked, guard, rows, decisions)
        self._follow_up.record(asked, guard, answers, body)
        self._follow_up.ask_shadow(asked, guard, answers, rows, None)
        return JSONResponse({"decisions": decisions}, headers=guard_header(guard))

    async def _decide_texts(
        self, request: Request, guard: ServedGuard, kind: str, explain: bool
    ) -> Response:
        if kind != "application/json":
            wanted = 'JSON such as {"text": "…"}, as application/json'
            raise HTTPException(415, f"this guard takes texts: send {wanted}")
        body = await read_body(request, self._settings.max_body)
        asked = asked_of(request.scope)

        def read(body: bytes, backend: Any) -> tuple[list[str], bool]:
            return read_texts(body)

        texts, is_list = await self._parse(asked, body, read, guard.backend)
        self._check_count(len(texts))
        rows = await rows_of_texts(texts, guard.backend, asked, self._process)
        answers = await self._answers(request, guard, rows)
        decisions = _decisions(guard, answers)
        if explain:
            await self._explain(asked, guard, rows, decisions)
        self._follow_up.record(asked, guard, answers, body)
        self._follow_up.ask_shadow(asked, guard, answers, rows, None, texts)
        content = {"decisions": decisions} if is_list else decisions[0]
        return JSONResponse(content, headers=guard_header(guard))

    async def _decide_image(
        self, request: Request, guard: ServedGuard, kind: str, explain: bool
    ) -> Response:
        is_form = kind == "multipart/form-data"
        if not is_form and not kind.startswith("image/") and kind not in _IMAGE_TYPES:
            wanted = "a JPEG or PNG as the body or in a form"
            raise HTTPException(415, f"this guard takes images: send {wanted}, not {kind[:40]!r}")
        content = await read_body(request, self._settings.max_body)
        asked = asked_of(request.scope)
        preprocess = guard.backend.preprocess
        if preprocess is None:
            reason = "this guard does not say how images are prepared: send tensors to /v2"
            raise HTTPException(400, f"{reason}, or export it again")
        if is_form:
            content = await self._file_of_form(request, content)
        shape = guard.backend.row_shape
        # The row, its copy in a batch and what the model makes of its copy.
        asked.memory.take(3 * 4 * int(np.prod(shape)))
        try:
            image = await self._process.decoder.decode(content, preprocess, shape, asked)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        rows = image.row[None]
        answers = await self._answers(request, guard, rows)
        decisions = _decisions(guard, answers)
        if explain:
            await self._explain(asked, guard, rows, decisions)
        if _is_asked(request, "mask") and answers.masks is not None:
            mask = answers.masks[0]
            # Its grey levels, the PNG and its text.
            asked.memory.take(4 * mask.size)
            decisions[0]["mask"] = await self._process.decoder.run(asked, _as_text, mask)
        self._follow_up.keep_rejected(guard, decisions[0], image.small)
        self._follow_up.record(asked, guard, answers, content, image.small)
        self._follow_up.ask_shadow(asked, guard, answers, rows, content)
        return JSONResponse(decisions[0], headers=guard_header(guard))

    async def _file_of_form(self, request: Request, body: bytes) -> bytes:
        """The file in a form; a large form is read outside the event loop."""
        asked = asked_of(request.scope)
        content_type = request.headers["content-type"]
        if len(body) <= _ASIDE_FROM:
            return checked(file_of_form, body, content_type, asked)  # type: ignore[no-any-return]
        run = self._process.decoder.run
        if len(body) > _LARGE_FORM:
            run = self._process.decoder.run_large
        try:
            file: bytes = await run(asked, file_of_form, body, content_type, asked)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        return file

    async def infer(self, request: Request) -> Response:
        """A tensor by the Open Inference Protocol."""
        guard = guard_of_model(request, self._process.guards)
        if guard.backend.is_of_maps:
            reason = "this guard decides on maps of images: send an image to POST /decide"
            raise HTTPException(400, reason)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in ("application/json", "application/octet-stream", ""):
            wanted = "application/json or application/octet-stream"
            raise HTTPException(415, f"the content type is {kind[:40]!r}, expected {wanted}")
        body = await read_body(request, self._settings.max_body)
        asked = asked_of(request.scope)
        length = request.headers.get(inference_protocol.HEADER_LENGTH)
        json_bytes = checked(inference_protocol.header_of, body, length)

        def read(body: bytes, backend: Any) -> inference_protocol.Inference:
            return inference_protocol.read(body, length, backend, self._check_count)

        inference = await self._parse(asked, body, read, guard.backend, json_bytes)
        rows: Rows | None = inference.rows
        if rows is None:
            self._check_count(len(inference.texts))
            rows = await rows_of_texts(inference.texts, guard.backend, asked, self._process)
        answers = await self._answers(request, guard, rows)
        self._follow_up.record(asked, guard, answers, body)
        self._follow_up.ask_shadow(asked, guard, answers, rows, None, inference.texts)
        content, headers = inference_protocol.write(guard.name, inference, answers)
        return Response(content, headers={**headers, **guard_header(guard)})

    async def _parse(
        self,
        asked: Asked,
        body: bytes,
        read: Callable[[bytes, Any], Any],
        backend: Any,
        json_bytes: int | None = None,
    ) -> Any:
        """What `read` makes of a body, within the memory that this may take; outside the event loop
        if the body is large. The ValueError of `read` is the answer.

        Args:
            json_bytes: the length of the JSON at the start of the body, before binary tensors;
                None: all of the body is JSON.
        """
        json_part = body if json_bytes is None else body[:json_bytes]
        for_json = inference_protocol.memory_of_json(json_part)
        # Binary tensors are copied twice: out of the body, and into a batch.
        for_tensors = 2 * (len(body) - len(json_part))
        asked.memory.take(for_json + for_tensors)
        if len(body) <= _ASIDE_FROM:
            return checked(read, body, backend)
        try:
            return await self._process.decoder.run(asked, read, body, backend)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None

    async def _answers(self, request: Request, guard: ServedGuard, rows: Rows) -> Answers:
        """The answers on rows, unless the queue is full, the deadline passes or the client
        leaves."""
        self._check_count(len(rows))
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

    def _check_count(self, rows: int) -> None:
        most = self._settings.queue
        if rows > most:
            reason = f"the request has {rows} rows, at most {most} are taken at once"
            raise HTTPException(413, reason)

    async def _explain(
        self,
        asked: Asked,
        guard: ServedGuard,
        rows: Rows,
        decisions: list[dict[str, Any]],
    ) -> None:
        """Add the nearest boundaries to decisions."""
        if len(rows) > MOST_EXPLAINED:
            reason = f"the request has {len(rows)} rows, at most {MOST_EXPLAINED} are explained"
            raise HTTPException(413, reason)
        asked.memory.take(len(rows) * guard.backend.num_classes * 64)
        asked.memory.hold()
        future = self._process.explaining.submit(guard.backend.explain, rows, NEAREST)
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
                        "class": guard.class_name(label),
                        "distance": distance,
                        "share": share,
                    }
                )
            decision["boundaries"] = boundaries


def _decisions(guard: ServedGuard, answers: Answers) -> list[dict[str, Any]]:
    """One JSON object per row."""
    decisions = []
    scores = finite(answers.scores)
    p_values = finite(answers.p_values)
    for row, label in enumerate(answers.labels.tolist()):
        decisions.append(
            {
                "label": label,
                "class": guard.class_name(label),
                "score": scores[row],
                "p_value": p_values[row],
                "is_ood": bool(answers.is_ood[row]),
            }
        )
        if answers.ood_shares is not None:
            decisions[row]["ood_share"] = float(answers.ood_shares[row])
    return decisions


def _is_asked(request: Request, name: str) -> bool:
    """Whether the address asks for something by `?name=1`."""
    return request.query_params.get(name, "").lower() in ("1", "true", "yes")


def _as_text(is_ood: NDArray[np.bool_]) -> str:
    """Verdicts (H, W) as a PNG of grey levels in base64: 255 is OOD, 0 is in-distribution."""
    levels = np.where(is_ood, OOD, ID).astype(np.uint8)
    return base64.b64encode(as_png(levels)).decode()


async def _until_client_leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
