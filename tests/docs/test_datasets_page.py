"""The code of docs/datasets.md, run word for word."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fdbd
from fdbd.core.tokenizer import TextTokenizer

PAGE = Path(__file__).parents[2] / "docs" / "datasets.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_page_has_the_code_that_is_run_here() -> None:
    encoding, registering = blocks()
    assert "TextTokenizer" in encoding
    assert "register_dataset" in registering


def test_a_dataset_is_registered_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    info = importlib.import_module("fdbd.data.datasets.info")
    sources = importlib.import_module("fdbd.data.datasets.sources")
    loaders: dict[str, object] = {}
    monkeypatch.setattr(info, "DATASETS", dict(info.DATASETS))
    monkeypatch.setattr(info, "LOADERS", loaders)
    monkeypatch.setattr(sources, "LOADERS", loaders)
    names: dict[str, object] = {}
    exec(blocks()[1], names)
    assert len(fdbd.data.load("tiles", "train")) == 4


def test_texts_are_encoded_with_the_tokenizer_in_the_guard_as_the_page_says() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[PAD]": 0, "play": 1, "a": 2, "song": 3, "what": 4, "is": 5, "the": 6, "weather": 7}
    model = tokenizers.models.WordLevel(words, unk_token="[PAD]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(len(words), 6)
            self.head = nn.Linear(6, 3)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(input_ids).mean(1))

    torch.manual_seed(0)
    guard = fdbd.Guard(Bag().eval())
    guard.fit([{"input_ids": torch.randint(8, (64, 4))}], progress=False)
    guard.calibrate([{"input_ids": torch.randint(8, (100, 4))}], progress=False)
    described = TextTokenizer(tokenizer.to_str(), max_tokens=8, pad_id=0, inputs=("input_ids",))
    guard.about["model"] = {"tokenizer": described.to_dict()}
    names: dict[str, object] = {"guard": guard}
    exec(blocks()[0], names)
    assert len(names["decision"].scores) == 2
