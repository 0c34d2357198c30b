"""Heads that look at the direction of features alone are linear in normalised features."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fdbd
from fdbd.networks import CosineHead
from fdbd.networks.classifier import Classifier
from fdbd.networks.sphere import linear_on_sphere


class ArcFace(nn.Module):
    """As in many repositories: (C, P) weights, a fixed scale, a margin in training alone."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, features))
        self.s = 16.0

    def forward(self, x: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(x), F.normalize(self.weight))
        return self.s * (cosine - 0.2 if self.training else cosine)


class Kernel(nn.Module):
    """As in CosFace's: (P, C) weights under another name."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(features, classes))

    def forward(self, x: Tensor) -> Tensor:
        return 30 * F.normalize(x) @ F.normalize(self.kernel, dim=0)


class Prompts(nn.Module):
    """As in SigLIP: a learned scale, as a logarithm, and a bias."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.text_embeds = nn.Parameter(torch.randn(classes, features))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.logit_bias = nn.Parameter(torch.tensor(-3.0))

    def forward(self, x: Tensor) -> Tensor:
        cosine = F.normalize(x, dim=-1) @ F.normalize(self.text_embeds, dim=-1).T
        return cosine * self.logit_scale.exp() + self.logit_bias


class OnlyInputs(nn.Linear):
    """Normalised features before ordinary weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.normalize(x))


HEADS = [ArcFace, Kernel, Prompts, OnlyInputs]


def network(head: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), head)


@pytest.mark.parametrize("kind", HEADS)
def test_logits_are_linear_in_the_normalised_features(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = network(kind(8, 5)).eval()
    inputs = torch.randn(7, 6)
    classifier = Classifier(model)
    batch = classifier(inputs)
    torch.testing.assert_close(batch.features, F.normalize(model[:2](inputs)))
    torch.testing.assert_close(batch.logits, model(inputs))
    torch.testing.assert_close(classifier.head(batch.features), model(inputs))
    assert classifier.head_name == "2"
    named = Classifier(model, head="2")
    assert torch.equal(named(inputs).features, batch.features)


def test_the_head_follows_the_scale() -> None:
    torch.manual_seed(0)
    model = network(Prompts(8, 5)).eval()
    classifier = Classifier(model)
    before = classifier.head.weight
    model[2].logit_scale.data += torch.log(torch.tensor(2.0))
    torch.testing.assert_close(classifier.head.weight, 2 * before)


def test_a_margin_of_training_is_left_out_and_the_mode_is_kept() -> None:
    head = ArcFace(8, 5)
    assert head.training
    found = linear_on_sphere(head)
    assert found is not None
    assert head.training
    torch.testing.assert_close(found.bias, torch.zeros(5), atol=1e-4, rtol=0)


def test_a_guard_on_a_cosine_head_decides_and_is_saved(tmp_path) -> None:
    torch.manual_seed(0)
    model = network(ArcFace(8, 5)).eval()
    guard = fdbd.Guard(model).fit([torch.randn(500, 6)], progress=False)
    guard.calibrate([torch.randn(500, 6)], progress=False)
    inputs = torch.randn(9, 6)
    expected = guard(inputs)
    guard.save(tmp_path / "guard.safetensors")
    loaded = fdbd.load(tmp_path / "guard.safetensors", copy.deepcopy(model))
    assert torch.equal(loaded(inputs).scores, expected.scores)
    features = F.normalize(model[:2](inputs))
    torch.testing.assert_close(guard.decide(fdbd.Batch(features)).scores, expected.scores)


def test_prompts_and_an_encoder_are_a_zero_shot_classifier() -> None:
    torch.manual_seed(0)
    encoder = nn.Linear(6, 8)
    prompts = torch.randn(4, 8)
    model = nn.Sequential(encoder, CosineHead(prompts, scale=100.0, bias=-1.0))
    inputs = torch.randn(3, 6)
    expected = 100 * F.cosine_similarity(encoder(inputs)[:, None], prompts[None], dim=2) - 1
    batch = Classifier(model)(inputs)
    torch.testing.assert_close(batch.logits, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    "module", [nn.Embedding(5, 8), nn.Linear(8, 5), nn.Bilinear(8, 8, 3), nn.LayerNorm(8)]
)
def test_other_layers_are_not_taken_for_heads_on_the_sphere(module: nn.Module) -> None:
    assert linear_on_sphere(module) is None


def test_cosines_under_a_softmax_are_not_linear_on_the_sphere() -> None:
    class Soft(ArcFace):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).softmax(1)

    assert linear_on_sphere(Soft(8, 5)) is None


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        (torch.ones(3), 1.0, "expected \\(classes, features\\)"),
        (torch.zeros(3, 4), 1.0, "a row of zeros"),
        (torch.full((3, 4), torch.nan), 1.0, "NaN"),
        (torch.ones(3, 4), 0.0, "scale is 0.0, expected a positive number"),
        (torch.ones(3, 4), float("nan"), "expected a positive number"),
    ],
)
def test_bad_weights_of_a_cosine_head_are_one_sentence(
    weight: Tensor, scale: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CosineHead(weight, scale)


def test_weight_normalised_layers_are_linear_heads_with_their_effective_weights() -> None:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 5))
    model = network(layer).eval()
    classifier = Classifier(model)
    batch = classifier(torch.randn(3, 6))
    torch.testing.assert_close(classifier.head(batch.features), batch.logits)
    torch.testing.assert_close(classifier.head.weight, layer.weight)
