"""What one process of the service has from its start to its end: the guards, the memory and the
threads for its requests, and what runs beside them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fdbd.core.pixels import import_pillow
from fdbd.serve.asked import Asked
from fdbd.serve.guards import Guards
from fdbd.serve.images import ImageDecoder
from fdbd.serve.memory import MemoryBudget, budget_of_process
from fdbd.serve.settings import Settings

_LAST_UPLOADS_SECONDS = 2.0
"""How long bodies may still arrive once the service is told to end."""
_LOOK_AFTER_SECONDS = 0.5
_LONGEST_IMAGE = 10
"""Times the timeout: an image is bounded in its pixels, so that its decoding ends, if late."""


class ServingProcess:
    """The state that all requests of a process share.

    Args:
        keeps_small: whether a small copy of each image is kept until it is decided.
    """

    def __init__(self, guards: Guards, settings: Settings, *, keeps_small: bool) -> None:
        self.guards = guards
        self.settings = settings
        self.is_started = False
        self.is_ending = False
        self.under_way: set[Asked] = set()
        """The requests that are being answered."""
        self.changed: Callable[[str, bool], object] = lambda name, is_loaded: None
        """Called with the name of a guard and whether it is loaded, after a request loaded or
        unloaded it, so that other processes follow."""
        self.at_start: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """What else runs while the service does."""
        self.at_end: list[Callable[[], object]] = []
        """What has to be stopped at the end; called in a thread."""
        self._background: set[asyncio.Task[None]] = set()
        self._keeps_small = keeps_small
        # Replaced in `begin`, once the guards are loaded and it is known what they take.
        self.budget = MemoryBudget(0)
        self.decoder = self._new_decoder()
        self.explaining = ThreadPoolExecutor(1, "fdbd-explain")
        self.counting = ThreadPoolExecutor(1, "fdbd-metrics")

    async def begin(self) -> None:
        """Load the guards and begin to answer. Called by the lifespan protocol, or before it by a
        server that wants to see the error."""
        if self.is_started:
            return
        for name in self.guards.names:
            await self.guards.load(name)
        if any(guard.backend.preprocess is not None for guard in self.guards.loaded()):
            # Its decoders, so that no request waits for their import.
            import_pillow().preinit()
        self.budget = budget_of_process(self.settings.memory)
        self.decoder = self._new_decoder()
        self.spawn(self._look_after())
        for work in self.at_start:
            self.spawn(work())
        self.is_started = True

    async def end(self) -> None:
        """Answer what was taken, and stop."""
        self.begin_to_end()
        for task in list(self._background):
            task.cancel()
        await self.guards.stop()
        self.decoder.stop()
        self.explaining.shutdown(wait=False, cancel_futures=True)
        self.counting.shutdown(wait=False, cancel_futures=True)
        for stop in self.at_end:
            await asyncio.to_thread(stop)

    def _new_decoder(self) -> ImageDecoder:
        return ImageDecoder(
            self.budget,
            threads=self.settings.decoders,
            max_pixels=self.settings.max_pixels,
            keep_small=self._keeps_small,
        )

    def begin_to_end(self) -> None:
        """Be ready no more; called when the process is told to end, before the server closes."""
        self.is_ending = True

    @property
    def is_answering(self) -> bool:
        """Whether the process has started and was not told to end."""
        return self.is_started and not self.is_ending

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered: no guard has failed on its latest batch or is late."""
        if not self.is_answering:
            return False
        return all(guard.is_ready for guard in self.guards.loaded())

    @property
    def is_alive(self) -> bool:
        """Whether the process is worth keeping: false once a model has been at one batch, or no
        image could be decoded, for twice the time that a request may take; or a single image for
        far longer."""
        longest = self.decoder.stuck_for
        for guard in self.guards.loaded():
            longest = max(longest, guard.batcher.running_for)
        if self.decoder.longest_running > _LONGEST_IMAGE * self.settings.timeout:
            return False
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
        for asked in list(self.under_way):
            if not asked.service_is_ending and (is_hopeless or not asked.has_whole_body):
                asked.service_is_ending = True
                asked.deadline.move_closer(soon)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something in the background until it ends or the service does."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
