"""What macOS or Windows lack, taken away here: the library does its work without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

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
    assert is_held                                         # by a file alone
print("done")
"""


def test_a_guard_is_fitted_saved_and_loaded_without_fork_locks_and_affinity(tmp_path: Path) -> None:
    settings = {**os.environ, "PYTHONPATH": str(Path(fdbd.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=settings,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["guard.safetensors"]


def test_without_a_pipe_for_signals_an_interrupt_still_has_its_word(monkeypatch, capsys) -> None:
    monkeypatch.setattr(os, "name", "nt")
    with pytest.raises(KeyboardInterrupt), terminal.answer_interrupts("stopped; run it again"):
        raise KeyboardInterrupt
    monkeypatch.undo()
    assert capsys.readouterr().err == "stopped; run it again\n"


def test_several_workers_are_refused_if_processes_share_no_socket(monkeypatch) -> None:
    run = pytest.importorskip("fdbd.serve.run")
    monkeypatch.setattr(os, "name", "nt")
    with pytest.raises(ValueError, match="use --workers 1"):
        run.run(run.Service("guard.safetensors", workers=2), "127.0.0.1", 0)


def test_a_file_that_cannot_be_replaced_stays_and_the_command_says_so(
    tmp_path, monkeypatch, run
) -> None:
    """Windows does not replace a file that another program has open."""
    generator = np.random.default_rng(0)
    np.savez(tmp_path / "head.npz", weight=generator.standard_normal((3, 5)), bias=np.zeros(3))
    for name in ("train", "fresh"):
        np.savez(tmp_path / name, features=generator.standard_normal((100, 5)).astype(np.float32))
    (tmp_path / "guard.safetensors").write_text("open elsewhere")

    def refuse(source: object, target: object) -> None:
        raise PermissionError(13, "Access is denied", str(source), None, str(target))

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.chdir(tmp_path)
    code, _, err = run("fit", "train.npz", "--head", "head.npz", "--calibration", "fresh.npz")
    assert code == 2
    assert "Access is denied" in err.splitlines()[-1]
    assert (tmp_path / "guard.safetensors").read_text() == "open elsewhere"
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.slow
def test_images_are_decoded_by_processes_that_are_spawned(tmp_path) -> None:
    """macOS and Windows do not fork."""
    image = pytest.importorskip("PIL.Image")
    generator = np.random.default_rng(0)
    for name in ("train", "fresh"):
        for number in range(40):
            path = tmp_path / name / str(number % 10) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.fromarray(generator.integers(0, 255, (32, 32, 3), np.uint8)).save(path)
    code = (
        "import multiprocessing as m, sys; m.set_start_method(sys.argv.pop(1)); from fdbd import"
        " cli; cli.main()"
    )
    fit = ["fit", "cifar10-ce", "train", "--calibration", "fresh", "--workers", "2", "--out"]
    settings = {**os.environ, "PYTHONPATH": str(Path(fdbd.__file__).parents[1])}
    for method in ("fork", "spawn"):
        program = [sys.executable, "-c", code, method, *fit, f"{method}.safetensors"]
        done = subprocess.run(
            program, capture_output=True, text=True, cwd=tmp_path, env=settings, check=False
        )
        assert done.returncode == 0, done.stderr
    forked = fdbd.load(tmp_path / "fork.safetensors")
    spawned = fdbd.load(tmp_path / "spawn.safetensors")
    assert forked.threshold is not None
    assert spawned.threshold is not None
    assert torch.equal(forked.threshold.value, spawned.threshold.value)
