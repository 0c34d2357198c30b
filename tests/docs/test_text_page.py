"""The code of docs/heads.md on texts, prompts and labels, and the commands of the tutorial text.md,
run word for word on a small model."""

from __future__ import annotations

import csv
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fdbd
from fdbd.networks.by_name import model_by_name

DOCS = Path(__file__).parents[2] / "docs"
WORDS = {"music": ("play", "a", "song"), "weather": ("what", "is", "the", "weather")}


def code_of(page: str, section: str) -> str:
    """The Python in one section of a page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    part = text.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return "".join(re.findall(r"```python\n(.*?)```", part, re.DOTALL))


def sentences(count: int, seed: int) -> list[tuple[str, str]]:
    generator = np.random.default_rng(seed)
    found = []
    for number in range(count):
        intent = list(WORDS)[number % 2]
        words = generator.choice(WORDS[intent], generator.integers(1, 8))
        found.append((" ".join(words), intent))
    return found


def test_texts_in_python_are_guarded_as_the_page_says(
    intents_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FDBD_OFFLINE", "1")
    found = model_by_name(f"hf:{intents_folder}", device="cpu")
    names = {
        "tokenizer": found.tokenizer,
        "model": found.model,
        "texts": [text for text, _ in sentences(100, 0)],
        "fresh_texts": [text for text, _ in sentences(100, 1)],
    }
    exec(code_of("heads.md", "Texts"), names)
    assert len(names["decision"].is_ood) == 2


def test_a_cosine_head_is_guarded_as_the_page_says() -> None:
    torch.manual_seed(0)
    names = {
        "torch": torch,
        "encoder": nn.Linear(8, 16),
        "class_directions": torch.randn(3, 16),
        "train_loader": [torch.randn(100, 8)],
        "val_loader": [torch.randn(100, 8)],
        "images": torch.randn(5, 8),
    }
    exec(code_of("heads.md", "Cosine heads"), names)
    features = names["guard"].classifier(names["images"]).features
    torch.testing.assert_close(features.norm(dim=1), torch.ones(5))
    assert len(names["decision"].is_ood) == 5


def test_prompts_are_guarded_as_the_page_says() -> None:
    torch.manual_seed(0)
    images = torch.randn(100, 8)
    names = {
        "image_encoder": nn.Linear(8, 16),
        "prompt_embeddings": torch.randn(3, 16),
        "other_embeddings": torch.randn(5, 16),
        "names": ["ant", "bee", "cat"],
        "loader": [torch.randn(100, 8)],
        "images": images,
    }
    exec(code_of("heads.md", "Class prompts: zero-shot guards"), names)
    assert names["decision"].is_ood.shape == (100,)
    assert not names["strict"].score(images).isnan().any()


def test_many_labels_are_guarded_as_the_page_says() -> None:
    torch.manual_seed(0)
    names = {
        "tagger": nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval(),
        "tagged_loader": [(torch.randn(50, 6), torch.randint(2, (50, 4)))],
        "fresh_tagged_loader": [torch.randn(50, 6)],
        "tagged": torch.randn(5, 6),
    }
    code = code_of("heads.md", "Many labels")
    assert len(code.splitlines()) <= 10
    exec(code, names)
    assert names["decision"].label_sets().shape == (5, 4)


def test_the_distance_on_the_sphere_is_a_sine_whatever_the_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = nn.functional.normalize(torch.randn(2, 5, generator=generator))
    features = nn.functional.normalize(torch.randn(50, 5, generator=generator))
    scores = []
    for scale in (1.0, 100.0):
        guard = fdbd.Guard(fdbd.Head.cosine(prompts, scale), "fdbd")
        guard.fit([fdbd.Batch(features)], progress=False)
        scores.append(guard.score(fdbd.Batch(features)))
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-6)
    pole = nn.functional.normalize(prompts[0] - prompts[1], dim=0)
    sine = (features @ pole).abs()
    mean = features.mean(dim=0)
    chord = (1 + mean @ mean - 2 * features @ mean).sqrt()
    torch.testing.assert_close(scores[0], sine / chord, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_commands_of_the_tutorial_run(
    intents_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run
) -> None:
    import transformers

    monkeypatch.setenv("FDBD_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    encoder = tmp_path / "encoder"
    transformers.AutoTokenizer.from_pretrained(intents_folder).save_pretrained(encoder)
    transformers.AutoModel.from_pretrained(intents_folder).save_pretrained(encoder)
    for name, seed in (("train.csv", 0), ("fresh.csv", 1)):
        with open(name, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("query", "intent"), *sentences(200, seed)])
    lines = [f'{{"id": {row}, "query": "play a song"}}\n' for row in range(5)]
    Path("inbox.jsonl").write_text("".join(lines), encoding="utf-8")
    text = (DOCS / "tutorials" / "text.md").read_text(encoding="utf-8")
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("fdbd ")]
    served = commands.pop()
    assert served == ["fdbd", "serve", "guard.onnx"]
    for _, *words in commands:
        given = [
            word.replace("sentences:all-MiniLM-L6-v2", f"sentences:{encoder}") for word in words
        ]
        code, _, errors = run(*given)
        assert code == 0, errors
    assert Path("guard.onnx").is_file()
    assert "play a song" in Path("gallery.html").read_text(encoding="utf-8")
