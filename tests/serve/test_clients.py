"""The service asked by the clients that people have: Triton's and KServe's own."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
import torch

import fdbd
from fdbd.serve.backend import Backend

pytestmark = pytest.mark.slow
CLIENTS = ("tritonclient[http]", "kserve")
SCRIPT = Path(__file__).with_name("ask_with_clients.py")


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has the clients: this one, or one in an environment that is built once
    and kept."""
    probe = "import kserve, tritonclient.http"
    if subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode == 0:
        return sys.executable
    cache = getattr(request.config, "cache", None)
    folder = tmp_path_factory.mktemp("clients") if cache is None else cache.mkdir("clients")
    own = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not own.exists() or subprocess.run([own, "-c", probe], capture_output=True).returncode:
        venv.create(folder, with_pip=True)
        built = subprocess.run(
            [own, "-m", "pip", "install", "-q", *CLIENTS], capture_output=True, text=True
        )
        if built.returncode:
            pytest.skip(
                f"needs {' and '.join(CLIENTS)}, which cannot be installed:"
                f" {built.stderr.strip()[-200:]}"
            )
    return str(own)


@pytest.fixture(params=["torch features", "torch images", "onnx features"])
def backend(request: pytest.FixtureRequest, feature_guard: fdbd.Guard, tmp_path: Path) -> Backend:
    if request.param != "onnx features":
        found: Backend = request.getfixturevalue(request.param.partition(" ")[2])
        return found
    for module in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(module)
    from fdbd.serve.backend import OnnxBackend

    feature_guard.export_onnx(tmp_path / "guard.onnx", fdbd.Batch(torch.randn(3, 6)))
    return OnnxBackend(tmp_path / "guard.onnx")


def test_the_clients_of_triton_and_kserve_get_the_guards_own_answers(
    backend, python, serving, tmp_path
) -> None:
    rows = np.random.default_rng(0).normal(size=(5, *backend.row_shape)).astype(np.float32)
    np.save(tmp_path / "rows.npy", rows)
    command = [
        python,
        SCRIPT,
        serving(backend).removeprefix("http://"),
        backend.input_name,
        tmp_path / "rows.npy",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    expected = dict(zip(("logits", "label", "score", "p_value", "is_ood"), backend.decide(rows)))
    for client in ("triton", "kserve"):
        assert found[client]["ready"] is True
        for is_binary in (True, False):
            for output, values in found[client][f"binary={is_binary}"].items():
                np.testing.assert_allclose(
                    values, expected[output], rtol=1e-5, err_msg=f"{client} {output}"
                )
    asked = found["triton"]
    assert asked["server"] == "fdbd"
    assert asked["inputs"] == [
        {"name": backend.input_name, "datatype": "FP32", "shape": [-1, *backend.row_shape]}
    ]
    assert asked["outputs"] == list(expected)
    assert asked["id, binary=True"] == asked["id, binary=False"] == "7"
    assert "there is no input 'other'" in asked["refusal"]
