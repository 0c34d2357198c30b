"""Networks by name: ours, torchvision's, timm's, or any importable factory."""

from __future__ import annotations

import fnmatch
import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from fdbd.networks.architectures.compact_resnet import CompactResNet
from fdbd.networks.architectures.densenet import DenseNet
from fdbd.networks.architectures.resnet import BasicBlock, Bottleneck, CifarResNet, ResNet
from fdbd.networks.architectures.wide_resnet import WideResNet
from fdbd.networks.checkpoint import load_checkpoint
from fdbd.util.extras import require
from fdbd.util.imports import import_object

_OURS: dict[str, Callable[[int], nn.Module]] = {
    **{f"resnet{depth}": partial(CifarResNet, depth) for depth in (20, 32, 44, 56, 110)},
    "resnet18": partial(ResNet, BasicBlock, (2, 2, 2, 2)),
    "resnet34": partial(ResNet, BasicBlock, (3, 4, 6, 3)),
    "resnet50": partial(ResNet, Bottleneck, (3, 4, 6, 3), expansion=4),
    "densenet100": partial(DenseNet, 100, 12),
    "densenet22": partial(DenseNet, 22, 12),
    "wrn40_2": partial(WideResNet, 40, 2),
    "resnet10_compact": CompactResNet,
}
LIBRARIES = ("torchvision", "timm")


def list_models(pattern: str = "*") -> list[str]:
    """Names of our networks that match a shell pattern; all are for 32×32 images.

    >>> list_models("resnet1*")
    ['resnet10_compact', 'resnet110', 'resnet18']
    """
    return sorted(fnmatch.filter(_OURS, pattern))


def create(
    name: str, num_classes: int | None = 10, checkpoint: str | os.PathLike[str] | None = None, **options: Any
) -> nn.Module:
    """A network by name, with its weights from `checkpoint` if given.

    name: one of `list_models()`; `torchvision:NAME` or `timm:NAME`; a plain name that is not ours is looked up in both;
    `package.module:function` calls any importable factory, with `num_classes` if it takes it; options go to it.
    num_classes: None leaves it to the factory, and is 10 elsewhere.

    >>> create("resnet20", num_classes=100).get_classifier()
    Linear(in_features=64, out_features=100, bias=True)
    """
    if num_classes is not None and num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, not {num_classes}")
    model = _build(name, num_classes, options)
    return model if checkpoint is None else load_checkpoint(model, checkpoint)


def _build(name: str, num_classes: int | None, options: dict[str, Any]) -> nn.Module:
    source, _, rest = name.partition(":")
    if rest and source not in LIBRARIES:
        return _factory(name, num_classes, options)
    num_classes = 10 if num_classes is None else num_classes
    if name in _OURS:
        if options:
            raise ValueError(f"{name} takes no options, not {', '.join(options)}")
        return _OURS[name](num_classes)
    for library in (source,) if rest else LIBRARIES:
        model = _from_library(library, rest or name, num_classes, options)
        if model is not None:
            return model
    if rest:
        raise ValueError(f"{source} has no model {rest!r}")
    raise ValueError(
        f"no model {name!r}: ours are {', '.join(list_models())}; torchvision and timm have none of that name"
    )


def _from_library(library: str, name: str, num_classes: int, options: dict[str, Any]) -> nn.Module | None:
    made: nn.Module | None = None
    if library == "torchvision":
        torchvision = require("torchvision.models", "vision")
        if name in torchvision.list_models():
            made = torchvision.get_model(name, **{"weights": None, "num_classes": num_classes, **options})
    elif (timm := require("timm", "vision")).is_model(name):
        made = timm.create_model(name, **{"pretrained": False, "num_classes": num_classes, **options})
    return made


def _factory(name: str, num_classes: int | None, options: dict[str, Any]) -> nn.Module:
    factory = import_object(name, "model factory")
    if not callable(factory):
        raise ValueError(f"{name} is no function")
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    if num_classes is not None and any(p.name == "num_classes" or p.kind is p.VAR_KEYWORD for p in parameters):
        options = {"num_classes": num_classes, **options}
    model = factory(**options)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} gave a {type(model).__name__}, not a torch module")
    return model
