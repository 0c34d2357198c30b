"""Pseudo-OOD texts and sounds: what each kind keeps and what it changes, and bad input."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fdbd
from fdbd.data import audio_kinds, text_kinds, token_kinds

TOKENS = {
    "input_ids": torch.tensor([[1, 11, 12, 13, 14, 2], [1, 21, 22, 2, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]),
}


def test_tokens_change_between_the_first_and_the_last() -> None:
    for made in token_kinds(TOKENS, count=4).values():
        ids = made["input_ids"]
        assert torch.equal(made["attention_mask"], TOKENS["attention_mask"].repeat(2, 1))
        assert ids[:, 0].tolist() == [1, 1, 1, 1]
        assert ids[0, 5] == 2
        assert ids[1, 3:].tolist() == [2, 0, 0]


def test_each_kind_of_tokens_is_what_its_name_says() -> None:
    kinds = token_kinds(TOKENS, count=2)
    shuffled = kinds["shuffled tokens"]["input_ids"][0]
    assert sorted(shuffled.tolist()) == sorted(TOKENS["input_ids"][0].tolist())
    repeated = kinds["repeated tokens"]["input_ids"][0, 1:5]
    assert len(set(repeated.tolist())) == 1
    random = kinds["random tokens"]["input_ids"][0, 1:5]
    assert set(random.tolist()) <= {11, 12, 13, 14, 21, 22}


def test_texts_change_as_the_kinds_say_and_the_same_way_for_one_seed() -> None:
    texts = ["please book a table for two people", "what is my balance"]
    kinds = text_kinds(texts, count=4, seed=3)
    assert kinds == text_kinds(texts, count=4, seed=3)
    assert kinds != text_kinds(texts, count=4, seed=4)
    assert sorted(kinds["shuffled words"][0].split()) == sorted(texts[0].split())
    assert len(set(kinds["repeated words"][1].split())) == 1
    lengths = [len(word) for word in kinds["random letters"][0].split()]
    assert lengths == [len(word) for word in texts[0].split()]


def test_the_language_of_the_texts_is_not_another_language() -> None:
    from fdbd.data.pseudo_text import SENTENCES

    made = text_kinds(["wie spät ist es"], count=200, language="de")["other languages"]
    assert not any(sentence in text for sentence in SENTENCES["de"] for text in made)
    assert any(sentence in text for sentence in SENTENCES["ja"] for text in made)


def test_sounds_keep_their_loudness_and_change_what_their_names_say() -> None:
    time = torch.arange(4096) / 4096
    waves = torch.sin(2 * torch.pi * 100 * time).repeat(4, 1, 1)
    kinds = audio_kinds(waves, count=3)
    for made in kinds.values():
        assert made.shape == (3, 1, 4096)
        loudness = made.square().mean(dim=-1)
        assert torch.allclose(loudness, torch.full_like(loudness, 0.5), rtol=0.01)
    # A tone of 100 periods of at most 2,048 becomes one of 1,949.
    loudest = torch.fft.rfft(kinds["reversed bands"]).abs().argmax(dim=-1)
    assert loudest.unique().tolist() == [1949]
    spectrum = torch.fft.rfft(kinds["random phases"]).abs()
    assert spectrum.argmax(dim=-1).unique().tolist() == [100]
    pieces = kinds["shuffled pieces"][0, 0].sort().values
    assert torch.allclose(pieces, waves[0, 0].sort().values, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: token_kinds(fdbd.Batch(torch.rand(3, 4))), "text_kinds"),
        (lambda: token_kinds({"input_ids": torch.rand(3, 4)}), "whole numbers"),
        (lambda: token_kinds(TOKENS, count=0), "at least 1"),
        (lambda: text_kinds([]), "at least one text"),
        (lambda: text_kinds("one text"), "a list"),
        (lambda: audio_kinds(torch.rand(100)), "recordings"),
        (lambda: audio_kinds(torch.rand(2, 10)), "at least 32"),
    ],
)
def test_what_kinds_cannot_be_made_of_is_one_sentence(call, what) -> None:
    with pytest.raises(ValueError, match=what) as caught:
        call()
    assert "\n" not in str(caught.value)


class TextModel(nn.Module):
    """The mean of embeddings, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 12)
        self.layer = nn.Linear(12, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, input_ids, attention_mask):
        weights = attention_mask[:, :, None].float()
        mean = (self.embedding(input_ids) * weights).sum(1) / weights.sum(1)
        return self.head(self.layer(mean).relu())


def make_texts(count: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 20, (count, length), generator=generator)
    ids[:, 0] = 1
    ids[:, -1] = 2
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_auto_weighs_detectors_of_texts_of_several_lengths_by_tokens() -> None:
    auto = fdbd.Auto(kinds=token_kinds, pool=("fdbd", "energy", "knn"))
    held_out = [make_texts(30, 8, 1), make_texts(30, 12, 2)]
    guard = fdbd.Guard(TextModel().eval(), auto).fit([make_texts(200, 10, 3)], held_out=held_out)
    assert list(guard.choice.per_kind) == ["shuffled tokens", "repeated tokens", "random tokens"]
    guard.calibrate([make_texts(100, 9, 4)])
    assert guard(make_texts(5, 7, 5)).is_ood.shape == (5,)


def test_auto_weighs_detectors_of_sounds() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 8, 9, 4), nn.ReLU(), nn.AdaptiveAvgPool1d(2), nn.Flatten())
    model = nn.Sequential(model, nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
    auto = fdbd.Auto(kinds=audio_kinds, pool=("fdbd", "energy"))
    waves = torch.sin(torch.rand(300, 1, 1) * torch.arange(400))
    guard = fdbd.Guard(model, auto).fit([waves[:200]], held_out=[waves[200:]])
    assert next(iter(guard.choice.per_kind)) == "reversed bands"
