"""Perturbation raises its objective by one signed step, image by image, and leaves the network
alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fdbd.core.batch import Batch
from fdbd.core.perturbation import InputPerturbation, adversarial
from fdbd.networks.classifier import Classifier

STD = (0.2, 0.25, 0.5)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def classifier() -> Classifier:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 5),
    )
    model[1].running_mean.normal_()
    return Classifier(model.double().eval())


@pytest.fixture
def images() -> Tensor:
    return torch.rand(4, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def msp(logits: Tensor, temperature: float) -> Tensor:
    return (logits / temperature).log_softmax(1).amax(1)


def finite_difference_signs(images: Tensor, objective) -> Tensor:
    """Sign of the gradient by central differences, one pixel of one image at a time."""
    signs = torch.empty_like(images)
    for n in range(len(images)):
        for pixel in range(images[n].numel()):
            step = torch.zeros_like(images[n : n + 1])
            step.view(-1)[pixel] = 1e-5
            image = images[n : n + 1]
            signs[n].view(-1)[pixel] = (
                (objective(image + step) - objective(image - step)).sign().item()
            )
    return signs


@torch.no_grad()
def test_odin_step_agrees_with_finite_differences(classifier: Classifier, images: Tensor) -> None:
    images = images[:2]
    signs = finite_difference_signs(images, lambda x: 1000 * msp(classifier.model(x), 1000))
    expected = images + 0.0014 * signs / torch.tensor(STD).double().view(1, 3, 1, 1)
    torch.testing.assert_close(
        InputPerturbation(0.0014, std=STD)(images, classifier), expected, atol=1e-9, rtol=0
    )


def test_odin_step_agrees_with_pytorch_ood(classifier: Classifier, images: Tensor) -> None:
    odin = pytest.importorskip("pytorch_ood.detector.odin")
    for options in [{}, {"temperature": 1.0}, {"std": STD}]:
        theirs = dict(options)
        if "std" in theirs:
            theirs["norm_std"] = theirs.pop("std")
        expected = odin.odin_preprocessing(classifier.model, images, eps=0.0014, **theirs)
        torch.testing.assert_close(
            InputPerturbation(0.0014, **options)(images, classifier), expected
        )


@pytest.mark.parametrize("temperature", [1.0, 1000.0])
def test_the_step_raises_the_softmax_of_the_predicted_class(
    classifier: Classifier, images: Tensor, temperature: float
) -> None:
    moved = InputPerturbation(0.01, temperature=temperature)(images, classifier)
    before, after = (msp(classifier(x).logits, temperature) for x in (images, moved))
    assert (after > before).all()


@torch.no_grad()
def test_a_score_as_objective_is_raised(classifier: Classifier, images: Tensor) -> None:
    def score(batch: Batch) -> Tensor:
        return -(batch.features - 0.5).square().sum(1)

    moved = InputPerturbation(0.01, objective="score")(images, classifier, score)
    assert (score(classifier(moved)) > score(classifier(images))).all()
    signs = finite_difference_signs(images[:1], lambda x: score(classifier(x)))
    torch.testing.assert_close(moved[:1], images[:1] + 0.01 * signs, atol=1e-9, rtol=0)


def test_the_score_may_read_earlier_layers(classifier: Classifier, images: Tensor) -> None:
    classifier = Classifier(classifier.model, layers=("0",))
    moved = InputPerturbation(0.01, objective="score")(
        images, classifier, lambda batch: batch.layers["0"].sum(1)
    )
    assert (classifier(moved).layers["0"].sum(1) > classifier(images).layers["0"].sum(1)).all()


def test_images_do_not_influence_each_other(classifier: Classifier, images: Tensor) -> None:
    perturb = InputPerturbation(0.0014)
    alone = torch.cat([perturb(image[None], classifier) for image in images])
    assert torch.equal(perturb(images, classifier), alone)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_any_grad_mode_of_the_caller_gives_the_same(
    classifier: Classifier, images: Tensor, mode
) -> None:
    expected = InputPerturbation(0.0014)(images, classifier)
    with mode():
        moved = InputPerturbation(0.0014)(images + 0, classifier)
    assert torch.equal(moved, expected)
    assert not moved.requires_grad
    assert not moved.is_inference()


def test_network_and_images_are_left_alone(classifier: Classifier, images: Tensor) -> None:
    images.requires_grad_()
    frozen = classifier.model[0].weight.requires_grad_(False)
    before = images.detach().clone()
    state = {name: value.clone() for name, value in classifier.state_dict().items()}
    classifier.model.train()
    InputPerturbation(0.0014)(images, classifier)
    adversarial(images, torch.zeros(4, dtype=torch.int64), classifier, 0.1)
    assert all(parameter.grad is None for parameter in classifier.parameters())
    assert images.grad is None
    assert not frozen.requires_grad
    assert classifier.model[5].weight.requires_grad
    assert torch.equal(images.detach(), before)
    assert all(torch.equal(value, state[name]) for name, value in classifier.state_dict().items())


def test_a_frozen_network_is_perturbed_through(classifier: Classifier, images: Tensor) -> None:
    expected = InputPerturbation(0.0014)(images, classifier)
    classifier.requires_grad_(False)
    assert torch.equal(InputPerturbation(0.0014)(images, classifier), expected)


def test_adversarial_images_raise_the_loss_of_their_labels(
    classifier: Classifier, images: Tensor
) -> None:
    labels = torch.tensor([0, 1, 2, 4])

    def loss(x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(classifier.model(x), labels, reduction="none")

    moved = adversarial(images, labels, classifier, 0.01, std=STD)
    assert (loss(moved) > loss(images)).all()
    steps = (moved - images).abs().amax((0, 2, 3))
    torch.testing.assert_close(steps, 0.01 / torch.tensor(STD).double())
    with pytest.raises(ValueError, match=r"expected class indices \(4,\)"):
        adversarial(images, labels[:2], classifier, 0.01)


def test_half_precision_gradients_do_not_vanish(classifier: Classifier, images: Tensor) -> None:
    classifier = Classifier(classifier.model.to(torch.bfloat16))
    moved = InputPerturbation(0.05)(images.bfloat16(), classifier)
    assert moved.dtype == torch.bfloat16
    assert (moved != images.bfloat16()).double().mean() > 0.9


def test_zero_epsilon_and_empty_batches_come_back_as_they_are(
    classifier: Classifier, images: Tensor
) -> None:
    assert InputPerturbation(0.0)(images, classifier) is images
    assert InputPerturbation(0.1)(images[:0], classifier).shape == (0, 3, 6, 6)


def test_a_non_finite_image_spoils_only_itself(classifier: Classifier, images: Tensor) -> None:
    spoilt = images.clone()
    spoilt[1, 0, 0, 0] = torch.nan
    moved = InputPerturbation(0.0014)(spoilt, classifier)
    assert torch.equal(moved[[0, 2, 3]], InputPerturbation(0.0014)(images, classifier)[[0, 2, 3]])
    assert moved[1].isnan().any()


def test_configuration_goes_through_json() -> None:
    perturb = InputPerturbation(0.002, objective="score", temperature=10, std=STD)
    again = InputPerturbation(**json.loads(json.dumps(perturb.to_config())))
    assert again.to_config() == perturb.to_config()
    assert repr(again) == repr(perturb)


@pytest.mark.parametrize(
    "options",
    [
        {"epsilon": -0.1},
        {"epsilon": float("nan")},
        {"epsilon": 0.1, "temperature": 0},
        {"epsilon": 0.1, "objective": "energy"},
        {"epsilon": 0.1, "std": (0.1, 0.0, 0.2)},
    ],
)
def test_bad_options_are_refused(options) -> None:
    with pytest.raises(ValueError, match="expected"):
        InputPerturbation(**options)


def test_std_may_be_an_array_a_tensor_or_one_number() -> None:
    expected = InputPerturbation(0.1, std=[0.25, 0.5]).std
    assert expected == (0.25, 0.5)
    for std in (np.array([0.25, 0.5]), torch.tensor([[0.25], [0.5]])):
        assert InputPerturbation(0.1, std=std).std == expected
    assert InputPerturbation(0.1, std=np.float32(0.5)).std == (0.5,)


def test_bad_inputs_are_refused(classifier: Classifier, images: Tensor) -> None:
    perturb = InputPerturbation(0.0014)
    with pytest.raises(TypeError, match=r"a dict, expected one floating-point tensor.*token ids"):
        perturb({"input_ids": images}, classifier)
    with pytest.raises(TypeError, match=r"torch.int64, expected"):
        perturb(images.long(), classifier)
    with pytest.raises(ValueError, match="2 entries, expected one for each of the 3"):
        InputPerturbation(0.1, std=(1.0, 1.0))(images, classifier)
    with pytest.raises(ValueError, match="pass score="):
        InputPerturbation(0.1, objective="score")(images, classifier)
    with pytest.raises(ValueError, match="no gradient"):
        perturb(images, classifier, lambda batch: batch.features.detach().sum(1))
    with pytest.raises(ValueError, match=r"shape \(\), expected \(4,\)"):
        perturb(images, classifier, lambda batch: batch.features.sum())
