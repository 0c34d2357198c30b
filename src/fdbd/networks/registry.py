"""Networks by name: ours, torchvision's, timm's, or any importable factory; what the two libraries publish with a model
(weights, how images are prepared, class names); and the zoo: small CIFAR-10 classifiers that come with the package,
trained by `fdbd train zoo-ce` and `zoo-supcon`."""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fdbd.data.preprocessing import Preprocess
from fdbd.networks.architectures import CifarResNet, CompactResNet, DenseNet, ResNet, WideResNet, basic, bottleneck
from fdbd.networks.checkpoint import load_checkpoint, read_metadata
from fdbd.util.extras import import_object, require

_OURS: dict[str, Callable[..., nn.Module]] = {
    **{f"resnet{depth}": partial(CifarResNet, depth) for depth in (20, 32, 44, 56, 110)},
    "resnet18": partial(ResNet, basic, (2, 2, 2, 2)),
    "resnet34": partial(ResNet, basic, (3, 4, 6, 3)),
    "resnet50": partial(ResNet, bottleneck, (3, 4, 6, 3), expansion=4),
    "densenet100": partial(DenseNet, 100, 12),
    "densenet22": partial(DenseNet, 22, 12),
    "wrn40_2": partial(WideResNet, 40, 2),
    "resnet10_compact": CompactResNet,
}
LIBRARIES = ("torchvision", "timm")
_ZOO = Path(__file__).parent / "weights"


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
    source, _, rest = name.partition(":")
    classes = {"num_classes": 10 if num_classes is None else num_classes}
    model: nn.Module | None
    if name in _OURS:
        if options:
            raise ValueError(f"{name} takes no options, not {', '.join(options)}")
        model = _OURS[name](**classes)
    elif rest and source not in LIBRARIES:
        model = _factory(name, num_classes, options)
    else:
        found = (_from_library(each, rest or name, classes | options) for each in ([source] if rest else LIBRARIES))
        model = next((made for made in found if made is not None), None)
    if model is None:
        ours = f"ours are {', '.join(list_models())}; torchvision and timm have none of that name"
        raise ValueError(f"{source} has no model {rest!r}" if rest else f"no model {name!r}: {ours}")
    return model if checkpoint is None else load_checkpoint(model, checkpoint)


def _from_library(library: str, name: str, options: dict[str, Any]) -> nn.Module | None:
    made: nn.Module | None = None
    if library == "torchvision":
        torchvision = require("torchvision.models", "vision")
        if name in torchvision.list_models():
            made = torchvision.get_model(name, **{"weights": None} | options)
    elif (timm := require("timm", "vision")).is_model(name):
        made = timm.create_model(name, **{"pretrained": False} | options)
    return made


def _factory(name: str, num_classes: int | None, options: dict[str, Any]) -> nn.Module:
    factory = import_object(name, "model factory")
    if not callable(factory):
        raise ValueError(f"{name} is no function")
    parameters: list[inspect.Parameter] = []
    with contextlib.suppress(TypeError, ValueError):  # some built-in functions have no signature
        parameters = list(inspect.signature(factory).parameters.values())
    if num_classes is not None and any(p.name == "num_classes" or p.kind is p.VAR_KEYWORD for p in parameters):
        options = {"num_classes": num_classes, **options}
    model = factory(**options)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} gave a {type(model).__name__}, not a torch module")
    return model


class Published(NamedTuple):
    """A model with published weights; `models.create(name, num_classes, **options)` loads them."""

    name: str  #: with its source: `timm:…` or `torchvision:…`
    num_classes: int
    options: dict[str, Any]
    preprocess: Preprocess
    class_names: tuple[str, ...]
    is_here: bool  #: whether they are downloaded already
    how: str  #: how to get the file by hand


def find_published(name: str) -> Published | None:
    """What is published under a name of torchvision or timm, with or without its source; None: nothing."""
    source, _, rest = name.partition(":")
    if not rest:
        return _torchvision(name) or _timm(name)
    return _torchvision(rest) if source == "torchvision" else _timm(rest) if source == "timm" else None


def _torchvision(name: str) -> Published | None:
    """`name` may end in one of several weights: resnet50.IMAGENET1K_V1."""
    library = require("torchvision.models", "vision")
    name, _, chosen = name.partition(".")
    if name not in library.list_models(module=library):
        return None
    available = library.get_model_weights(name)
    if chosen and chosen not in available.__members__:
        known = ", ".join(available.__members__)
        raise ValueError(f"torchvision:{name} has no weights {chosen!r}, expected one of {known}")
    weights = available[chosen or "DEFAULT"]
    said, names = weights.transforms(), tuple(weights.meta["categories"])
    sides, interpolation = (said.crop_size[0], said.resize_size[0]), said.interpolation.value
    preprocess = Preprocess(sides[0], said.mean, said.std, sides[1], interpolation=interpolation)
    folder, file = Path(torch.hub.get_dir(), "checkpoints"), weights.url.rpartition("/")[2]
    how, is_here = f"put {file} from {weights.url} in {folder}, or", (folder / file).is_file()
    return Published(f"torchvision:{name}", len(names), {"weights": weights}, preprocess, names, is_here, how)


def _timm(name: str) -> Published | None:
    timm = require("timm", "vision")
    config = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    if config is None or not config.has_weights:
        return None
    size = config.input_size[-1]
    cut = (None, "none") if config.crop_mode == "squash" else (math.floor(size / config.crop_pct), "centre")
    preprocess = Preprocess(size, config.mean, config.std, cut[0], cut[1], config.interpolation)
    hub = require("huggingface_hub", "vision")
    kept = hub.try_to_load_from_cache(config.hf_hub_id, "model.safetensors") if config.hf_hub_id else None
    url = f"https://huggingface.co/{config.hf_hub_id}" if config.hf_hub_id else config.url
    how, is_here = f"get model.safetensors from {url} and", isinstance(kept, str)
    return Published(f"timm:{name}", config.num_classes, {"pretrained": True}, preprocess, (), is_here, how)


@dataclass(frozen=True)
class ZooCard:
    """What a shipped model is; `recipe` is the preset's name, `test_accuracy` a fraction.

    >>> zoo_card("cifar10-supcon").recipe
    'zoo-supcon'
    """

    name: str
    model: str
    num_classes: int
    recipe: str
    seed: int
    dataset: str
    test_accuracy: float
    preprocess: Preprocess
    path: Path

    @property
    def text(self) -> str:
        """The card as Markdown."""
        return self.path.with_suffix(".md").read_text(encoding="utf-8")


def list_zoo() -> list[str]:
    """Names of the shipped models.

    >>> list_zoo()
    ['cifar10-ce', 'cifar10-supcon']
    """
    return sorted(path.stem for path in _ZOO.glob("*.safetensors"))


def zoo_card(name: str) -> ZooCard:
    """What the shipped model `name` is, without loading its weights.

    >>> zoo_card("cifar10-supcon").recipe
    'zoo-supcon'
    """
    if name not in list_zoo():
        raise ValueError(f"no zoo model {name!r}: there are {', '.join(list_zoo())}")
    path = _ZOO / f"{name}.safetensors"
    about = read_metadata(path)  # a weights file says itself what it is; the card beside it says the same to people
    values: dict[str, Any] = {key: about[key] for key in ("model", "recipe", "dataset")}
    values |= {key: json.loads(about[key]) for key in ("num_classes", "seed", "test_accuracy")}
    mean, std = (json.loads(about[key]) for key in ("mean", "std"))
    return ZooCard(name, path=path, preprocess=Preprocess(32, mean, std), **values)


def zoo(name: str) -> nn.Module:
    """A shipped model with its weights, in evaluation mode; `zoo_card(name).preprocess` makes its inputs.

    >>> import torch
    >>> zoo("cifar10-ce")(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 10])
    """
    card = zoo_card(name)
    return load_checkpoint(create(card.model, card.num_classes), card.path).eval()
