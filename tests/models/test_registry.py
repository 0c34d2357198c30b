"""Models by name: ours, torchvision's, timm's, factories; and what is said when there is none."""

import importlib

import pytest
from torch import nn

from fdbd import models


def tiny_factory(num_classes: int = 3, width: int = 4) -> nn.Module:
    return nn.Linear(width, num_classes)


def not_a_model() -> str:
    return "model"


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
    name = f"{__name__}:tiny_factory"
    monkeypatch.setitem(importlib.sys.modules, __name__, importlib.sys.modules.get(__name__) or _this())
    assert models.create(name, num_classes=4, width=2).weight.shape == (4, 2)
    assert models.create(f"{__name__}:fixed_factory", num_classes=9).out_features == 5


def _this():
    import types

    module = types.ModuleType(__name__)
    module.tiny_factory, module.fixed_factory, module.not_a_model = tiny_factory, fixed_factory, not_a_model
    return module


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet19x", "no model 'resnet19x': ours are densenet100"),
        ("torchvision:nope", "torchvision has no model 'nope'"),
        ("timm:nope", "timm has no model 'nope'"),
        ("no.such.package:make", "cannot import the model factory no.such.package:make"),
        ("collections:nope", "cannot import the model factory collections:nope"),
        ("math:pi", "math:pi is no function"),
        ("time:time", "gave a float, not a torch module"),
    ],
)
def test_bad_names_are_one_clear_sentence(name, message):
    pytest.importorskip("torchvision")
    pytest.importorskip("timm")
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        models.create(name)


def test_missing_extra_names_the_pip_command(monkeypatch):
    def missing(name, *args):
        raise ImportError(name)

    monkeypatch.setattr("fdbd.models.registry.importlib.import_module", missing)
    with pytest.raises(ImportError, match=r"needs torchvision: pip install 'fdbd\[vision\]'"):
        models.create("torchvision:resnet18")
    with pytest.raises(ImportError, match=r"needs timm: pip install 'fdbd\[vision\]'"):
        models.create("timm:resnet18")


def test_nonsense_class_count_is_refused():
    with pytest.raises(ValueError, match="num_classes must be at least 1, not 0"):
        models.create("resnet20", num_classes=0)


def test_list_models_filters():
    assert models.list_models("dense*") == ["densenet100", "densenet22"]
    assert {"resnet20", "resnet110", "wrn40_2"} <= set(models.list_models())
