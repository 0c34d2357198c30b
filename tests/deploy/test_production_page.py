"""The code of docs/production.md on ONNX, scikit-learn and monitoring, run word for word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PAGE = Path(__file__).parents[2] / "docs" / "production.md"


def test_the_code_on_the_page_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    for module in ("onnx", "onnxruntime", "onnxscript", "prometheus_client"):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    train, validation = torch.randn(200, 3, 4, 4), torch.randn(100, 3, 4, 4)
    names = {
        "model": nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 5)).eval(),
        "train_loader": DataLoader(TensorDataset(train, torch.arange(200) % 5), batch_size=64),
        "val_loader": DataLoader(TensorDataset(validation, torch.arange(100) % 5), batch_size=64),
        "images": torch.randn(6, 3, 4, 4),
    }
    sections = dict(part.split("\n", 1) for part in PAGE.read_text(encoding="utf-8").split("\n## ")[1:])
    for title in ("ONNX", "scikit-learn", "Monitoring"):
        for block in re.findall(r"```python\n(.*?)```", sections[title], re.DOTALL):
            exec(compile(block, str(PAGE), "exec"), names)
    decision = names["decision"]
    torch.testing.assert_close(torch.from_numpy(names["score"]), decision.scores, rtol=1e-4, atol=1e-4)
    assert names["is_ood"].tolist() == decision.is_ood.tolist()
    assert names["snapshot"]["samples"] == 6
    assert "fdbd_samples_total 6.0" in capsys.readouterr().out
