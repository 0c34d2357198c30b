"""An exported guard behind the service: the guard's own answers, without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fdbd
from fdbd.serve.backend import OnnxBackend

for module in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(module)


@pytest.fixture(scope="module")
def graph(feature_guard: fdbd.Guard, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "guard.onnx"
    feature_guard.export_onnx(path, fdbd.Batch(torch.randn(3, 6)))
    return path


def test_the_graph_answers_as_the_guard_and_knows_its_calibration(
    graph: Path, feature_guard: fdbd.Guard
) -> None:
    backend = OnnxBackend(graph)
    rows = torch.randn(7, 6)
    rows[3, 2] = torch.nan
    answers = backend.decide(rows.numpy())
    decision = feature_guard.decide(fdbd.Batch(rows))
    np.testing.assert_allclose(answers.scores, decision.scores, rtol=1e-4)
    assert answers.is_ood.tolist() == decision.is_ood.tolist()
    assert feature_guard.threshold is not None
    np.testing.assert_array_equal(
        backend.calibration, np.sort(feature_guard.threshold.calibration.double().numpy())
    )
    assert backend.promise == feature_guard.threshold.guarantee
    assert backend.row_shape == (6,)


def test_serving_a_graph_imports_no_torch(graph: Path) -> None:
    code = (
        "import sys\n"
        "from starlette.testclient import TestClient\n"
        "from fdbd.serve.run import Service, application\n"
        f"app = application(Service({{'guard': {str(graph)!r}}}))\n"
        "with TestClient(app, base_url='http://127.0.0.1') as client:\n"
        "    answer = client.post('/decide', json={'features': [[0.1] * 6]})\n"
        "    assert answer.status_code == 200, answer.text\n"
        "    assert client.get('/metrics').status_code == 200\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_graph_without_calibration_scores_says_what_to_do() -> None:
    old = Path(__file__).parents[1] / "artifacts" / "0.1.0" / "guard.onnx"
    with pytest.raises(ValueError, match="export it again"):
        OnnxBackend(old)


def test_what_is_no_graph_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not an ONNX file that can be served"):
        OnnxBackend(tmp_path / "x.onnx")
