"""Our networks: parameter counts of the papers, names of public checkpoints, the questions they
answer."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from fdbd import networks as models
from fdbd.networks.architectures import (
    CifarResNet,
    CompactResNet,
    DenseNet,
    WideResNet,
    whiten_stem,
)

# He et al. (2016, table 6) give millions: 0.27, 0.46, 0.66, 0.85, 1.7; Huang et al. (2017) 0.8; the
# rest are of the widespread implementations.
PARAMETERS = {
    "resnet20": 269_722,
    "resnet32": 464_154,
    "resnet44": 658_586,
    "resnet56": 853_018,
    "resnet110": 1_727_962,
    "resnet18": 11_173_962,
    "resnet34": 21_282_122,
    "resnet50": 23_520_842,
    "densenet100": 769_162,
    "wrn40_2": 2_243_546,
}
FEATURES = {
    "resnet20": 64,
    "resnet18": 512,
    "resnet50": 2048,
    "densenet100": 342,
    "wrn40_2": 128,
    "resnet10_compact": 128,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count_is_the_published_one(name):
    assert models.count_parameters(models.create(name)) == PARAMETERS[name]


@pytest.mark.parametrize(
    "name", ["resnet20", "resnet18", "densenet22", "wrn40_2", "resnet10_compact"]
)
def test_head_on_pooled_features_is_the_forward_pass(name):
    torch.manual_seed(0)
    model = models.create(name, num_classes=7).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        features = model.forward_head(model.forward_features(images), pre_logits=True)
        head = model.get_classifier()
        assert isinstance(head, nn.Linear)
        assert features.shape == (2, model.num_features) == (2, head.in_features)
        assert bool((features >= 0).all())
        torch.testing.assert_close(head(features), model(images))
        assert model(images).shape == (2, 7)


@pytest.mark.parametrize(("name", "width"), FEATURES.items())
def test_feature_width(name, width):
    assert models.create(name).num_features == width


def test_densenet_has_the_public_names():
    keys = set(models.create("densenet100").state_dict())
    expected = {
        "conv1.weight",
        "bn1.running_mean",
        "fc.weight",
        "trans1.bn1.weight",
        "trans1.conv1.weight",
    }
    expected |= {f"block1.layer.0.{part}.weight" for part in ("bn1", "conv1", "bn2", "conv2")} | {
        "block3.layer.15.conv2.weight"
    }
    assert expected <= keys
    assert "block1.layer.16.conv1.weight" not in keys


def test_resnet18_has_the_public_names():
    keys = set(models.create("resnet18").state_dict())
    assert {
        "conv1.weight",
        "layer1.0.conv1.weight",
        "layer2.0.shortcut.0.weight",
        "linear.bias",
    } <= keys
    assert not any(key.startswith("layer1.0.shortcut") for key in keys)


def test_a_wrong_depth_says_which_are_possible():
    with pytest.raises(ValueError, match=r"6n\+2 layers, not 21"):
        CifarResNet(21)
    with pytest.raises(ValueError, match=r"6n\+4 layers, not 99"):
        DenseNet(99)
    with pytest.raises(ValueError, match=r"6n\+4 layers, not 39"):
        WideResNet(39)


def test_whitened_stem_decorrelates_patches():
    generator = torch.Generator().manual_seed(0)
    # Neighbours correlate, as in pictures.
    images = torch.randn(64, 3, 32, 32, generator=generator).cumsum(3) / 4
    model = CompactResNet()
    whiten_stem(model, images, eps=0.0)
    with torch.no_grad():
        out = (
            nn.functional.conv2d(images, model.stem.weight[:16], stride=2)
            .permute(1, 0, 2, 3)
            .flatten(1)
        )
    second_moment = out @ out.T / out.shape[1]
    torch.testing.assert_close(second_moment, torch.eye(16), atol=2e-3, rtol=0)


def test_importing_models_does_not_import_torchvision():
    code = (
        "import sys, fdbd.networks, fdbd.train; assert not {'torchvision', 'timm', 'tensorboard'} &"
        " set(sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120).returncode
        == 0
    )
