"""The routes about the service itself: health, metrics, the page for people and the description of
the interface."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from fdbd.serve.access import has_token
from fdbd.serve.backend import finite
from fdbd.serve.guards import ServedGuard, guard_header, named_guard
from fdbd.serve.memory import resident_memory
from fdbd.serve.metrics import Observed, exposition
from fdbd.serve.process import ServingProcess
from fdbd.util.version import __version__

_MOST_SCORES_SHOWN = 512
"""Calibration scores that the page draws."""
_ASSETS = Path(__file__).parent / "assets"
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class ServiceRoutes:
    """Answers about the service."""

    def __init__(self, process: ServingProcess) -> None:
        self._process = process

    def routes(self) -> list[Route]:
        """What there is, and what answers."""
        routes = [
            Route("/", self.page, methods=["GET"]),
            Route("/docs", self.docs, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            Route("/status", self.status, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/v2", self.server, methods=["GET"]),
            Route("/v2/health/live", self.live, methods=["GET"]),
            Route("/v2/health/ready", self.ready, methods=["GET"]),
        ]
        if self._process.settings.examples:
            routes.append(Route("/examples/{name}", self.example, methods=["GET"]))
        return routes

    async def live(self, request: Request) -> Response:
        """Whether the process is worth keeping."""
        is_alive = self._process.is_alive
        return JSONResponse({"live": is_alive}, 200 if is_alive else 503)

    async def ready(self, request: Request) -> Response:
        """Whether requests are answered."""
        is_ready = self._process.is_ready
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

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
        loaded = self._process.guards.loaded()
        if loaded and has_token(request, self._process.settings):
            _describe_guard(found, loaded[0])
        return JSONResponse(found)

    async def example(self, request: Request) -> Response:
        """One of the pictures that the page of `fdbd demo` offers."""
        name = request.path_params["name"]
        if name not in {example["file"] for example in _examples()}:
            raise HTTPException(404, f"there is no example {name[:80]!r}")
        picture = (_ASSETS / "examples" / name).read_bytes()
        return Response(picture, media_type="image/jpeg")

    async def status(self, request: Request) -> Response:
        """What the page shows: the guard, the monitor's view, the calibration scores, the latest
        rejected images."""
        guard = named_guard(request, self._process.guards)
        backend = guard.backend
        shown = min(_MOST_SCORES_SHOWN, len(backend.calibration))
        ranks = np.linspace(0, len(backend.calibration) - 1, shown).round().astype(int)
        view = None
        history = []
        if guard.watch is not None:
            view = guard.watch.view()
            history = list(guard.watch.history)
        examples = _examples() if self._process.settings.examples else []
        return JSONResponse(
            {
                "guard": backend.name,
                "id": backend.id,
                "version": backend.version,
                "name": guard.name,
                "names": self._process.guards.names,
                "promise": backend.promise,
                "input": backend.input_name,
                "classes": list(backend.class_names),
                "calibration": finite(backend.calibration[ranks]),
                "thresholds": finite(backend.thresholds),
                "monitor": view,
                "history": history,
                "samples": list(guard.rejected),
                "waiting": guard.batcher.waiting,
                "ready": self._process.is_ready,
                "memory": self._memory(),
                "examples": examples,
            },
            headers=guard_header(guard),
        )

    def _memory(self) -> dict[str, int]:
        return {
            "budget": self._process.budget.total,
            "used": self._process.budget.used,
            "most_used": self._process.budget.most_used,
            "process": resident_memory(),
        }

    async def metrics(self, request: Request) -> Response:
        """Numbers for Prometheus."""
        observed = []
        for guard in self._process.guards.loaded():
            if guard.watch is not None:
                waiting = guard.batcher.waiting
                is_ready = guard.is_ready and self._process.is_ready
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
        text = await loop.run_in_executor(self._process.counting, exposition, observed, gauges)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


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
    return (_ASSETS / name).read_text(encoding="utf-8")


def _examples() -> list[dict[str, str]]:
    """File and title of each picture that the page of `fdbd demo` offers."""
    found: list[dict[str, str]] = json.loads(_asset("examples/examples.json"))
    return found
