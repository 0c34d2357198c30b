"""The commands and the code of docs/production.md and of the pages in docs/production (fit.md, score.md,
refresh.md, onnx.md, monitoring.md, scikit-learn.md), and of docs/runbook.md, run word for word."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fdbd import cli

DOCS = Path(__file__).parents[2] / "docs"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def page(name: str) -> str:
    """The text of a page."""
    return (DOCS / name).read_text(encoding="utf-8")


def shell_blocks(name: str) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", page(name), re.DOTALL)


def test_the_commands_on_the_page_run_as_they_stand(tmp_path, monkeypatch, capsys):
    from PIL import Image

    for module in ("onnx", "onnxruntime", "onnxscript", "faiss", "matplotlib"):
        pytest.importorskip(module)
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    for folder in ("photos", "fresh", "inbox"):
        for number, name in enumerate(CLASSES * 2):
            place = tmp_path / folder
            if folder != "inbox":
                place = place / name
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 255, (32, 32, 3), np.uint8)).save(
                place / f"{number:04d}.png"
            )
    np.savez("head.npz", weight=generator.standard_normal((3, 5)), bias=np.zeros(3))
    for name in ("train", "fresh", "today"):
        values = pa.array(generator.standard_normal(500).astype(np.float32))
        pq.write_table(
            pa.table({"features": pa.FixedSizeListArray.from_arrays(values, 5)}), f"{name}.parquet"
        )
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    blocks = shell_blocks("production.md")
    blocks += shell_blocks("production/fit.md")
    blocks += shell_blocks("production/score.md")
    assert len(blocks) == 4
    blocks += re.findall(r"```\n(fdbd fit .*?)```", readme, re.DOTALL)
    assert len(blocks) == 5
    exports = re.findall(r"`(fdbd export \S+ --(?:int8|out) [^`]+)`", page("production/onnx.md"))
    blocks += [f"{line}\n" for line in exports]
    assert len(blocks) == 7
    printed = ""
    for line in "".join(blocks).splitlines():
        with pytest.raises(SystemExit) as end:
            cli.main(shlex.split(line, comments=True)[1:])
        captured = capsys.readouterr()
        printed += captured.out
        assert not end.value.code, (line, captured.err)
    assert (
        next(json.loads(line)["rows"] for line in printed.splitlines() if line.startswith("{"))
        == 100
    )
    assert pq.read_table("scores.parquet").num_rows == 20
    assert {path.name for path in tmp_path.iterdir()} >= {
        "why",
        "why.png",
        "guard.onnx",
        "today.csv",
        "guard.xml",
    }


def test_the_code_on_the_page_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    for module in ("onnx", "onnxruntime", "onnxscript", "prometheus_client"):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    train = torch.randn(200, 3, 4, 4)
    validation = torch.randn(100, 3, 4, 4)
    names = {
        "model": nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 5)).eval(),
        "train_loader": DataLoader(TensorDataset(train, torch.arange(200) % 5), batch_size=64),
        "val_loader": DataLoader(TensorDataset(validation, torch.arange(100) % 5), batch_size=64),
        "images": torch.randn(6, 3, 4, 4),
    }
    for name in ("onnx.md", "scikit-learn.md", "monitoring.md"):
        for block in re.findall(r"```python\n(.*?)```", page(f"production/{name}"), re.DOTALL):
            exec(compile(block, name, "exec"), names)
    decision = names["decision"]
    torch.testing.assert_close(
        torch.from_numpy(names["score"]), decision.scores, rtol=1e-4, atol=1e-4
    )
    assert names["is_ood"].tolist() == decision.is_ood.tolist()
    assert names["snapshot"]["samples"] == 6
    assert "fdbd_samples_total 6.0" in capsys.readouterr().out


@pytest.mark.slow
def test_the_commands_of_the_runbook_run_in_order(tmp_path, monkeypatch, capsys):
    """From the fit to the next guard, by the words of the page; the service itself is tried
    elsewhere. The gallery's review is written as its page writes it."""
    pq = pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    for folder, number in (("train", 40), ("fresh", 40), ("inbox", 320)):
        for place in range(number):
            name = "." if folder == "inbox" else CLASSES[place % 10]
            write_noise(tmp_path / folder / name / f"{place:04d}.png", generator)
    ran = []
    for block in re.findall(r"^ *```\n(.*?)^ *```", page("runbook.md"), re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            words = shlex.split(line.strip(), comments=True)
            if words[1] == "serve":
                continue
            if "--reviewed" in words:
                paths = pq.read_table("sample.parquet")["path"].to_pylist()
                verdicts = dict.fromkeys(paths, "id")
                # Every fifth sample is OOD.
                verdicts.update(dict.fromkeys(paths[::5], "ood"))
                review = {"version": 1, "reviews": verdicts}
                Path("review.json").write_text(json.dumps(review))
            with pytest.raises(SystemExit) as end:
                cli.main(words[1:])
            assert not end.value.code, (line, capsys.readouterr().err)
            ran.append(words[1])
    assert ran == ["fit", "inspect", "score", "sample", "gallery", "calibrate", "calibrate"]
    assert "Cheapest: alpha" in capsys.readouterr().out
    assert Path("next.safetensors").is_file()


def write_noise(path: Path, generator: np.random.Generator) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(generator.integers(0, 255, (32, 32, 3), np.uint8)).save(path)
