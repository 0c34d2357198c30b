"""A guard in 8 bits and for OpenVINO: decisions are the guard's own, or no file is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fdbd
from fdbd import export
from fdbd.export.onnx import ExportError, metadata
from fdbd.serve.backend import OnnxBackend

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

from fdbd.export.int8 import Shift, export_int8


def data(rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    level = torch.rand(rows, 3, 1, 1, generator=generator)
    return 4 * level * torch.rand(rows, 3, 8, 8, generator=generator)


@pytest.fixture(scope="module")
def guard() -> fdbd.Guard:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 8, 3)
    second = nn.Conv2d(8, 12, 3)
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
    record = export_int8(guard, tmp_path / "g.onnx", data(4, 4), calibration, disagreement=0.3)
    assert record.is_verified
    shift = Shift(**record.details["int8"])
    backend = OnnxBackend(tmp_path / "g.onnx")
    about = metadata(tmp_path / "g.onnx")
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

    (tmp_path / "g.xml").write_text("an older model")
    record = export_openvino(
        guard, tmp_path / "g.xml", data(4, 4), class_names=["a", "b", "c", "d"]
    )
    assert record.files == (tmp_path / "g.xml", tmp_path / "g.bin")
    assert record.runtime.startswith("OpenVINO 20")
    assert record.largest_difference < 1e-4
    assert sorted(file.name for file in tmp_path.iterdir()) == ["g.bin", "g.xml"]
    core = openvino.Core()
    model = core.read_model(record.path)
    assert json.loads(model.get_rt_info(["fdbd", "class_names"]).value) == ["a", "b", "c", "d"]
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    rows = data(50, 6)
    rows[3, 0, 0, 0] = torch.nan
    answers = compiled({"images": rows.numpy()})
    decision = guard(rows)
    assert answers["is_ood"][3]
    clear = (decision.scores - guard.threshold.value).abs() > 1e-3
    assert clear.sum() > 40
    np.testing.assert_array_equal(answers["is_ood"][clear], decision.is_ood[clear])
    np.testing.assert_allclose(answers["score"][clear], decision.scores[clear], rtol=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--int8"], "give --calibration DATA with it"),
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


def exported(run, guard: fdbd.Guard, folder: Path, name: str) -> str:
    """What `fdbd export` says, on one line."""
    guard.save(folder / "guard.safetensors")
    file = folder / "guard.safetensors"
    code, out, err = run("export", file, "--features", "--out", folder / name)
    assert code == 0, err
    return " ".join(out.split())


def test_the_command_says_what_was_verified_and_what_was_not(
    run, guard: fdbd.Guard, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(export, "_TARGETS", dict(export._TARGETS))

    @export.export_target(".toy")
    def export_toy(
        guard: fdbd.Guard, path: Path, example: torch.Tensor, *, class_names, opset
    ) -> Path:
        path.write_text(f"{guard.detector.label} {len(example)} {class_names} {opset}")
        return path

    said = exported(run, guard, tmp_path, "guard.onnx")
    assert "B, opset 18, fdbd, verified in ONNX Runtime" in said
    assert "agrees with torch to 1e-04 (largest difference" in said
    said = exported(run, guard, tmp_path, "guard.TOY")
    assert said.endswith("guard.TOY: 0.0 kB, fdbd, not verified")
    assert (tmp_path / "guard.TOY").read_text() == "fdbd 4 None 18"


def test_the_record_lists_the_inputs_that_were_tried(guard: fdbd.Guard, tmp_path: Path) -> None:
    record = guard.export_onnx(tmp_path / "guard.onnx", data(4, 4))
    assert "a batch with a NaN" in record.trials
    assert 0 <= record.largest_difference <= record.tolerance == 1e-4
    assert json.loads(json.dumps(record.to_dict()))["verified"] is True
    with open(record, "rb") as file:
        assert file.read(1)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """A package with an export target, as pip would install it."""
    (folder / "toy_export.py").write_text(code)
    info = folder / "toy_export-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-export\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fdbd.export_targets]\ntoy = toy_export\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(export, "_TARGETS", dict(export._TARGETS))
    monkeypatch.delitem(sys.modules, "toy_export", raising=False)


def test_a_target_of_another_package_is_found_by_its_entry_point(
    run, guard: fdbd.Guard, tmp_path, monkeypatch
) -> None:
    (tmp_path / "site").mkdir()
    code = (
        "from fdbd.export import export_target\n"
        "@export_target('.entry')\n"
        "def write(guard, path, example, *, class_names=None, opset=18):\n"
        "    path.write_text('entry')\n"
    )
    install(tmp_path / "site", monkeypatch, code)
    assert exported(run, guard, tmp_path, "guard.entry").endswith("not verified")
    assert (tmp_path / "guard.entry").read_text() == "entry"


def test_a_target_that_cannot_be_loaded_is_one_sentence(tmp_path, monkeypatch) -> None:
    install(tmp_path, monkeypatch, "raise RuntimeError('its library is missing')")
    with pytest.raises(ValueError, match=r"'toy' of another package .* its library is missing"):
        export.find_export(Path("guard.unknown"))


@pytest.mark.parametrize("suffix", ["toy", ".TOY"])
def test_an_ending_that_no_file_could_have_is_refused(suffix: str) -> None:
    with pytest.raises(ValueError, match="expected one such as"):
        export.export_target(suffix)
