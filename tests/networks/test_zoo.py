"""The shipped models: small files, cards that say what they are, and the accuracy that they
claim."""

import numpy as np
import pytest
import torch

from fdbd import networks as models
from fdbd import train

NAMES = models.list_zoo()


def test_both_models_are_there_and_good():
    assert models.zoo_card("cifar10-ce").test_accuracy >= 0.91
    assert models.zoo_card("cifar10-supcon").test_accuracy >= 0.88


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match="no zoo model 'mnist': there are cifar10-ce"):
        models.zoo("mnist")


@pytest.mark.parametrize("name", NAMES)
def test_card_and_file_agree_with_the_recipe(name):
    card = models.zoo_card(name)
    recipe = train.preset(card.recipe)
    assert (card.model, card.seed, card.dataset) == (recipe.model, recipe.seed, recipe.dataset)
    assert (card.preprocess.mean, card.preprocess.std) == (recipe.mean, recipe.std)
    assert card.path.stat().st_size <= 3e6
    assert f"fdbd train {card.recipe}" in card.text
    assert f"{card.test_accuracy:.2%}".replace("%", " %") in card.text


@pytest.mark.parametrize("name", NAMES)
def test_zoo_model_is_ready_to_use(name):
    model = models.zoo(name)
    assert not model.training
    assert model.get_classifier().weight.shape == (10, 128)
    images = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)
    with torch.no_grad():
        logits = model(models.zoo_card(name).preprocess(images))
    assert logits.dtype == torch.float32
    assert bool(torch.isfinite(logits).all())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_claimed_accuracy_is_measured_on_the_test_images(name):
    datasets = pytest.importorskip("fdbd.data.datasets")
    try:
        data = datasets.load("cifar10", "test")
    except Exception as error:
        # Whatever the reason is, the test needs the images.
        pytest.skip(f"CIFAR-10 is not at hand: {error}")
    card = models.zoo_card(name)
    model = models.zoo(name)
    labels = torch.tensor(np.array(data.labels))
    with torch.no_grad():
        right = [
            model(card.preprocess(data.images[i : i + 500])).argmax(1) == labels[i : i + 500]
            for i in range(0, len(labels), 500)
        ]
    assert float(torch.cat(right).float().mean()) == pytest.approx(card.test_accuracy, abs=1e-4)
