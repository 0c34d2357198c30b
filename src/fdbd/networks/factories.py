"""Architectures by name, without trained weights: ours, torchvision's, timm's and a user's own
factories."""

from __future__ import annotations

import fnmatch
import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from fdbd.networks.architectures import (
    Basic,
    Bottleneck,
    CifarResNet,
    CompactResNet,
    DenseNet,
    ResNet,
    WideResNet,
)
from fdbd.networks.checkpoint import load_checkpoint
from fdbd.networks.small import SmallCNN, SmallTransformer
from fdbd.util.extras import import_object, require

_OURS: dict[str, Callable[..., nn.Module]] = {
    "resnet20": partial(CifarResNet, 20),
    "resnet32": partial(CifarResNet, 32),
    "resnet44": partial(CifarResNet, 44),
    "resnet56": partial(CifarResNet, 56),
    "resnet110": partial(CifarResNet, 110),
    "resnet18": partial(ResNet, Basic, (2, 2, 2, 2)),
    "resnet34": partial(ResNet, Basic, (3, 4, 6, 3)),
    "resnet50": partial(ResNet, Bottleneck, (3, 4, 6, 3), expansion=4),
    "densenet100": partial(DenseNet, 100, 12),
    "densenet22": partial(DenseNet, 22, 12),
    "wrn40_2": partial(WideResNet, 40, 2),
    "resnet10_compact": CompactResNet,
    "small_cnn": SmallCNN,
    "small_vit": SmallTransformer,
}


def list_models(pattern: str = "*") -> list[str]:
    """Names of our networks that match a shell pattern; all are for 32×32 images.

    >>> list_models("resnet1*")
    ['resnet10_compact', 'resnet110', 'resnet18']
    """
    return sorted(fnmatch.filter(_OURS, pattern))


def create(
    name: str,
    num_classes: int | None = 10,
    checkpoint: str | os.PathLike[str] | None = None,
    **options: Any,
) -> nn.Module:
    """A network by name, with its weights from `checkpoint` if given.

    Args:
        name: one of `list_models()`; ``torchvision:NAME`` or ``timm:NAME``, or NAME alone, which is
            looked up in both; or ``package.module:function``, a factory to be imported and called.
        num_classes: C; None: as the factory has it, and 10 for all other names. A factory is given
            it only if it takes an argument of this name.
        checkpoint: weights, as `load_checkpoint` reads them.
        **options: further arguments of the network's constructor or factory.

    >>> create("resnet20", num_classes=100).get_classifier()
    Linear(in_features=64, out_features=100, bias=True)
    """
    if num_classes is not None and num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, not {num_classes}")
    source, _, rest = name.partition(":")
    if name in _OURS:
        model = _OURS[name](num_classes=num_classes or 10, **options)
    elif rest and source not in ("torchvision", "timm"):
        model = _call_factory(name, num_classes, options)
    else:
        library = source if rest else None
        model = _from_library(library, rest or name, num_classes or 10, options)
    return model if checkpoint is None else load_checkpoint(model, checkpoint)


def _from_library(
    library: str | None, name: str, num_classes: int, options: dict[str, Any]
) -> nn.Module:
    """A model of torchvision or of timm; of the first that has it if `library` is None."""
    if library in (None, "torchvision"):
        torchvision = require("torchvision.models", "vision")
        if name in torchvision.list_models():
            options = {"weights": None, "num_classes": num_classes, **options}
            model: nn.Module = torchvision.get_model(name, **options)
            return model
    if library in (None, "timm"):
        timm = require("timm", "vision")
        if timm.is_model(name):
            options = {"pretrained": False, "num_classes": num_classes, **options}
            model = timm.create_model(name, **options)
            return model
    if library is not None:
        raise ValueError(f"{library} has no model {name!r}")
    raise ValueError(
        f"no model {name!r}: ours are {', '.join(list_models())}; torchvision and timm have none "
        "of that name"
    )


def _call_factory(name: str, num_classes: int | None, options: dict[str, Any]) -> nn.Module:
    factory = import_object(name, "model factory")
    if not callable(factory):
        raise ValueError(f"{name} is a {type(factory).__name__}, expected a function")
    if num_classes is not None and _takes_num_classes(factory):
        options = {"num_classes": num_classes, **options}
    model = factory(**options)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} gave a {type(model).__name__}, not a torch module")
    return model


def _takes_num_classes(factory: Callable[..., object]) -> bool:
    parameters = inspect.signature(factory).parameters.values()
    return any(
        parameter.name == "num_classes" or parameter.kind is parameter.VAR_KEYWORD
        for parameter in parameters
    )
