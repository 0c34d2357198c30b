"""Guards that are loaded again while the service runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fdbd.serve.guards import Guards, ServedGuard
from fdbd.serve.settings import Settings
from fdbd.serve.state_store import FolderStore
from fdbd.serve.torch_backend import TorchBackend
from fdbd.serve.watch import Watch


class Failing(TorchBackend):
    """A guard whose file is read, and whose model fails."""

    def decide(self, rows):
        raise RuntimeError("the model fails")


def samples_saved(folder: Path) -> int:
    return sum(state["snapshot"]["samples"] for state in FolderStore(folder).states())


@pytest.mark.parametrize("what", ["guard", "shadow"])
def test_a_guard_that_does_not_work_leaves_the_old_one_as_it_was(
    features, feature_guard, tmp_path: Path, what: str
) -> None:
    failing = Failing.__new__(Failing)
    failing.__dict__.update(features.__dict__)
    loads = 0

    def load() -> ServedGuard:
        nonlocal loads
        loads += 1
        is_first = loads == 1
        backend = failing if what == "guard" and not is_first else features
        guard = ServedGuard("guard", backend, Settings(), Watch(backend, FolderStore(tmp_path)))
        if what == "shadow" and not is_first:
            guard.shadow = ServedGuard("shadow", failing, Settings())
        return guard

    async def ask() -> None:
        guards = Guards({"guard": load})
        before = await guards.load("guard")
        with pytest.raises(ValueError, match="fails on a plain batch"):
            await guards.load("guard")
        assert guards.get("guard") is before
        await before.batcher.submit(features.trial_rows(3))
        for _ in range(100):
            if samples_saved(tmp_path) == 3:
                break
            await asyncio.sleep(0.1)
        # What it counts is still saved.
        assert samples_saved(tmp_path) == 3
        await guards.stop()

    asyncio.run(ask())
