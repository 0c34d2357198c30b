"""What torchvision and timm publish of a model beside its code: weights, how images are prepared, class names."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fdbd.data.preprocessing import Preprocess
from fdbd.util.extras import require


class Published(NamedTuple):
    """A model with published weights; `models.create(name, num_classes, **options)` loads them."""

    name: str
    """With its source: ``timm:…`` or ``torchvision:…``."""
    num_classes: int
    options: dict[str, Any]
    preprocess: Preprocess
    class_names: tuple[str, ...]


def find_published(name: str) -> Published | None:
    """What is published under a name of torchvision or timm, with or without its source; None: nothing."""
    source, _, rest = name.partition(":")
    if not rest:
        return _torchvision(name) or _timm(name)
    finder = {"torchvision": _torchvision, "timm": _timm}.get(source)
    return None if finder is None else finder(rest)


def _torchvision(name: str) -> Published | None:
    """`name` may end in one of several weights: resnet50.IMAGENET1K_V1."""
    library = require("torchvision.models", "vision")
    name, _, chosen = name.partition(".")
    if name not in library.list_models(module=library):
        return None
    available = library.get_model_weights(name)
    if chosen and chosen not in available.__members__:
        raise ValueError(
            f"torchvision:{name} has no weights {chosen!r}, expected one of {', '.join(available.__members__)}"
        )
    weights = available[chosen or "DEFAULT"]
    transforms = weights.transforms()
    preprocess = Preprocess(
        transforms.crop_size[0],
        tuple(transforms.mean),
        tuple(transforms.std),
        resize=transforms.resize_size[0],
        interpolation=transforms.interpolation.value,
    )
    names = tuple(weights.meta["categories"])
    return Published(f"torchvision:{name}", len(names), {"weights": weights}, preprocess, names)


def _timm(name: str) -> Published | None:
    timm = require("timm", "vision")
    config = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    if config is None or not config.has_weights:
        return None
    size = config.input_size[-1]
    squashes = config.crop_mode == "squash"
    preprocess = Preprocess(
        size,
        tuple(config.mean),
        tuple(config.std),
        resize=None if squashes else math.floor(size / config.crop_pct),
        crop="none" if squashes else "centre",
        interpolation=config.interpolation,
    )
    return Published(f"timm:{name}", config.num_classes, {"pretrained": True}, preprocess, ())
