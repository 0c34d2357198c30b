"""docs/choosing.md: its code and commands run as they stand, with names for the placeholders."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fdbd

PAGE = Path(__file__).parents[2] / "docs" / "choosing.md"
FENCE = re.compile(r"^```(\S*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def blocks() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for language, block in FENCE.findall(PAGE.read_text(encoding="utf-8")):
        found.setdefault(language or "commands", []).append(block)
    return found


def test_the_code_of_the_page_runs(blocks, capsys) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 16), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)).eval()
    names = {"fdbd": fdbd, "model": model}
    for name, count in (("train", 200), ("fresh", 60), ("other", 100)):
        names[f"{name}_loader"] = [torch.rand(count, 3, 16, 16)]
    exec(blocks["python"][0], names)
    assert "µs per sample" in capsys.readouterr().out


def test_the_code_for_texts_runs(blocks) -> None:
    names = {
        "fdbd": fdbd,
        "text_model": nn.Sequential(nn.EmbeddingBag(50, 8), nn.Linear(8, 3)),
        "head": fdbd.Head(torch.eye(4)[:3]),
        "encode": lambda texts: torch.rand(len(texts), 4),
        "fresh_texts": ["book a table for two", "what is my balance"],
    }
    exec(blocks["python"][1], names)
    assert "other languages" in names["changed"]


def test_the_commands_of_the_page_run(blocks, run, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    coarse = generator.integers(0, 256, (300, 4, 4, 3), dtype=np.uint8)
    images = coarse.repeat(8, axis=1).repeat(8, axis=2)
    np.savez("data.npz", x=images[:100])
    np.savez("fresh.npz", x=images[100:220])
    np.savez("other.npz", x=images[220:])
    files = {"MODEL": "cifar10-ce", "DATA": "data.npz", "FRESH": "fresh.npz", "OTHER": "other.npz"}
    for line in blocks["commands"][0].splitlines():
        words = shlex.split(line, comments=True)[1:]
        code, _, err = run(*(files.get(word, word) for word in words))
        # Whether these made-up images are flagged often enough is not what is tested.
        has_failed_under = words[0] == "stress" and "--fail-under" in err
        assert code == int(has_failed_under), err
    assert Path("choice.html").is_file()
