"""Files that released versions wrote load for ever, and answer as they did when they were written."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fdbd

FOLDER = Path(__file__).parent / "artifacts" / "0.1.0"
EXPECTED = load_file(FOLDER / "expected.safetensors")
FEATURES = sorted({name.split("/")[0] for name in EXPECTED if "/" in name and not name.startswith("images")})
IMAGES = sorted({name.split("/")[0] for name in EXPECTED if "/" in name and name.startswith("images")})


def assert_as_written(name: str, decision: fdbd.Decision) -> None:
    assert torch.equal(decision.labels, EXPECTED[f"{name}/labels"])
    assert torch.equal(decision.is_ood, EXPECTED[f"{name}/is_ood"])
    torch.testing.assert_close(decision.scores, EXPECTED[f"{name}/scores"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(decision.p_values, EXPECTED[f"{name}/p_values"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", FEATURES)
def test_a_guard_of_features_decides_as_when_it_was_written(name: str) -> None:
    guard = fdbd.load(FOLDER / f"{name}.safetensors")
    assert_as_written(name, guard.decide(fdbd.Batch(EXPECTED["probe"])))


@pytest.mark.parametrize("name", IMAGES)
def test_a_guard_of_images_decides_as_when_it_was_written(name: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.ReLU(),
        nn.Linear(6, 4),
    ).eval()
    model.load_state_dict(load_file(FOLDER / "model-weights.safetensors"))
    decision = fdbd.load(FOLDER / f"{name}.safetensors", model)(EXPECTED["images"])
    assert_as_written(name, decision)
    torch.testing.assert_close(decision.logits, EXPECTED[f"{name}/logits"])


def test_a_monitor_goes_on_where_it_was_saved() -> None:
    monitor = fdbd.Monitor.load(FOLDER / "monitor.safetensors", fdbd.load(FOLDER / "monitored.safetensors"))
    saved = json.loads((FOLDER / "monitor-snapshot.json").read_text())
    snapshot = monitor.snapshot()
    for key, value in saved.items():
        if isinstance(value, float):
            assert math.isclose(snapshot[key], value, rel_tol=1e-6), key
        else:
            assert snapshot[key] == value or list(snapshot[key]) == value, key


def test_an_onnx_graph_decides_as_when_it_was_written() -> None:
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(FOLDER / "guard.onnx"))
    guard = fdbd.load(FOLDER / "monitored.safetensors")
    decision = guard.decide(fdbd.Batch(EXPECTED["probe"]))
    answers = session.run(["score", "is_ood"], {session.get_inputs()[0].name: EXPECTED["probe"].numpy()})
    torch.testing.assert_close(torch.from_numpy(answers[0]), decision.scores, rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.from_numpy(answers[1]), decision.is_ood)
