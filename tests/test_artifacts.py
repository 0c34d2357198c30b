"""Files that released versions wrote load for ever, and answer as they did when they were written."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fdbd

RELEASES = sorted(
    folder for folder in (Path(__file__).parent / "artifacts").iterdir() if folder.is_dir()
)
EXPECTED = {folder: load_file(folder / "expected.safetensors") for folder in RELEASES}


def guards(of_images: bool) -> list:
    """Each guard of each release, by its folder and name."""
    found = []
    for folder, tensors in EXPECTED.items():
        names = {key.split("/")[0] for key in tensors if "/" in key}
        for name in sorted(names):
            if name.startswith("images-") == of_images:
                found.append(pytest.param(folder, name, id=f"{folder.name}-{name}"))
    return found


def assert_as_written(folder: Path, name: str, decision: fdbd.Decision) -> None:
    expected = {
        key.split("/")[1]: value
        for key, value in EXPECTED[folder].items()
        if key.startswith(f"{name}/")
    }
    assert torch.equal(decision.labels, expected["labels"])
    assert torch.equal(decision.is_ood, expected["is_ood"])
    torch.testing.assert_close(decision.scores, expected["scores"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(decision.p_values, expected["p_values"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("folder", "name"), guards(of_images=False))
def test_a_guard_of_features_decides_as_when_it_was_written(folder: Path, name: str) -> None:
    guard = fdbd.load(folder / f"{name}.safetensors")
    assert_as_written(folder, name, guard.decide(fdbd.Batch(EXPECTED[folder]["probe"])))


@pytest.mark.parametrize(("folder", "name"), guards(of_images=True))
def test_a_guard_of_images_decides_as_when_it_was_written(folder: Path, name: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.ReLU(),
        nn.Linear(6, 4),
    ).eval()
    model.load_state_dict(load_file(folder / "model-weights.safetensors"))
    decision = fdbd.load(folder / f"{name}.safetensors", model)(EXPECTED[folder]["images"])
    assert_as_written(folder, name, decision)
    torch.testing.assert_close(decision.logits, EXPECTED[folder][f"{name}/logits"])


@pytest.mark.parametrize("folder", RELEASES, ids=lambda folder: folder.name)
def test_a_monitor_goes_on_where_it_was_saved(folder: Path) -> None:
    monitor = fdbd.Monitor.load(
        folder / "monitor.safetensors", fdbd.load(folder / "monitored.safetensors")
    )
    saved = json.loads((folder / "monitor-snapshot.json").read_text())
    snapshot = monitor.snapshot()
    for key, value in saved.items():
        if isinstance(value, float):
            assert math.isclose(snapshot[key], value, rel_tol=1e-6), key
        else:
            assert snapshot[key] == value or list(snapshot[key]) == value, key


@pytest.mark.parametrize("folder", RELEASES, ids=lambda folder: folder.name)
def test_an_onnx_graph_decides_as_when_it_was_written(folder: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(folder / "guard.onnx"))
    guard = fdbd.load(folder / "monitored.safetensors")
    probe = EXPECTED[folder]["probe"]
    decision = guard.decide(fdbd.Batch(probe))
    answers = session.run(["score", "is_ood"], {session.get_inputs()[0].name: probe.numpy()})
    torch.testing.assert_close(torch.from_numpy(answers[0]), decision.scores, rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.from_numpy(answers[1]), decision.is_ood)
