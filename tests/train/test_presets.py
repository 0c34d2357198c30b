"""Presets: the paper's numbers, the schedules they stand for, and small ones that are small."""

import numpy as np
import pytest
import torch
from PIL import Image

from fdbd import networks as models
from fdbd import train
from fdbd.data.datasets import ImageFiles, Images
from fdbd.train.presets import read_presets


def rate(preset, epoch):
    return preset.rate(epoch / preset.epochs)


def learning_rate(schedule, progress, peak, **options):
    return train.Preset("some", "", schedule=schedule, lr=peak, **options).rate(progress)


def test_the_papers_cross_entropy_schedule():
    p = train.preset("ce-resnet18")
    assert (p.model, p.epochs, p.lr) == ("resnet18", 100, 0.1)
    assert [rate(p, e) for e in (0, 49, 50, 74, 75, 89, 90, 99)] == pytest.approx(
        [0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3, 1e-4, 1e-4]
    )


def test_densenets_own_schedule():
    p = train.preset("ce-densenet")
    assert (p.model, p.epochs, p.batch_size) == ("densenet100", 300, 64)
    assert [rate(p, e) for e in (149, 150, 225)] == pytest.approx([0.1, 0.01, 0.001])


def test_the_papers_supcon_settings():
    p = train.preset("supcon-resnet18")
    assert (p.objective, p.batch_size, p.epochs, p.temperature) == ("supcon", 1024, 500, 0.1)
    assert [rate(p, e) for e in (0, 250, 500)] == pytest.approx([0.5, 0.25, 0.0])
    imagenet = train.preset("supcon-imagenet")
    assert (imagenet.epochs, imagenet.num_classes, imagenet.model) == (
        700,
        1000,
        "torchvision:resnet50",
    )


def test_one_cycle_rises_then_falls_to_zero():
    rates = [learning_rate("triangle", step / 100, 1.0, warmup=0.2) for step in range(101)]
    assert max(rates) == rates[20] == 1.0
    assert rates[0] == rates[100] == 0.0
    assert rates == sorted(rates[:21]) + sorted(rates[21:], reverse=True)
    assert learning_rate("constant", 0.9, 0.3) == 0.3


def test_a_restart_runs_the_schedule_twice_the_second_time_lower():
    rates = [
        learning_rate("triangle", step / 30, 1.0, warmup=0.2, restart=(2 / 3, 0.5))
        for step in range(30)
    ]
    assert rates[:20] == pytest.approx(
        [learning_rate("triangle", step / 20, 1.0, warmup=0.2) for step in range(20)]
    )
    assert rates[20:] == pytest.approx(
        [learning_rate("triangle", step / 10, 0.5, warmup=0.2) for step in range(10)]
    )
    with pytest.raises(ValueError, match="expected a fraction of training"):
        learning_rate("triangle", 0.5, 1.0, restart=(1.5, 0.5))


SLOW = ("ce-densenet", "csi-resnet18")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW))
        for name in train.list_presets()
    ],
)
def test_every_preset_has_a_model_and_a_summary(name):
    p = train.preset(name)
    assert p.name == name
    assert p.summary
    assert p.model in models.list_models() or p.model.startswith("torchvision:")


SLOW = ("ce-densenet", "csi-resnet18")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW))
        for name in train.list_presets()
    ],
)
def test_the_first_steps_of_every_preset_run_on_miniatures(name, tmp_path, monkeypatch):
    recipe = train.preset(name)
    random = np.random.default_rng(0)
    labels = np.arange(4) % 2
    # Composites are made of four images.
    batch_size = 4 if recipe.objective == "several_labels" else 2
    # Photographs in files, of all sizes.
    if recipe.dataset == "imagenet":
        for number in range(4):
            side = tuple(random.integers(20, 60, 2))
            pixels = random.integers(0, 255, (*side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        images = Images(ImageFiles(sorted(tmp_path.glob("*.png"))), labels)
        changes = {"image_size": 32}
    else:
        images = Images(random.integers(0, 255, (4, 32, 32, 3), dtype=np.uint8), labels)
        changes = {}
    asked = []

    def load(dataset, split):
        asked.append((dataset, split))
        return images

    monkeypatch.setattr("fdbd.data.datasets.load", load)
    trained = train.train(
        recipe,
        epochs=1,
        batch_size=batch_size,
        linear_epochs=1,
        log="none",
        progress=False,
        **changes,
    )
    assert asked == [(recipe.dataset, "train"), (recipe.dataset, "test")]
    assert trained.history[0]["loss"] == trained.history[0]["loss"], "the loss is a number"
    assert trained.model(torch.zeros(2, 3, 32, 32)).shape == (2, recipe.num_classes)


def test_image_files_without_a_size_to_train_at_are_refused(tmp_path):
    Image.new("RGB", (30, 40)).save(tmp_path / "a.png")
    images = Images(ImageFiles([tmp_path / "a.png"]), [0])
    with pytest.raises(ValueError, match="image files may differ in size: set image_size"):
        train.train("ce-small", images, batch_size=1, progress=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3", r"\[mine\]: unknown key 'epoch', did you mean 'epochs'"),
        ('epochs = "3"', "epochs: expected an integer, got text"),
        ("augment = { padd = 3 }", r"unknown key 'padd' in \[augment\], did you mean 'pad'"),
        ('like = "yours"', "like is 'yours', expected the name of a recipe above it"),
    ],
)
def test_a_misspelt_entry_of_a_recipe_is_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        read_presets(f'[mine]\nsummary = "s"\n{text}\n')


def test_csi_has_its_papers_optimiser():
    p = train.preset("csi-resnet18")
    assert (p.optimizer, p.lr, p.weight_decay, p.epochs) == ("lars", 0.1, 1e-6, 1000)


def test_photographs_are_augmented_as_simclr_does_and_small_images_are_not_blurred():
    imagenet = train.preset("supcon-imagenet").augment
    cifar = train.preset("supcon-resnet18").augment
    assert (imagenet.area, imagenet.blur_p) == ((0.08, 1.0), 0.5)
    assert (cifar.area, cifar.blur_p) == ((0.2, 1.0), 0.0)


def test_a_batch_that_does_not_fill_its_composites_is_refused():
    images = Images(np.zeros((12, 32, 32, 3), np.uint8), np.zeros(12, np.int64))
    with pytest.raises(ValueError, match="batch_size is 6, expected a multiple of 4"):
        train.train("several-labels-small", images, batch_size=6, progress=False)
