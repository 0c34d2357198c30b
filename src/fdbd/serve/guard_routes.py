"""The routes about single guards: their metadata, loading and unloading them, and the
acknowledgement of a drift alarm."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fdbd.serve import inference_protocol
from fdbd.serve.asked import SMALL_BODY, checked, read_body
from fdbd.serve.guards import guard_header, guard_of_model, named_guard
from fdbd.serve.process import ServingProcess


class GuardRoutes:
    """Answers about guards, and loads and unloads them."""

    def __init__(self, process: ServingProcess) -> None:
        self._process = process
        self._guards = process.guards

    def routes(self) -> list[Route]:
        """What there is, and what answers."""
        found = [
            Route("/v2/repository/index", self.repository, methods=["POST"]),
            Route("/v2/repository/models/{model}/load", self.load, methods=["POST"]),
            Route("/v2/repository/models/{model}/unload", self.unload, methods=["POST"]),
            Route("/monitor/acknowledge", self.acknowledge, methods=["POST"]),
        ]
        # The metadata list version 1, so clients may name it.
        for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            found.append(Route(f"{model}/ready", self.model_ready, methods=["GET"]))
            found.append(Route(model, self.model, methods=["GET"]))
        return found

    async def model(self, request: Request) -> Response:
        """The metadata of one guard."""
        guard = guard_of_model(request, self._guards)
        about = inference_protocol.describe(guard.name, guard.backend)
        return JSONResponse(about, headers=guard_header(guard))

    async def model_ready(self, request: Request) -> Response:
        """Whether one guard answers."""
        guard = guard_of_model(request, self._guards)
        is_ready = guard.is_ready and self._process.is_answering
        return JSONResponse({"name": guard.name, "ready": is_ready}, 200 if is_ready else 503)

    async def repository(self, request: Request) -> Response:
        """All guards, as the model repository extension lists them."""
        await read_body(request, SMALL_BODY)
        return JSONResponse(self._guards.index())

    async def load(self, request: Request) -> Response:
        """Load a guard from its file again."""
        name = await self._managed(request)
        try:
            guard = await asyncio.shield(self._guards.load(name))
        except (ValueError, OSError) as error:
            raise HTTPException(400, f"the guard {name!r} cannot be loaded: {error}") from None
        self._process.changed(name, True)
        return JSONResponse({"name": name, "id": guard.backend.id}, headers=guard_header(guard))

    async def unload(self, request: Request) -> Response:
        """Answer no more with a guard."""
        name = await self._managed(request)
        await asyncio.shield(self._guards.unload(name))
        self._process.changed(name, False)
        return JSONResponse({"name": name})

    async def _managed(self, request: Request) -> str:
        """The name of a guard that is to be loaded or unloaded, which takes a token."""
        if self._process.settings.token is None:
            reason = "guards are loaded and unloaded only by clients with a token"
            raise HTTPException(403, f"{reason}: start the service with --token-file")
        name: str = request.path_params["model"]
        if name not in self._guards.names:
            raise HTTPException(404, f"there is no guard {name[:80]!r} here")
        await read_body(request, SMALL_BODY)
        return name

    async def acknowledge(self, request: Request) -> Response:
        """Somebody has seen the drift alarm: the test begins anew."""
        guard = named_guard(request, self._guards)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in ("application/json", ""):
            raise HTTPException(415, 'send {"note": "…"} as application/json, or no body')
        body = await read_body(request, SMALL_BODY)
        note = ""
        if body:
            content = checked(inference_protocol.parsed, body)
            given = content.get("note", "") if isinstance(content, dict) else None
            # A text that is no Unicode could not be shown to anyone later.
            if not isinstance(given, str) or not inference_protocol.is_unicode(given):
                raise HTTPException(400, 'the body is not {"note": "…"}')
            note = given[:200]
        if guard.watch is None:
            raise HTTPException(404, "this guard has no monitor")
        loop = asyncio.get_running_loop()
        view = await loop.run_in_executor(self._process.counting, guard.watch.acknowledge, note)
        return JSONResponse({"monitor": view})
