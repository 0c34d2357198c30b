"""Guards around zero-shot classifiers: nothing is fitted, prompts are the classes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import fdbd
from fdbd import cli

CLASSES = torch.eye(8)[:4]
NEGATIVES = torch.eye(8)[4:]


def samples(count: int, directions: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(directions), (count,), generator=generator)
    return directions[chosen] + 0.2 * torch.randn(count, 8, generator=generator)


@pytest.mark.parametrize("negatives", [None, NEGATIVES])
def test_other_directions_than_the_prompts_are_found(negatives: torch.Tensor | None) -> None:
    encoder = nn.Linear(8, 8, bias=False)
    nn.init.eye_(encoder.weight)
    guard = fdbd.Guard.zero_shot(encoder, 3 * CLASSES, negatives=negatives)
    guard.calibrate([samples(500, CLASSES, 0)], alpha=0.05, progress=False)
    known = guard(samples(500, CLASSES, 1))
    assert known.is_ood.double().mean() < 0.1
    assert guard(samples(500, NEGATIVES, 2)).is_ood.double().mean() > 0.9
    torch.testing.assert_close(
        known.logits, 100 * torch.nn.functional.normalize(samples(500, CLASSES, 1))[:, :4]
    )


def test_the_score_with_negatives_is_that_of_the_definition() -> None:
    guard = fdbd.Guard.zero_shot(None, CLASSES, negatives=2 * NEGATIVES, temperature=0.1)
    features = samples(20, torch.eye(8), 0)
    cosines = torch.nn.functional.normalize(features.double()) / 0.1
    share = cosines.exp()[:, :4].sum(dim=1) / cosines.exp().sum(dim=1)
    scores = guard.score(fdbd.Batch(features)).double()
    torch.testing.assert_close(torch.sigmoid(scores), share, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("negatives", [None, NEGATIVES])
def test_a_file_keeps_prompts_and_names(negatives: torch.Tensor | None, tmp_path: Path) -> None:
    guard = fdbd.Guard.zero_shot(None, CLASSES, negatives=negatives, class_names=list("abcd"))
    guard.calibrate([fdbd.Batch(samples(100, CLASSES, 0))], tpr=0.9, progress=False)
    guard.save(tmp_path / "guard.safetensors")
    head = fdbd.Head.cosine(CLASSES, scale=100)
    loaded = fdbd.load(tmp_path / "guard.safetensors", head)
    batch = fdbd.Batch(samples(50, torch.eye(8), 1))
    assert torch.equal(loaded.decide(batch).scores, guard.decide(batch).scores)
    assert loaded.about["class_names"] == list("abcd")
    loaded.fit([batch], progress=False)
    assert torch.equal(loaded.score(batch), guard.score(batch))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"negatives": torch.eye(5)}, r"expected \(M, 8\)"),
        ({"negatives": torch.zeros(2, 8)}, "row of zeros"),
        ({"negatives": torch.zeros(0, 8)}, "at least one"),
        ({"class_names": ["a"]}, "1 class names and 4 embeddings"),
        ({"scale": 0}, "expected a positive number"),
        ({"temperature": -1.0}, "expected a positive number"),
    ],
)
def test_wrong_prompts_are_one_sentence(options: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        fdbd.Guard.zero_shot(None, CLASSES, **options)


def test_an_encoder_that_gives_no_embeddings_is_named() -> None:
    guard = fdbd.Guard.zero_shot(nn.Conv2d(3, 8, 3), CLASSES)
    with pytest.raises(TypeError, match=r"tensor of shape .* expected embeddings \(N, 8\)"):
        guard.score(torch.rand(2, 3, 8, 8))
    narrow = fdbd.Guard.zero_shot(nn.Linear(5, 6), CLASSES)
    with pytest.raises(TypeError, match=r"tensor of shape \(2, 6\), expected embeddings \(N, 8\)"):
        narrow.score(torch.rand(2, 5))
    with pytest.raises(TypeError, match="encoder is a function"):
        fdbd.Guard.zero_shot(lambda images: images, CLASSES)


@pytest.mark.parametrize("command", ["score", "explain", "stress"])
def test_commands_say_that_a_guard_saved_in_python_names_no_model(
    command: str, tmp_path: Path, capsys
) -> None:
    guard = fdbd.Guard.zero_shot(nn.Sequential(nn.Flatten(), nn.Linear(192, 8)), CLASSES)
    guard.calibrate([torch.rand(100, 3, 8, 8)], alpha=0.1, progress=False)
    guard.save(tmp_path / "guard.safetensors")
    picture = tmp_path / "images" / "photo.png"
    picture.parent.mkdir()
    Image.new("RGB", (8, 8)).save(picture)
    data = picture if command == "explain" else picture.parent
    with pytest.raises(SystemExit):
        cli.main([command, str(tmp_path / "guard.safetensors"), str(data)])
    assert "names no model" in capsys.readouterr().err
