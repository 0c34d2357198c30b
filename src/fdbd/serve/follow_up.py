"""What follows a decision: its record, the small copies of rejected images, and what the shadow of
the guard makes of the same rows. None of it changes the answer."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdbd.core.pixels import Pixels, thumbnail
from fdbd.serve.asked import Asked
from fdbd.serve.backend import Answers, Rows
from fdbd.serve.decisions import DecisionLog
from fdbd.serve.guards import ServedGuard, record_of
from fdbd.serve.process import ServingProcess
from fdbd.serve.texts import rows_of_texts

log = logging.getLogger("fdbd.serve")

_SHADOW_REQUESTS = 64
"""Requests that wait for the shadow guard at most."""


class FollowUp:
    """Records decisions and compares them with those of shadows.

    Args:
        decisions: where each decision is recorded; None: nowhere.
        thumbnails: whether a record of a rejected image holds a small copy of it.
    """

    def __init__(
        self, process: ServingProcess, decisions: DecisionLog | None, thumbnails: bool
    ) -> None:
        self._process = process
        self._decisions = decisions
        self._thumbnails = thumbnails

    def keep_rejected(
        self, guard: ServedGuard, decision: dict[str, Any], small: Pixels | None
    ) -> None:
        """Keep a rejected image for the page, which shows the latest."""
        if decision["is_ood"] and self._process.settings.samples and small is not None:
            kept = {"time": time.time(), **decision, "image": thumbnail(small)}
            kept.pop("boundaries", None)
            guard.rejected.appendleft(kept)

    def record(
        self,
        asked: Asked,
        guard: ServedGuard,
        answers: Answers,
        content: bytes,
        small: Pixels | None = None,
    ) -> None:
        """Note decisions in the log and, if they are kept, among the records.

        Args:
            small: the small copy of the image, if the request is one image.
        """
        asked.log["guard"] = guard.backend.id
        asked.log["ood"] = int(answers.is_ood.sum())
        if self._decisions is None:
            return
        sha256 = hashlib.sha256(content).hexdigest()
        for row in range(len(answers.labels)):
            record = record_of(guard, answers, row, asked.id, sha256)
            if self._thumbnails and small is not None and record["is_ood"]:
                record["thumbnail"] = thumbnail(small)
            self._decisions.add(record)

    def ask_shadow(
        self,
        asked: Asked,
        guard: ServedGuard,
        answers: Answers,
        rows: Rows,
        content: bytes | None,
        texts: list[str] | None = None,
    ) -> None:
        """Have the shadow decide the same rows, if it keeps up. The answer does not wait for it."""
        shadow = guard.shadow
        if shadow is None:
            return
        if guard.pending_for_shadow >= _SHADOW_REQUESTS:
            _count(guard, "shadow_dropped", len(rows))
            return
        guard.pending_for_shadow += 1
        asked.memory.hold()
        self._process.spawn(
            self._decide_by_shadow(asked, guard, shadow, answers, rows, content, texts)
        )

    async def _decide_by_shadow(
        self,
        asked: Asked,
        guard: ServedGuard,
        shadow: ServedGuard,
        answers: Answers,
        rows: Rows,
        content: bytes | None,
        texts: list[str] | None,
    ) -> None:
        try:
            if texts and shadow.backend.tokenizer != guard.backend.tokenizer:
                rows = await rows_of_texts(texts, shadow.backend, asked, self._process)
            if content is not None and shadow.backend.preprocess != guard.backend.preprocess:
                rows = await self._rows_of_shadow(asked, shadow, content)
            found = await asyncio.wait_for(
                shadow.batcher.submit(rows), self._process.settings.timeout
            )
            disagreements = int((found.is_ood != answers.is_ood).sum())
            _count(guard, "shadow_samples", len(rows))
            _count(guard, "shadow_disagreements", disagreements)
            if self._decisions is not None:
                sha256 = hashlib.sha256(content).hexdigest() if content is not None else ""
                for row in range(len(rows)):
                    record = record_of(shadow, found, row, asked.id, sha256)
                    self._decisions.add({**record, "role": "shadow"})
        except (Exception, asyncio.TimeoutError) as error:
            # Whatever goes wrong with the shadow, the service answers by its guard.
            _count(guard, "shadow_dropped", len(rows))
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
        image = await self._process.decoder.decode(content, preprocess, shape, asked)
        return image.row[None]


def _count(guard: ServedGuard, name: str, number: int) -> None:
    if guard.watch is not None:
        guard.watch.count_event(name, number)
