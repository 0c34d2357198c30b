"""What macOS or Windows lack, taken away here: the library does its work without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fdbd
from fdbd.util import terminal

PROGRAM = """
import multiprocessing, os, sys
import numpy, torch, scipy.stats, sklearn
sys.modules["fcntl"] = sys.modules["resource"] = None      # importing them fails
for name in ("fork", "forkpty", "register_at_fork", "sched_getaffinity", "sync", "getuid"):
    if hasattr(os, name):
        delattr(os, name)
import fdbd
from pathlib import Path
from fdbd.util.files import lock
torch.manual_seed(0)
head = fdbd.Head(torch.randn(4, 8), torch.zeros(4))
guard = fdbd.Guard(head).fit([fdbd.Batch(torch.randn(200, 8))]).calibrate([fdbd.Batch(torch.randn(200, 8))])
for _ in range(2):                                         # the second time over a file
    guard.save("guard.safetensors")
z = torch.randn(5, 8)
loaded = fdbd.load("guard.safetensors")
assert torch.equal(loaded(fdbd.Batch(z)).is_ood, guard(fdbd.Batch(z)).is_ood)
with lock(Path("lock"), wait=False) as is_held:
    assert is_held is None
print("done")
"""


def test_a_guard_is_fitted_saved_and_loaded_without_fork_locks_and_affinity(tmp_path: Path) -> None:
    settings = {**os.environ, "PYTHONPATH": str(Path(fdbd.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=tmp_path, env=settings, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["guard.safetensors"]


def test_without_a_pipe_for_signals_an_interrupt_still_has_its_word(monkeypatch, capsys) -> None:
    monkeypatch.setattr(os, "name", "nt")
    with pytest.raises(KeyboardInterrupt), terminal.answer_interrupts("stopped; run it again"):
        raise KeyboardInterrupt
    monkeypatch.undo()
    assert capsys.readouterr().err == "stopped; run it again\n"


def test_several_workers_are_refused_where_processes_share_no_socket(monkeypatch) -> None:
    run = pytest.importorskip("fdbd.serve.run")
    monkeypatch.setattr(os, "name", "nt")
    with pytest.raises(ValueError, match="use --workers 1"):
        run.run(run.Service("guard.safetensors", workers=2), "127.0.0.1", 0)
