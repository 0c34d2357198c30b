"""Which guards are to be loaded: the processes of a service follow the one that was asked."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from pathlib import Path

from fdbd.serve.guards import Guards
from fdbd.serve.process import ServingProcess
from fdbd.serve.state_store import read_state
from fdbd.util import files

log = logging.getLogger("fdbd.serve")

_SECONDS = 1.0


class Orders:
    """A file in a folder of its own. It holds, for each guard that was loaded or unloaded while the
    service ran, how often that happened and what is wanted now."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._done: dict[str, int] = {}

    @classmethod
    def in_new_folder(cls) -> Orders:
        """Orders of a service that starts now."""
        return cls(tempfile.mkdtemp(prefix="fdbd-serve-"))

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def give(self, name: str, is_loaded: bool) -> None:
        """Have all other processes load a guard, or unload it. The caller has done so itself."""
        path = Path(self.folder, "orders.json")
        with files.lock(path.with_suffix(".lock")):
            orders = read_state(path) or {}
            number = orders.get(name, {}).get("number", 0) + 1
            orders[name] = {"number": number, "loaded": is_loaded}
            files.write_json(path, orders)
        self._done[name] = number

    def follow(self, process: ServingProcess) -> None:
        """Have a process tell what it was ordered, and do what others were, from its start."""
        process.changed = self.give
        process.at_start.append(lambda: self._follow(process.guards))

    async def _follow(self, guards: Guards) -> None:
        path = Path(self.folder, "orders.json")
        while True:
            await asyncio.sleep(_SECONDS)
            for name, order in (read_state(path) or {}).items():
                if order["number"] <= self._done.get(name, 0):
                    continue
                self._done[name] = order["number"]
                try:
                    await _obey(guards, name, order["loaded"])
                except Exception as error:
                    # The process goes on with what it has.
                    log.error("the guard %r could not be loaded: %s", name, error)


async def _obey(guards: Guards, name: str, is_loaded: bool) -> None:
    if is_loaded:
        await guards.load(name)
    else:
        await guards.unload(name)
