"""A guard in 8 bits and for OpenVINO: decisions are the guard's own, or no file is written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fdbd
from fdbd import export as deploy
from fdbd.export.onnx import ExportError, metadata
from fdbd.serve.backend import OnnxBackend

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

from fdbd.export.int8 import export_int8


def data(rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    level = torch.rand(rows, 3, 1, 1, generator=generator)
    return 4 * level * torch.rand(rows, 3, 8, 8, generator=generator)


@pytest.fixture(scope="module")
def guard() -> fdbd.Guard:
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 12, 3)
    model = nn.Sequential(
        first,
        nn.BatchNorm2d(8),
        nn.ReLU(),
        second,
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 4),
    )
    return fdbd.Guard(model.eval()).fit([data(300, 0)]).calibrate([data(400, 1)], alpha=0.1)


def test_the_graph_in_8_bits_is_calibrated_by_its_own_scores(
    guard: fdbd.Guard, tmp_path: Path
) -> None:
    calibration = [data(150, 2), data(150, 3)]
    shift = export_int8(guard, tmp_path / "g.onnx", data(4, 4), calibration, disagreement=0.3)
    backend, about = OnnxBackend(tmp_path / "g.onnx"), metadata(tmp_path / "g.onnx")
    kept = torch.cat(calibration)[torch.arange(300) % 5 != 0].numpy()
    answers = backend.decide(kept)
    assert shift.samples == len(kept) == 240
    assert len(backend.calibration) == 240
    np.testing.assert_allclose(np.sort(answers.scores), backend.calibration, rtol=1e-5)
    # 24 of 240 have a p-value of at most 0.1 where (1 + k)/241 ≤ 0.1, so k ≤ 23.
    assert shift.accepted_after == 1 - np.mean(answers.is_ood) == pytest.approx(1 - 23 / 240)
    decision = guard(torch.from_numpy(kept))
    differ = (answers.labels != decision.labels.numpy()) | (
        answers.is_ood != decision.is_ood.numpy()
    )
    assert shift.disagree == differ.mean()
    assert shift.accepted == 1 - decision.is_ood.double().mean().item()
    assert about["int8"] == shift._asdict()
    assert not np.allclose(answers.scores, decision.scores.numpy(), rtol=1e-4), (
        "the network runs in 8 bits"
    )
    broken = kept[:2].copy()
    broken[1, 0, 0, 0] = np.nan
    assert backend.decide(broken).is_ood[1]


def test_a_graph_that_disagrees_more_than_stated_is_not_written(
    guard: fdbd.Guard, tmp_path: Path
) -> None:
    (tmp_path / "g.onnx").write_text("old")
    with pytest.raises(
        ExportError, match=r"more than the 0\.0% that were allowed; no file was written"
    ):
        export_int8(guard, tmp_path / "g.onnx", data(4, 4), [data(200, 5) * 1.2], disagreement=0.0)
    assert (tmp_path / "g.onnx").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["g.onnx"]


def test_openvino_gives_the_guards_decisions(guard: fdbd.Guard, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    from fdbd.export.openvino import export_openvino

    path = export_openvino(guard, tmp_path / "g.xml", data(4, 4), class_names=["a", "b", "c", "d"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["g.bin", "g.xml"]
    core = openvino.Core()
    model = core.read_model(path)
    assert json.loads(model.get_rt_info(["fdbd", "class_names"]).value) == ["a", "b", "c", "d"]
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    rows = data(50, 6)
    rows[3, 0, 0, 0] = torch.nan
    answers, decision = compiled({"images": rows.numpy()}), guard(rows)
    assert answers["is_ood"][3]
    clear = (decision.scores - guard.threshold.value).abs() > 1e-3
    assert clear.sum() > 40
    np.testing.assert_array_equal(answers["is_ood"][clear], decision.is_ood[clear])
    np.testing.assert_allclose(answers["score"][clear], decision.scores[clear], rtol=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--int8"], "--calibration DATA go together"),
        (["--int8", "--calibration", "x", "--features"], "leave --features out"),
        (
            ["--int8", "--calibration", "x", "--out", "g.xml"],
            "'g.xml', and --int8 was given: end it with .onnx,",
        ),
        (["--out", "g.toy"], "--out is 'g.toy': end it with .onnx or .xml,"),
    ],
)
def test_options_that_do_not_go_together_are_one_sentence(
    run, tmp_path, monkeypatch, options, words
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run("export", "guard.safetensors", *options)
    assert (code, err.count("\n")) == (2, 1)
    assert words in err


def test_a_function_in_one_file_is_a_target_of_the_command(
    run, guard: fdbd.Guard, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(deploy, "_TARGETS", dict(deploy._TARGETS))

    @deploy.export_target(".toy")
    def export_toy(
        guard: fdbd.Guard, path: Path, example: torch.Tensor, *, class_names, opset
    ) -> str:
        path.write_text(f"{guard.detector.label} {len(example)} {class_names} {opset}")
        return "is a toy"

    guard.save(tmp_path / "guard.safetensors")
    code, out, _ = run(
        "export", tmp_path / "guard.safetensors", "--features", "--out", tmp_path / "guard.onnx"
    )
    assert code == 0
    assert "MB, opset 18, fdbd, agrees with torch to 1e-4" in " ".join(out.split())
    code, out, _ = run(
        "export", tmp_path / "guard.safetensors", "--features", "--out", tmp_path / "guard.TOY"
    )
    assert code == 0
    assert out.rstrip().endswith("guard.TOY: 0.0 MB, fdbd, is a toy")
    assert (tmp_path / "guard.TOY").read_text() == "fdbd 4 None 18"
