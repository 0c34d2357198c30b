"""Past findings stay repaired, and a few seconds of new inputs find nothing; `make fuzz` looks
longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NEEDS = {
    "parquet": "pyarrow",
    "inference-request": "onnxruntime",
    "image": "PIL",
    "service-state": "onnxruntime",
}
TARGETS = [
    "guard", "guard-description", "monitor-description", "results", "npz", "parquet", "config",
    "inference-request", "image", "service-state",
]  # fmt: skip

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")


def fuzz(target: str, folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "fuzz.py"), target, *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


@pytest.mark.parametrize("target", sorted(path.name for path in (HERE / "corpus").iterdir()))
def test_past_findings_end_in_a_result_or_a_clear_error_within_their_bounds(
    target: str, tmp_path: Path
) -> None:
    pytest.importorskip(NEEDS.get(target, "fdbd"))
    done = fuzz(target, tmp_path, *sorted((HERE / "corpus" / target).iterdir()))
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_twenty_seconds_of_random_changes_find_nothing(target: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(target, "fdbd"))
    done = fuzz(target, tmp_path, "--random", "--seconds", 20)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split(":")[1].split()[0]) > 20, done.stdout


def test_every_target_is_fuzzed() -> None:
    text = (HERE / "targets.py").read_text(encoding="utf-8")
    block = text.split("TARGETS: dict")[1]
    assert all(f'"{name}": Target(' in block for name in TARGETS)
    assert block.count(": Target(") == len(TARGETS)
