"""Multi-layer MDS through a guard: layers from the network, weights from adversarial copies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fdbd
from fdbd.core.perturbation import adversarial
from fdbd.detectors.mds import ADVERSARIAL_STEP


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    ).eval()


def loader(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, 5, 5, generator=generator)
    labels = torch.arange(count) % 3
    return list(zip(images.split(40), labels.split(40)))


@pytest.fixture(scope="module")
def guard() -> fdbd.Guard:
    return (
        fdbd.Guard(make_model(), fdbd.MDS(layers=("0", "4")))
        .fit(loader(240, 1))
        .calibrate(loader(120, 2))
    )


def test_the_guard_takes_layers_from_the_network_and_weighs_them(guard: fdbd.Guard) -> None:
    assert guard.detector.weights.shape == (3,)
    assert not torch.allclose(guard.detector.weights, torch.full((3,), 1 / 3))
    images = torch.randn(5, 3, 5, 5)
    batch = fdbd.Classifier(make_model(), layers=("0", "4"))(images)
    torch.testing.assert_close(guard.score(images), guard.detector.score(batch).detach())


def test_layers_are_weighed_behind_a_shaping_and_in_an_ensemble_too(tmp_path) -> None:
    several = fdbd.MDS(layers=("0", "4"))
    for detector in (fdbd.Shaped(fdbd.ReAct(90), several), fdbd.Ensemble([several, "energy"])):
        made = fdbd.Guard(make_model(), detector).fit(loader(240, 1))
        mds = (
            made.detector.detector
            if isinstance(detector, fdbd.Shaped)
            else made.detector.members[0]
        )
        assert not torch.allclose(mds.weights, torch.full((3,), 1 / 3))
        made.save(tmp_path / "guard.safetensors")
        again = fdbd.load(tmp_path / "guard.safetensors", make_model())
        images = torch.randn(5, 3, 5, 5)
        if isinstance(detector, fdbd.Ensemble):
            for one in (made, again):
                one.detector.calibrate([one.classifier(images) for images, _ in loader(120, 2)])
        torch.testing.assert_close(again.score(images), made.score(images))


def test_a_layer_with_other_rows_is_refused() -> None:
    batch = fdbd.Batch(torch.randn(6, 4), None, torch.arange(6) % 2, {"a": torch.randn(9, 3)})
    with pytest.raises(ValueError, match=r"layer 'a' has shape \(9, 3\), expected \(6, P\)"):
        fdbd.MDS(layers=["a"]).fit(batch, fdbd.Head(torch.randn(2, 4)))


def test_the_weights_tell_clean_samples_from_their_adversarial_copies(guard: fdbd.Guard) -> None:
    images, labels = (torch.cat(part) for part in zip(*loader(240, 1)))
    moved = adversarial(images, labels, fdbd.Classifier(make_model()), ADVERSARIAL_STEP)
    assert guard.score(images).mean() > guard.score(moved).mean()


def test_a_multi_layer_guard_survives_saving(guard: fdbd.Guard, tmp_path) -> None:
    guard.save(tmp_path / "guard.safetensors")
    images = torch.randn(5, 3, 5, 5)
    for ours, theirs in zip(
        guard(images), fdbd.load(tmp_path / "guard.safetensors", make_model())(images)
    ):
        torch.testing.assert_close(ours, theirs)


def test_features_and_unlabelled_data_are_refused() -> None:
    guard = fdbd.Guard(make_model(), fdbd.MDS(layers=("0",)))
    with pytest.raises(ValueError, match="needs labels"):
        guard.fit([torch.randn(8, 3, 5, 5)])
    with pytest.raises(ValueError, match="needs the images"):
        guard.fit([fdbd.Batch(torch.randn(8, 8), None, torch.arange(8) % 3)])


def test_the_adversarial_step_follows_the_std_of_the_images() -> None:
    def weights(scale: float, std: float | None) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)
        ).eval()
        model[0].weight.data *= scale
        images = torch.randn(300, 8, generator=torch.Generator().manual_seed(1))
        labels = torch.arange(300) % 3
        guard = fdbd.Guard(model, fdbd.MDS(layers=["1"], std=std)).fit([(images / scale, labels)])
        return guard.detector.weights

    plain = weights(1.0, None)
    torch.testing.assert_close(weights(0.25, 0.25), plain, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(weights(0.25, None), plain, rtol=1e-2)


def test_cached_features_with_their_layers_are_decided_on_like_their_images(
    guard: fdbd.Guard, tmp_path
) -> None:
    images = loader(20, 3)[0][0]
    fitted = guard
    batch = guard.classifier(images).to("cpu")
    batch = batch._replace(features=batch.features.detach(), logits=batch.logits.detach())
    batch = batch._replace(layers={name: part.detach() for name, part in batch.layers.items()})
    fitted.save(tmp_path / "guard.safetensors")
    alone = fdbd.load(tmp_path / "guard.safetensors")
    assert torch.equal(alone.decide(batch).scores, fitted(images).scores)
    arrays = fdbd.Batch(
        batch.features.numpy(),
        batch.logits.numpy(),
        layers={name: part.numpy() for name, part in batch.layers.items()},
    )
    assert torch.equal(alone.detector.score(arrays), fitted(images).scores)
    with pytest.raises(ValueError, match="needs the images and the network"):
        alone.decide(fdbd.Batch(batch.features))
    labelled = batch._replace(labels=torch.arange(20) % 3)
    by_features = fdbd.Guard(make_model(), fdbd.MDS(layers=("0", "4"))).fit([labelled])
    # There is nothing to weigh the detectors by.
    assert torch.allclose(by_features.detector.weights, torch.full((3,), 1 / 3))
