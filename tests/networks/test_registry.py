"""Models by name: ours, torchvision's, timm's, factories; and what is said when there is none."""

import sys
import types

import pytest
from torch import nn

from fdbd import networks as models


def tiny_factory(num_classes: int = 3, width: int = 4) -> nn.Module:
    return nn.Linear(width, num_classes)


def fixed_factory() -> nn.Module:
    return nn.Linear(2, 5)


def test_plain_name_is_ours_before_torchvision():
    assert isinstance(models.create("resnet18"), models.Network)


def test_torchvision_name_with_class_count():
    pytest.importorskip("torchvision")
    model = models.create("torchvision:squeezenet1_1", num_classes=6)
    assert model.num_classes == 6
    assert type(models.create("squeezenet1_1")) is type(model)


def test_timm_name_with_class_count():
    pytest.importorskip("timm")
    model = models.create("timm:test_resnet", num_classes=6)
    assert model.get_classifier().out_features == 6
    assert type(models.create("test_resnet")) is type(model)


def test_factory_takes_class_count_and_options(monkeypatch):
    module = types.ModuleType("my_networks")
    module.tiny, module.fixed = tiny_factory, fixed_factory
    monkeypatch.setitem(sys.modules, "my_networks", module)
    assert models.create("my_networks:tiny", num_classes=4, width=2).weight.shape == (4, 2)
    assert models.create("my_networks:fixed", num_classes=9).out_features == 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet19x", "no model 'resnet19x': ours are densenet100"),
        ("torchvision:nope", "torchvision has no model 'nope'"),
        ("timm:nope", "timm has no model 'nope'"),
        ("no.such.package:make", "cannot import the model factory no.such.package:make"),
        ("collections:nope", "cannot import the model factory collections:nope"),
        ("math:pi", "math:pi is a float, expected a function"),
        ("platform:machine", "gave a str, not a torch module"),
    ],
)
def test_bad_names_are_one_clear_sentence(name, message):
    pytest.importorskip("torchvision")
    pytest.importorskip("timm")
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        models.create(name)


def test_missing_extra_names_the_pip_command(monkeypatch):
    for module in ("torchvision", "torchvision.models", "timm"):
        # As if it were not installed.
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ImportError, match=r"torchvision is not installed; run: pip install 'fdbd\[vision\]'"
    ):
        models.create("torchvision:resnet18")
    with pytest.raises(
        ImportError, match=r"timm is not installed; run: pip install 'fdbd\[vision\]'"
    ):
        models.create("timm:resnet18")


def test_nonsense_class_count_is_refused():
    with pytest.raises(ValueError, match="num_classes must be at least 1, not 0"):
        models.create("resnet20", num_classes=0)


def test_list_models_filters():
    assert models.list_models("dense*") == ["densenet100", "densenet22"]
    assert {"resnet20", "resnet110", "wrn40_2"} <= set(models.list_models())
