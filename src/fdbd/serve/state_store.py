"""Where the processes of a service keep their states, so that each can see all and a restart finds
them."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from pathlib import Path
from typing import Any

from fdbd.util import files

log = logging.getLogger("fdbd.serve")

State = dict[str, Any]
"""The state of one process, as JSON takes it, with the number of its slot."""
MAX_STATE_BYTES = 64 * 1024**2
"""A state is a few megabytes at most; a larger file was not written by a service."""


class Store:
    """Where processes put their states. In this one there is a single process, and nothing is kept
    when it ends."""

    def __init__(self) -> None:
        self._acknowledged: State = {}

    def claim(self) -> int:
        """A slot that no living process has, for as long as this process lives."""
        return 0

    def release(self) -> None:
        """Give the slot back."""

    def put(self, slot: int, state: State) -> None:
        """Keep a state, whole or not at all. Called once per second."""

    def states(self) -> list[State]:
        """What was last put into each slot."""
        return []

    def is_taken(self, slot: int) -> bool:
        """Whether there is a state in this slot, readable or not."""
        return False

    def set_aside(self, slot: int) -> str:
        """Put away a state that does not belong to this service; returns where it is now."""
        return "nowhere"

    def acknowledge(self, record: State) -> None:
        """Note that somebody has seen the alarm: `time` and `note`."""
        self._acknowledged = record

    def acknowledged(self) -> State:
        """The latest acknowledgement; empty if there is none."""
        return self._acknowledged


class FolderStore(Store):
    """Slots as files of a folder that the processes of one machine share."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._held = contextlib.ExitStack()
        self._last: State = {}

    def claim(self) -> int:
        slot = 0
        while not self._lock(slot):
            slot += 1
        return slot

    def _lock(self, slot: int) -> bool:
        lock = files.lock(self.folder / f"slot-{slot}.lock", wait=False)
        # None: this system has no locks.
        return self._held.enter_context(lock) is not False

    def release(self) -> None:
        self._held.close()

    def put(self, slot: int, state: State) -> None:
        # An idle service leaves the disk alone.
        if state != self._last:
            files.write_json(self._file(slot), state)
            self._last = state

    def states(self) -> list[State]:
        found = []
        for path in sorted(self.folder.glob("slot-*.json")):
            state = read_state(path)
            # A state under another's name would be taken for that one's.
            if state is not None and path == self._file(state.get("slot")):
                found.append(state)
        return found

    def is_taken(self, slot: int) -> bool:
        return self._file(slot).exists()

    def set_aside(self, slot: int) -> str:
        moment = time.strftime("%Y%m%d-%H%M%S")
        place = self.folder / f"aside-{moment}-slot-{slot}.json"
        with contextlib.suppress(FileNotFoundError):
            self._file(slot).replace(place)
        return str(place)

    def acknowledge(self, record: State) -> None:
        files.write_json(self.folder / "acknowledged.json", record)

    def acknowledged(self) -> State:
        return read_state(self.folder / "acknowledged.json") or {}

    def _file(self, slot: object) -> Path:
        return self.folder / f"slot-{slot}.json"


def read_state(path: Path) -> State | None:
    """The JSON object in a file; None if there is none or it is damaged."""
    try:
        # A FIFO would be waited for.
        if not path.is_file() or path.stat().st_size > MAX_STATE_BYTES:
            return None
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
