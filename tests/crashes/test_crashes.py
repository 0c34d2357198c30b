"""Whatever a program writes survives a crash at any call: `harness.py` tries every one."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILER = shutil.which("cc") or shutil.which("gcc")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        sys.platform != "linux", reason="the faults are preloaded, which is Linux's"
    ),
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler for the preloaded library"),
]
NEEDS = {
    "score_parquet": "pyarrow",
    "score_csv": "pyarrow",
    "score_folder": "pyarrow",
    "gallery": "jinja2",
    "report": "jinja2",
    "export_onnx": "onnxscript",
    "export_int8": "onnxruntime",
    "export_openvino": "openvino",
}
EVERY = {"train": 3, "export_int8": 4}
"""Operations of some seconds are tried at every third call or so."""
SPARSE = int(os.environ.get("CRASH_EVERY", "1"))
"""Set to n, every n-th of these calls is tried: a quick look."""


def operations() -> list[str]:
    """Names in operations.py, which only the preloaded process can import."""
    tree = ast.parse((HERE / "operations.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "OPERATIONS":
            assert isinstance(node.value, ast.Dict)
            return [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
    raise AssertionError("operations.py has no OPERATIONS")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("interposer") / "interposer.so"
    source = HERE / "interposer.c"
    command = [str(COMPILER), "-O1", "-shared", "-fPIC", "-o", str(path), str(source), "-ldl"]
    subprocess.run([*command, "-lpthread"], check=True)
    return path


def findings(library: Path, home: Path, operation: str, *options: str) -> list[str]:
    """What the harness found, and that it tried something."""
    environment = dict(os.environ)
    environment |= {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "FDBD_CACHE": str(home)}
    done = subprocess.run(
        [sys.executable, str(HERE / "harness.py"), operation, *options],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"operation')]
    assert json.loads(lines[-1])["tries"] > 0
    return lines[:-1]


@pytest.mark.parametrize("operation", operations())
def test_a_crash_at_any_call_leaves_the_old_or_the_new_output_and_the_next_run_ends_well(
    operation: str, library: Path, tmp_path: Path
) -> None:
    if operation in NEEDS:
        pytest.importorskip(NEEDS[operation])
    every = str(EVERY.get(operation, 1) * SPARSE)
    assert not findings(library, tmp_path, operation, "--every", every)


@pytest.mark.parametrize("operation", ["score_parquet", "score_csv"])
def test_folders_may_be_emptied_in_any_order(operation: str, library: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    options = ("--backwards", "--modes", "kill,fail", "--every", str(SPARSE))
    assert not findings(library, tmp_path, operation, *options)


@pytest.mark.parametrize("fault", ["in place", "without its own check"])
def test_the_harness_finds_an_operation_that_is_not_safe(
    fault: str, library: Path, tmp_path: Path
) -> None:
    """A harness that finds nothing anywhere would prove nothing."""
    name = {"in place": "unsafe_in_place", "without its own check": "unsafe_draft"}[fault]
    assert findings(library, tmp_path, name)
