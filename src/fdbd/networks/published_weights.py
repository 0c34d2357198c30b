"""What torchvision and timm publish of a model beside its code: weights, how images are prepared, class names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

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
    is_here: bool
    """Whether they are downloaded already."""
    how: str
    """How to get the file by hand."""


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
    folder, file = Path(torch.hub.get_dir(), "checkpoints"), weights.url.rpartition("/")[2]
    how, is_here = f"put {file} from {weights.url} in {folder}, or", (folder / file).is_file()
    return Published(f"torchvision:{name}", len(names), {"weights": weights}, preprocess, names, is_here, how)


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
    hub = require("huggingface_hub", "vision")
    kept = hub.try_to_load_from_cache(config.hf_hub_id, "model.safetensors") if config.hf_hub_id else None
    url = f"https://huggingface.co/{config.hf_hub_id}" if config.hf_hub_id else config.url
    how, is_here = f"get model.safetensors from {url} and", isinstance(kept, str)
    return Published(f"timm:{name}", config.num_classes, {"pretrained": True}, preprocess, (), is_here, how)
