"""From the name that a user types, or that a file holds, to a model with its weights and its
preprocessing. The architectures alone are made by `fdbd.networks.factories`."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fdbd.core.batch import Head
from fdbd.core.class_names import CLASS_NAMES
from fdbd.core.preprocessing import Preprocess
from fdbd.core.tokenizer import TextTokenizer
from fdbd.networks.checkpoint import read_weights
from fdbd.networks.exported import load_exported
from fdbd.networks.factories import create, list_models
from fdbd.networks.find_head import find_heads
from fdbd.networks.hugging_face import hugging_face_model
from fdbd.networks.public import public_network
from fdbd.networks.sentence_model import sentence_transformer
from fdbd.networks.wrapped import weights_hash
from fdbd.networks.zoo import list_zoo, zoo, zoo_card
from fdbd.util.devices import choose_device
from fdbd.util.extras import require
from fdbd.util.files import data_roots, downloads_allowed
from fdbd.util.terminal import one_line

SENTENCES = "sentences"
"""The source of sentence encoders, which need a head."""


@dataclass(frozen=True)
class NamedModel:
    """A model in eval mode, on its device, and what is known of it."""

    model: nn.Module
    #: one line about the weights, such as "resnet20, weights resnet20.th"
    weights: str
    #: None if only the model itself can tell
    num_classes: int | None = None
    #: how images are prepared; None if neither the model nor the user says
    preprocess: Preprocess | None = None
    #: one per class, or none
    class_names: tuple[str, ...] = ()
    #: whether the weights are random; a warning was given
    untrained: bool = False
    #: JSON values to build it again, and its `weights_hash`
    origin: dict[str, Any] = field(default_factory=dict)
    #: how texts are prepared; None: the model takes none
    tokenizer: TextTokenizer | None = None


@dataclass(frozen=True)
class _Published:
    """The weights that are published under a name, and what is known of them."""

    load: Callable[[], nn.Module]
    weights: str
    num_classes: int | None = None
    preprocess: Preprocess | None = None
    class_names: tuple[str, ...] = ()
    architecture: str | None = None
    """The name that `create` takes for other weights or classes; None: there are no others."""
    tokenizer: TextTokenizer | None = None


@dataclass(frozen=True)
class _Built:
    """A model, and what is known of the weights that it was given."""

    model: nn.Module
    weights: str
    num_classes: int | None
    class_names: tuple[str, ...] = ()
    untrained: bool = False


def model_by_name(
    name: str,
    checkpoint: str | os.PathLike[str] | None = None,
    *,
    num_classes: int | None = None,
    preprocess: str | Mapping[str, Any] | Preprocess | None = None,
    device: str | torch.device | None = "auto",
    trust: bool = False,
    named_by: str | os.PathLike[str] | None = None,
    allow_untrained: bool = False,
    head: Head | None = None,
) -> NamedModel:
    """The model that a name stands for, with weights: the same in every command, config and guard
    file. ValueError if there is no such model, or no weights for it.

    Args:
        name: a zoo model, ``NAME`` or ``zoo:NAME``; ``public:NAME``, one of
            `fdbd.networks.public.NETWORKS`; ``timm:NAME`` or ``torchvision:NAME``, or such a name
            alone, with its published weights (torchvision's ``NAME.WEIGHTS`` chooses among
            several); ``hf:FOLDER_OR_NAME``, a sequence classifier of Hugging Face's transformers
            with its tokenizer; ``sentences:FOLDER_OR_NAME``, a sentence encoder, with `head`; one
            of `fdbd.networks.list_models()`; ``package.module:factory``, also from the current
            folder, whose factory may bring its own weights; or a ``.pt2`` file of `torch.export`.
        checkpoint: weights, as `fdbd.networks.load_checkpoint` reads them, as the path stands or
            below ``FDBD_DATA``.
        num_classes: C; None: as the checkpoint or the published weights have it.
        preprocess: as for `Preprocess.parse`; None: the model's own.
        device: where the model goes, as for `choose_device`.
        trust: the user confirms that code may run: for a ``.pt2`` file, and for a factory that a
            file names.
        named_by: the config or guard file that holds `name`, and does not choose what code runs;
            None: the user.
        allow_untrained: take random weights, with a warning, if there are no others, instead of
            raising.
        head: the classifier on top of a sentence encoder, which has none of its own.
    """
    if model_runs_code(name) and named_by is not None and not trust:
        raise ValueError(
            f"{os.fspath(named_by)!r} names the model {name}, which is code to run: say that you "
            "trust it (--trust-model), or name the model yourself"
        )
    published = _find_published(name, trust, head)
    if checkpoint is not None:
        if published is not None and published.architecture is None:
            raise ValueError(f"{name} has its own weights: leave the checkpoint out")
        checkpoint = _find_checkpoint(os.fspath(checkpoint))
        built = _with_checkpoint(name, published, checkpoint, num_classes)
    elif published is not None and _has_classes(published, num_classes):
        built = _Built(
            published.load(), published.weights, published.num_classes, published.class_names
        )
    else:
        built = _without_weights(name, num_classes, allow_untrained)
    own_preprocess = None
    tokenizer = None
    if published is not None:
        own_preprocess = published.preprocess
        tokenizer = published.tokenizer
    if preprocess is not None:
        own_preprocess = Preprocess.parse(preprocess)
    return NamedModel(
        model=built.model.eval().to(choose_device(device)),
        weights=built.weights,
        num_classes=built.num_classes,
        preprocess=own_preprocess,
        class_names=built.class_names,
        untrained=built.untrained,
        origin=_origin(name, checkpoint, built, tokenizer),
        tokenizer=tokenizer,
    )


def _origin(
    name: str, checkpoint: str | None, built: _Built, tokenizer: TextTokenizer | None
) -> dict[str, Any]:
    """What a guard file keeps, to build the model again and to know that it is the same."""
    origin: dict[str, Any] = {"name": _absolute(name)}
    if checkpoint is not None:
        origin["checkpoint"] = os.path.abspath(checkpoint)
    if built.num_classes is not None:
        origin["num_classes"] = built.num_classes
    origin["weights"] = weights_hash(built.model)
    if tokenizer is not None:
        origin["tokenizer"] = tokenizer.to_dict()
    return origin


def _has_classes(published: _Published, num_classes: int | None) -> bool:
    """Whether the published weights are the ones to take: there are no others under this name, or
    they have as many classes as asked for."""
    return published.architecture is None or num_classes in (None, published.num_classes)


def _with_checkpoint(
    name: str, published: _Published | None, checkpoint: str, num_classes: int | None
) -> _Built:
    architecture = name
    if published is not None and published.architecture is not None:
        architecture = published.architecture
    if num_classes is None:
        num_classes = _classes_in(checkpoint, architecture)
    model = create(architecture, num_classes, checkpoint)
    return _Built(model, f"{architecture}, weights {checkpoint}", num_classes)


def _classes_in(checkpoint: str, architecture: str) -> int | None:
    """The number of classes of a checkpoint's head; None if the names of its tensors do not
    tell."""
    head = next(iter(find_heads(create(architecture, None), None)))
    weight = read_weights(checkpoint).get(f"{head}.weight")
    return None if weight is None else len(weight)


def _without_weights(name: str, num_classes: int | None, allow_untrained: bool) -> _Built:
    """The model as its factory makes it, if that one is trained; else with random weights, if these
    are allowed."""
    model = create(name, num_classes)
    if model_runs_code(name) and not _is_initial(model):
        return _Built(model, f"{name}, as its factory makes it", num_classes)
    if not allow_untrained:
        raise ValueError(f"{name} comes without weights: give them with --checkpoint")
    warnings.warn(
        f"UNTRAINED WEIGHTS: {name} has random weights, and every number from it is noise; give a "
        "checkpoint",
        stacklevel=3,
    )
    return _Built(model, f"{name}, UNTRAINED WEIGHTS", num_classes, untrained=True)


def model_runs_code(name: str) -> bool:
    """Whether building the model runs code that its name chooses: a factory, or a ``.pt2`` file."""
    if _is_export(name):
        return True
    source, _, rest = name.partition(":")
    is_data = source in _SOURCES or source == SENTENCES
    return bool(rest) and not is_data


def _is_export(name: str) -> bool:
    return name.endswith(".pt2")


def _absolute(name: str) -> str:
    """The name as a guard file keeps it: paths of files and folders in full."""
    source, _, rest = name.partition(":")
    if source in ("hf", SENTENCES) and Path(rest).expanduser().is_dir():
        return f"{source}:{Path(rest).expanduser().absolute()}"
    return os.path.abspath(name) if _is_export(name) else name


def _find_published(name: str, trust: bool, head: Head | None) -> _Published | None:
    """The weights that are published under a name, with or without its source; None if there are
    none, or if the name is a factory's."""
    source, _, rest = name.partition(":")
    if _is_export(name):
        return _Published(lambda: load_exported(name, trust=trust), f"{name}, a torch.export file")
    if source == SENTENCES and rest:
        return _sentences(rest, head)
    if rest:
        find = _SOURCES.get(source)
        return None if find is None else find(rest)
    if name in list_zoo():
        return _zoo(name)
    if name in list_models():
        return None
    return _torchvision(name) or _timm(name)


def _zoo(name: str) -> _Published:
    card = zoo_card(name)
    return _Published(
        load=lambda: zoo(name),
        weights=f"{name} of the zoo ({card.recipe}, seed {card.seed})",
        num_classes=card.num_classes,
        preprocess=card.preprocess,
        class_names=CLASS_NAMES[card.dataset],
    )


def _public(name: str) -> _Published:
    network = public_network(name)

    def load() -> nn.Module:
        # Channels last: on CPUs some run several times as fast.
        return network.build().to(memory_format=torch.channels_last)

    return _Published(
        load=load,
        weights=f"{network.title} from {network.source}",
        num_classes=network.num_classes,
        preprocess=Preprocess.preset(network.preprocess),
        class_names=CLASS_NAMES.get(network.dataset, ()),
    )


def _hugging_face(name: str) -> _Published:
    found = hugging_face_model(name)
    return _Published(
        load=found.load,
        weights=f"hf:{name}, published weights",
        num_classes=found.num_classes,
        class_names=found.class_names,
        tokenizer=found.tokenizer,
    )


def _sentences(name: str, head: Head | None) -> _Published:
    if head is None:
        raise ValueError(
            f"{SENTENCES}:{name} is a sentence encoder without classes of its own: fdbd fit finds "
            "them from labelled texts (--text, --label), and a guard's file keeps them"
        )
    found = sentence_transformer(name)
    return _Published(
        load=lambda: found.with_head(head),
        weights=f"{SENTENCES}:{name} with the head of the guard",
        num_classes=head.num_classes,
        tokenizer=found.tokenizer,
    )


def _torchvision(name: str) -> _Published | None:
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
    transforms = weights.transforms()
    preprocess = Preprocess(
        size=transforms.crop_size[0],
        mean=transforms.mean,
        std=transforms.std,
        resize=transforms.resize_size[0],
        interpolation=transforms.interpolation.value,
    )
    folder = Path(torch.hub.get_dir(), "checkpoints")
    file = weights.url.rpartition("/")[2]
    class_names = tuple(weights.meta["categories"])
    return _from_library(
        f"torchvision:{name}",
        num_classes=len(class_names),
        class_names=class_names,
        preprocess=preprocess,
        is_here=(folder / file).is_file(),
        how=f"put {file} from {weights.url} in {folder}, or",
        weights=weights,
    )


def _timm(name: str) -> _Published | None:
    timm = require("timm", "vision")
    config = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    if config is None or not config.has_weights:
        return None
    size = config.input_size[-1]
    if config.crop_mode == "squash":
        resize = None
        crop = "none"
    else:
        resize = math.floor(size / config.crop_pct)
        crop = "centre"
    preprocess = Preprocess(
        size=size,
        mean=config.mean,
        std=config.std,
        resize=resize,
        crop=crop,
        interpolation=config.interpolation,
    )
    is_here = False
    url = config.url
    if config.hf_hub_id:
        hub = require("huggingface_hub", "vision")
        # A path, or a marker that the file is known to be missing.
        kept = hub.try_to_load_from_cache(config.hf_hub_id, "model.safetensors")
        is_here = isinstance(kept, str)
        url = f"https://huggingface.co/{config.hf_hub_id}"
    return _from_library(
        f"timm:{name}",
        num_classes=config.num_classes,
        class_names=(),
        preprocess=preprocess,
        is_here=is_here,
        how=f"get model.safetensors from {url} and",
        pretrained=True,
    )


def _from_library(
    name: str,
    *,
    num_classes: int,
    class_names: tuple[str, ...],
    preprocess: Preprocess,
    is_here: bool,
    how: str,
    **options: Any,
) -> _Published:
    """A model of torchvision or timm.

    Args:
        how: what an error says of getting the file of its weights by hand.
    """

    def load() -> nn.Module:
        which = f"the published weights of {name}"
        remedy = f"{how} give the file with --checkpoint"
        if not is_here and not downloads_allowed():
            raise OSError(f"{which} are not here, and downloads are off: {remedy}")
        try:
            return create(name, num_classes, **options)
        except OSError as error:
            raise OSError(
                f"{which} cannot be downloaded here ({one_line(error)}): {remedy}"
            ) from None

    return _Published(
        load=load,
        weights=f"{name}, published weights",
        num_classes=num_classes,
        preprocess=preprocess,
        class_names=class_names,
        architecture=name,
    )


_SOURCES: dict[str, Callable[[str], _Published | None]] = {
    "zoo": _zoo,
    "public": _public,
    "torchvision": _torchvision,
    "timm": _timm,
    "hf": _hugging_face,
}


def _is_initial(model: nn.Module) -> bool:
    """Whether all normalisation layers are as they were made, which training changes; False if
    there are none."""
    norms: list[Any] = [module for module in model.modules() if "Norm" in type(module).__name__]
    scaling = [norm for norm in norms if getattr(norm, "weight", None) is not None]
    for norm in scaling:
        bias = getattr(norm, "bias", None)
        has_one_scale = len(norm.weight.unique()) == 1
        has_shift = bias is not None and bool(bias.any())
        if not has_one_scale or has_shift:
            return False
    return bool(scaling)


def _find_checkpoint(path: str) -> str:
    # Backbone and head may be in files of their own.
    if "+" in path and not Path(path).is_file():
        return "+".join(_find_checkpoint(part) for part in path.split("+"))
    places = [Path(path), *(root / path for root in data_roots())]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise FileNotFoundError(f"no checkpoint at {path!r}: no such file")
    return str(found)
