"""ODIN against pytorch-ood, and against its parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fdbd
from fdbd import MSP, ODIN, Batch, Classifier, Guard, Head, InputPerturbation


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5)
    ).eval()


def make_images(count: int, seed: int = 1) -> Tensor:
    return torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("std", [None, [0.2, 0.3, 0.4]])
def test_scores_equal_those_of_pytorch_ood(std: list[float] | None) -> None:
    peer = pytest.importorskip("pytorch_ood.detector")
    model = make_model().double()
    guard = Guard(model, ODIN(epsilon=0.01, std=std)).fit([make_images(64).double()])
    images = make_images(20, 2).double()
    theirs = peer.ODIN(model, eps=0.01, norm_std=std)(images)
    torch.testing.assert_close(guard.score(images), -theirs, rtol=1e-9, atol=0)


def test_it_is_a_perturbation_and_a_hot_softmax() -> None:
    model = make_model()
    images = make_images(20, 2)
    odin = Guard(model, "odin").fit([make_images(64)])
    parts = Guard(model, MSP(1000), perturb=InputPerturbation(0.0014)).fit([make_images(64)])
    torch.testing.assert_close(odin.score(images), parts.score(images))


def test_the_step_raises_the_score_where_the_paper_s_printed_sign_would_lower_it() -> None:
    model = make_model().double()
    images = make_images(50, 2).double()
    still, moved = (Guard(model, ODIN(epsilon=e)).fit([images]).score(images) for e in (0.0, 0.01))
    assert (moved > still).all()


def test_the_batch_is_the_untouched_model_s_with_the_features_of_the_moved_images() -> None:
    model = make_model()
    images = make_images(6)
    classifier = Classifier(model)
    with torch.inference_mode():
        batch = ODIN(epsilon=0.05).observe(images, classifier)
    plain = classifier(images)
    torch.testing.assert_close(batch.features, plain.features)
    torch.testing.assert_close(batch.logits, plain.logits)
    assert batch.perturbed.shape == (6, 16)
    assert not torch.allclose(batch.perturbed, batch.features)
    assert not batch.logits.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


def test_decisions_keep_the_models_logits() -> None:
    model = make_model()
    images = make_images(6)
    decision = (
        Guard(model, "react+odin").fit([make_images(64)]).calibrate([make_images(64, 3)])(images)
    )
    assert torch.equal(decision.logits, model(images))


def test_outside_a_guard_it_says_where_it_works() -> None:
    head = Head(torch.eye(3))
    batch = Batch(torch.rand(4, 3))
    with pytest.raises(ValueError, match=r"fdbd.Guard\(model, 'odin'\)"):
        ODIN().fit(batch, head)
    guard = Guard(make_model(), "odin").fit([make_images(64)])
    with pytest.raises(ValueError, match=r"fdbd.Guard\(model, 'odin'\)"):
        guard.detector.score(Batch(torch.rand(4, 16)))
    with pytest.raises(ValueError, match="features are not enough"):
        guard.decide(Batch(torch.rand(4, 16)))


def test_a_broken_image_scores_minus_infinity_and_leaves_the_others_alone() -> None:
    guard = Guard(make_model(), "odin").fit([make_images(64)])
    images = make_images(5, 2)
    expected = guard.score(images)
    images[2, 0, 0, 0] = torch.nan
    scores = guard.score(images)
    assert scores[2] == -torch.inf
    torch.testing.assert_close(scores[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


def test_settings_are_kept_and_checked(tmp_path) -> None:
    model = make_model()
    guard = (
        Guard(model, ODIN(100, 0.02, (0.5, 0.5, 0.5)))
        .fit([make_images(64)])
        .calibrate([make_images(64, 3)])
    )
    guard.save(tmp_path / "guard.safetensors")
    loaded = fdbd.load(tmp_path / "guard.safetensors", model)
    assert (loaded.detector.temperature, loaded.detector.epsilon, loaded.detector.std) == (
        100,
        0.02,
        (0.5, 0.5, 0.5),
    )
    assert torch.equal(loaded.score(make_images(5)), guard.score(make_images(5)))
    with pytest.raises(ValueError, match="epsilon"):
        ODIN(epsilon=-1)
    with pytest.raises(ValueError, match="temperature"):
        ODIN(temperature=0)
