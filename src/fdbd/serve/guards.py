"""The guards that one process serves, by name: each with its batches, its watch and its shadow."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request

from fdbd.serve.asked import asked_of
from fdbd.serve.backend import Answers, Backend, Rows
from fdbd.serve.batching import Batcher
from fdbd.serve.inference_protocol import VERSION
from fdbd.serve.settings import Settings
from fdbd.serve.watch import Watch

log = logging.getLogger("fdbd.serve")

_STOP_SECONDS = 5.0
"""How long a guard that is unloaded, or ends with the service, may still answer."""


class ServedGuard:
    """One guard: its backend behind micro-batches.

    Args:
        watch: counts; None for a shadow, whose guard counts for it.
    """

    def __init__(
        self, name: str, backend: Backend, settings: Settings, watch: Watch | None = None
    ) -> None:
        self.name = name
        self.backend = backend
        self.watch = watch
        self.shadow: ServedGuard | None = None
        self.rejected: deque[dict[str, Any]] = deque(maxlen=settings.samples)
        """The latest rejected images, for the page."""
        self.pending_for_shadow = 0
        """Requests that the shadow still has to decide."""
        self._size = settings.batch_size
        self.batcher = Batcher(
            backend.decide,
            size=settings.batch_size,
            delay=settings.delay,
            capacity=max(settings.queue, settings.batch_size),
            patience=settings.timeout,
            enter=backend.enter,
            observe=self._observe,
        )

    def _observe(self, answers: Answers, seconds: float) -> None:
        if self.watch is not None:
            self.watch.count(answers, seconds)

    async def try_out(self) -> None:
        """Begin to answer, once the guard has decided a full batch: so it is known to work, and how
        much memory it takes. ValueError if it does not work, or its shadow does not."""
        self.batcher.start()
        await self.batcher.try_model(self._trial_rows(self._size))
        if self.batcher.is_failing:
            await self.stop()
            raise ValueError(f"the guard {self.name!r} fails on a plain batch; the log says why")
        if self.shadow is not None:
            try:
                await self.shadow.try_out()
            except ValueError:
                await self.stop()
                raise

    async def begin_to_watch(self) -> None:
        """Count from now on, and go on from what an earlier process has saved."""
        if self.watch is not None:
            await asyncio.to_thread(self.watch.start)

    async def stop(self, seconds: float = _STOP_SECONDS) -> None:
        """Answer what was taken and save what was seen."""
        await self.batcher.stop(seconds)
        if self.watch is not None:
            await asyncio.to_thread(self.watch.stop)
        if self.shadow is not None:
            await self.shadow.stop(seconds)

    @property
    def is_ready(self) -> bool:
        """Whether the latest batch succeeded and none is late."""
        return not self.batcher.is_stuck and not self.batcher.is_failing

    async def look_after(self) -> None:
        """Try a model that has failed: without requests nobody else would notice that it works
        again."""
        if self.batcher.is_failing and not self.batcher.running_for:
            await self.batcher.try_model(self._trial_rows(1))

    def class_name(self, label: int) -> str | None:
        """The name of a class; None if the guard does not know names."""
        names = self.backend.class_names
        return names[label] if names else None

    def _trial_rows(self, count: int) -> Rows:
        """Rows that nobody asked about."""
        return self.backend.trial_rows(count)


@dataclass
class Entry:
    """A guard that can be served, whether it is loaded or not."""

    load: Callable[[], ServedGuard]
    guard: ServedGuard | None = None
    reason: str = ""
    """Why it is not loaded."""
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)


class Guards:
    """Guards by name; the first is the one that `/decide` asks if none is named.

    Args:
        loaders: for each name, what builds the guard. Called in a thread.
    """

    def __init__(self, loaders: dict[str, Callable[[], ServedGuard]]) -> None:
        self._entries = {name: Entry(load) for name, load in loaders.items()}

    @property
    def names(self) -> list[str]:
        """Of all guards, loaded or not."""
        return list(self._entries)

    @property
    def default(self) -> str:
        """The name of the guard that is asked if none is named."""
        return self.names[0]

    def loaded(self) -> list[ServedGuard]:
        """The guards that answer now."""
        return [entry.guard for entry in self._entries.values() if entry.guard is not None]

    def get(self, name: str) -> ServedGuard:
        """A guard that is loaded; HTTPException 404 or 503 if there is none of this name."""
        entry = self._entry(name)
        if entry.guard is None:
            reason = entry.reason or "it was not loaded yet"
            raise HTTPException(
                503, f"the guard {name!r} is not loaded: {reason}", {"retry-after": "5"}
            )
        return entry.guard

    def index(self) -> list[dict[str, str]]:
        """All guards, as the protocol's repository index lists them."""
        found = []
        for name, entry in self._entries.items():
            state = "UNAVAILABLE" if entry.guard is None else "READY"
            if entry.guard is not None and not entry.guard.is_ready:
                state = "UNAVAILABLE"
            found.append({"name": name, "version": "1", "state": state, "reason": entry.reason})
        return found

    async def load(self, name: str) -> ServedGuard:
        """Load a guard from its file, also one that is loaded: its file may have changed. The old
        one answers until the new one does."""
        entry = self._entry(name)
        async with entry.busy:
            old = entry.guard
            guard = await _in_new_thread(entry.load)
            await guard.try_out()
            if old is not None and old.watch is not None:
                # Both have the same slot of the monitor's state.
                await asyncio.to_thread(old.watch.stop)
            await guard.begin_to_watch()
            entry.guard = guard
            entry.reason = ""
            if old is not None:
                await old.stop()
        log.info({"guard": guard.backend.id, "name": name, "message": "loaded"})
        return guard

    async def unload(self, name: str) -> None:
        """Answer no more with a guard."""
        entry = self._entry(name)
        async with entry.busy:
            guard = entry.guard
            entry.guard = None
            entry.reason = "it was unloaded"
            if guard is not None:
                await guard.stop()
        log.info({"name": name, "message": "unloaded"})

    async def stop(self) -> None:
        """End all guards."""
        guards = self.loaded()
        await asyncio.gather(*(guard.stop() for guard in guards))

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise HTTPException(404, f"there is no guard {name[:80]!r} here")
        return self._entries[name]


async def _in_new_thread(load: Callable[[], ServedGuard]) -> ServedGuard:
    """Load in a thread that ends: OpenMP's threads of one that stays would slow down those of the
    thread that decides."""
    with ThreadPoolExecutor(1, "fdbd-load") as loading:
        future = loading.submit(load)
        found = await asyncio.wrap_future(future)
    return found


def named_guard(request: Request, guards: Guards) -> ServedGuard:
    """The guard that the address names by `?guard=…`, or the first."""
    return _asked_guard(request, guards, request.query_params.get("guard", guards.default))


def guard_of_model(request: Request, guards: Guards) -> ServedGuard:
    """The guard that a path of the Open Inference Protocol names."""
    guard = _asked_guard(request, guards, request.path_params["model"])
    version = request.path_params.get("version", VERSION)
    if version != VERSION:
        raise HTTPException(404, f"there is no version {version[:20]!r}, only {VERSION}")
    return guard


def _asked_guard(request: Request, guards: Guards, name: str) -> ServedGuard:
    # Noted before it is known whether the guard is loaded, so that a refusal is counted as its own.
    asked_of(request.scope).guard = name
    return guards.get(name)


def guard_header(guard: ServedGuard) -> dict[str, str]:
    """The header that tells a client which guard has answered."""
    return {"x-fdbd-guard": guard.backend.id}


def record_of(
    guard: ServedGuard, answers: Answers, row: int, request: str, sha256: str
) -> dict[str, Any]:
    """One decision as it is recorded."""
    label = int(answers.labels[row])
    score = float(answers.scores[row])
    found = {
        "time": round(time.time(), 3),
        "request": request,
        "row": row,
        "guard": guard.backend.id,
        "name": guard.name,
        "label": label,
        "class": guard.class_name(label),
        "score": score if np.isfinite(score) else None,
        "p_value": float(answers.p_values[row]),
        "is_ood": bool(answers.is_ood[row]),
        "input_sha256": sha256,
    }
    if answers.ood_shares is not None:
        found["ood_share"] = float(answers.ood_shares[row])
    return found
