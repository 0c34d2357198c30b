"""From the name that a user types, or that a file holds, to a model: its architecture alone
(`create`), or with its weights and preprocessing (`model_by_name`). The zoo holds small CIFAR-10
classifiers that come with the package, trained by `fdbd train zoo-ce` and `zoo-supcon`."""

from __future__ import annotations

import fnmatch
import inspect
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from fdbd.core.class_names import CLASS_NAMES
from fdbd.core.preprocessing import Preprocess
from fdbd.networks.architectures import (
    CifarResNet,
    CompactResNet,
    DenseNet,
    ResNet,
    WideResNet,
    basic,
    bottleneck,
)
from fdbd.networks.checkpoint import load_checkpoint, read_metadata, read_weights
from fdbd.networks.find_head import find_heads
from fdbd.networks.public import public_network
from fdbd.networks.small import SmallCNN, SmallTransformer
from fdbd.networks.wrapped import weights_hash
from fdbd.util.devices import choose_device
from fdbd.util.extras import import_object, require
from fdbd.util.files import data_roots, downloads_allowed
from fdbd.util.terminal import one_line

_OURS: dict[str, Callable[..., nn.Module]] = {
    **{f"resnet{depth}": partial(CifarResNet, depth) for depth in (20, 32, 44, 56, 110)},
    "resnet18": partial(ResNet, basic, (2, 2, 2, 2)),
    "resnet34": partial(ResNet, basic, (3, 4, 6, 3)),
    "resnet50": partial(ResNet, bottleneck, (3, 4, 6, 3), expansion=4),
    "densenet100": partial(DenseNet, 100, 12),
    "densenet22": partial(DenseNet, 22, 12),
    "wrn40_2": partial(WideResNet, 40, 2),
    "resnet10_compact": CompactResNet,
    "small_cnn": SmallCNN,
    "small_vit": SmallTransformer,
}
_ZOO = Path(__file__).parent / "weights"


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

    name: one of `list_models()`; `torchvision:NAME` or `timm:NAME`; a plain name that is not ours
    is looked up in both; `package.module:function` calls any importable factory, with `num_classes`
    if it takes it; options go to it. num_classes: None leaves it to the factory, and is 10
    elsewhere.

    >>> create("resnet20", num_classes=100).get_classifier()
    Linear(in_features=64, out_features=100, bias=True)
    """
    if num_classes is not None and num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, not {num_classes}")
    source, _, rest = name.partition(":")
    with_classes = {"num_classes": 10 if num_classes is None else num_classes, **options}
    if name in _OURS:
        model = _OURS[name](**with_classes)
    elif rest and source not in ("torchvision", "timm"):
        model = _call_factory(name, num_classes, options)
    else:
        model = _from_library(source if rest else "", rest or name, with_classes)
    return model if checkpoint is None else load_checkpoint(model, checkpoint)


def _from_library(library: str, name: str, options: dict[str, Any]) -> nn.Module:
    """A model of torchvision or of timm; of the first that has it where `library` is empty."""
    if (
        library != "timm"
        and name in (models := require("torchvision.models", "vision")).list_models()
    ):
        model: nn.Module = models.get_model(name, **{"weights": None} | options)
    elif library != "torchvision" and (timm := require("timm", "vision")).is_model(name):
        model = timm.create_model(name, **{"pretrained": False} | options)
    elif library:
        raise ValueError(f"{library} has no model {name!r}")
    else:
        ours = ", ".join(list_models())
        raise ValueError(
            f"no model {name!r}: ours are {ours}; torchvision and timm have none of that name"
        )
    return model


def _call_factory(name: str, num_classes: int | None, options: dict[str, Any]) -> nn.Module:
    factory = import_object(name, "model factory")
    if not callable(factory):
        raise ValueError(f"{name} is no function")
    parameters = inspect.signature(factory).parameters.values()
    if num_classes is not None and any(
        p.name == "num_classes" or p.kind is p.VAR_KEYWORD for p in parameters
    ):
        options = {"num_classes": num_classes, **options}
    model = factory(**options)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} gave a {type(model).__name__}, not a torch module")
    return model


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
    about = read_metadata(
        path
    )  # a weights file says itself what it is; the card beside it says the same to people
    values: dict[str, Any] = {key: about[key] for key in ("model", "recipe", "dataset")}
    values |= {key: json.loads(about[key]) for key in ("num_classes", "seed", "test_accuracy")}
    mean, std = (json.loads(about[key]) for key in ("mean", "std"))
    return ZooCard(name, path=path, preprocess=Preprocess(32, mean, std), **values)


def zoo(name: str) -> nn.Module:
    """A shipped model with its weights, in evaluation mode; `zoo_card(name).preprocess` makes its
    inputs.

    >>> import torch
    >>> zoo("cifar10-ce")(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 10])
    """
    card = zoo_card(name)
    return load_checkpoint(create(card.model, card.num_classes), card.path).eval()


@dataclass(frozen=True)
class NamedModel:
    """A model in eval mode, on its device, and what is known of it."""

    model: nn.Module
    weights: str  #: one line about the weights, such as "resnet20, weights resnet20.th"
    num_classes: int | None = None  #: None where only the model itself can tell
    preprocess: Preprocess | None = (
        None  #: how images are prepared; None where neither the model nor the user says
    )
    class_names: tuple[str, ...] = ()  #: one per class, or none
    untrained: bool = False  #: whether the weights are random; a warning was given
    origin: dict[str, Any] = field(
        default_factory=dict
    )  #: JSON values to build it again, and its `weights_hash`


class _Published(NamedTuple):
    """What a name stands for by itself: weights, and what is known of them."""

    load: Callable[[], nn.Module]
    weights: str
    num_classes: int | None = None
    preprocess: Preprocess | None = None
    class_names: tuple[str, ...] = ()
    architecture: str | None = (
        None  #: what `create` makes for other weights or classes; None: there are no others
    )


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
) -> NamedModel:
    """The model that a name stands for, with weights: the same in every command, config and guard
    file. A ValueError says where there is no such model, or none with weights.

    Args:
        name: a zoo model, ``NAME`` or ``zoo:NAME``; ``public:NAME``, one of
            `fdbd.networks.public.NETWORKS`; ``timm:NAME`` or ``torchvision:NAME``, or such a name
            alone, with its published weights (torchvision's ``NAME.WEIGHTS`` chooses among
            several); one of `fdbd.networks.list_models()`; ``package.module:factory``, also from
            the current folder, whose factory may bring its own weights; or a ``.pt2`` file of
            `torch.export`.
        checkpoint: weights, as `fdbd.networks.load_checkpoint` reads them, as the path stands or
            below ``FDBD_DATA``.
        num_classes: C; None: as the checkpoint or the published weights have it.
        preprocess: as for `Preprocess.parse`; None: the model's own.
        device: where the model goes, as for `choose_device`.
        trust: the user's word that code may run: for a ``.pt2`` file, and for a factory that a
            file names.
        named_by: the config or guard file that holds `name`, and does not choose what code runs;
            None: the user.
        allow_untrained: take random weights where there are no others, with a warning, instead
            of raising.
    """
    if runs_code(name) and named_by is not None and not trust:
        what = f"{os.fspath(named_by)!r} names the model {name}, which is code to run"
        raise ValueError(
            f"{what}: say that you trust it (--trust-model), or name the model yourself"
        )
    origin: dict[str, Any] = {"name": os.path.abspath(name) if _is_export(name) else name}
    published = _find_published(name, trust)
    is_alone = published is not None and published.architecture is None
    architecture = name if published is None else published.architecture or name
    untrained = False
    class_names: tuple[str, ...] = ()
    if checkpoint is not None:
        if is_alone:
            raise ValueError(f"{name} has its own weights: leave the checkpoint out")
        checkpoint = _find_checkpoint(os.fspath(checkpoint))
        origin["checkpoint"] = os.path.abspath(checkpoint)
        if num_classes is None:
            head = next(iter(find_heads(create(architecture, None), None)))
            weight = read_weights(checkpoint).get(f"{head}.weight")
            num_classes = None if weight is None else len(weight)
        model, weights = (
            create(architecture, num_classes, checkpoint),
            f"{architecture}, weights {checkpoint}",
        )
    elif published is not None and (is_alone or num_classes in (None, published.num_classes)):
        model, (_, weights, num_classes, _, class_names, _) = published.load(), published
    else:
        model = create(architecture, num_classes)
        untrained = not runs_code(name) or _is_initial(model)
        weights = f"{name}, {'UNTRAINED WEIGHTS' if untrained else 'as its factory makes it'}"
        if untrained and not allow_untrained:
            raise ValueError(f"{name} comes without weights: give them with --checkpoint")
        if untrained:
            said = (
                f"{name} has random weights, and every number from it is noise; give a checkpoint"
            )
            warnings.warn(f"UNTRAINED WEIGHTS: {said}", stacklevel=2)
    if num_classes is not None:
        origin["num_classes"] = num_classes
    origin["weights"] = weights_hash(model)
    own = published and published.preprocess
    prepared = own if preprocess is None else Preprocess.parse(preprocess)
    model = model.eval().to(choose_device(device))
    return NamedModel(model, weights, num_classes, prepared, class_names, untrained, origin)


def runs_code(name: str) -> bool:
    """Whether building the model runs code that its name chooses: a factory, or a ``.pt2`` file."""
    source, _, rest = name.partition(":")
    return _is_export(name) or (bool(rest) and source not in _SOURCES)


def _is_export(name: str) -> bool:
    return name.endswith(".pt2")


def _find_published(name: str, trust: bool) -> _Published | None:
    """What is published under a name, with or without its source; None: nothing, or a factory."""
    source, _, rest = name.partition(":")
    if _is_export(name):
        return _Published(lambda: load_exported(name, trust=trust), f"{name}, a torch.export file")
    if rest:
        return _SOURCES[source](rest) if source in _SOURCES else None
    if name in list_zoo():
        return _zoo(name)
    return None if name in list_models() else _torchvision(name) or _timm(name)


def _zoo(name: str) -> _Published:
    card = zoo_card(name)
    weights = f"{name} of the zoo ({card.recipe}, seed {card.seed})"
    return _Published(
        lambda: zoo(name), weights, card.num_classes, card.preprocess, CLASS_NAMES[card.dataset]
    )


def _public(name: str) -> _Published:
    network = public_network(name)
    weights = f"{network.title} from {network.source}"
    class_names = CLASS_NAMES.get(network.dataset, ())
    preprocess = Preprocess.preset(network.preprocess)
    # Channels last: on CPUs some run several times as fast.
    load = lambda: network.build().to(memory_format=torch.channels_last)  # noqa: E731
    return _Published(load, weights, network.num_classes, preprocess, class_names)


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
    said, filter_name = weights.transforms(), weights.transforms().interpolation.value
    preprocess = Preprocess(
        said.crop_size[0], said.mean, said.std, said.resize_size[0], interpolation=filter_name
    )
    folder, file = Path(torch.hub.get_dir(), "checkpoints"), weights.url.rpartition("/")[2]
    how, is_here = f"put {file} from {weights.url} in {folder}, or", (folder / file).is_file()
    names = tuple(weights.meta["categories"])
    return _of_library(
        f"torchvision:{name}", len(names), names, preprocess, is_here, how, weights=weights
    )


def _timm(name: str) -> _Published | None:
    timm = require("timm", "vision")
    config = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    if config is None or not config.has_weights:
        return None
    size = config.input_size[-1]
    cut = (
        (None, "none")
        if config.crop_mode == "squash"
        else (math.floor(size / config.crop_pct), "centre")
    )
    preprocess = Preprocess(size, config.mean, config.std, cut[0], cut[1], config.interpolation)
    hub = require("huggingface_hub", "vision")
    kept = (
        hub.try_to_load_from_cache(config.hf_hub_id, "model.safetensors")
        if config.hf_hub_id
        else None
    )
    url = f"https://huggingface.co/{config.hf_hub_id}" if config.hf_hub_id else config.url
    how, is_here = f"get model.safetensors from {url} and", isinstance(kept, str)
    return _of_library(
        f"timm:{name}", config.num_classes, (), preprocess, is_here, how, pretrained=True
    )


def _of_library(
    name: str,
    classes: int,
    names: tuple[str, ...],
    preprocess: Preprocess,
    is_here: bool,
    how: str,
    **options: Any,
) -> _Published:
    """A model of torchvision or timm; `how` one gets the file of its weights by hand."""

    def load() -> nn.Module:
        which, remedy = f"the published weights of {name}", f"{how} give the file with --checkpoint"
        if not is_here and not downloads_allowed():
            raise OSError(f"{which} are not here, and downloads are off: {remedy}")
        try:
            return create(name, classes, **options)
        except OSError as error:
            raise OSError(
                f"{which} cannot be downloaded here ({one_line(error)}): {remedy}"
            ) from None

    return _Published(load, f"{name}, published weights", classes, preprocess, names, name)


_SOURCES: dict[str, Callable[[str], _Published | None]] = {
    "zoo": _zoo, "public": _public, "torchvision": _torchvision, "timm": _timm,
}  # fmt: skip


def load_exported(path: str | os.PathLike[str], *, trust: bool = False) -> nn.Module:
    """The model in a ``.pt2`` file of `torch.export.save`, with a dynamic batch size, that ends in
    a linear layer, as ``nn.Sequential(backbone, linear head)``. Torch unpickles parts of the file:
    without `trust` it is refused."""
    name = os.fspath(path)
    if not Path(path).is_file():
        raise FileNotFoundError(f"no model at {name!r}: no such file")
    if not trust:
        why = f"{name!r} is a torch.export file, and torch unpickles those, which can run code"
        advice = "pass --trust-model if you know where it comes from, or give a factory with a --checkpoint"
        raise ValueError(f"{why}: {advice}")
    try:
        program = torch.export.load(name)
    except Exception as error:  # a damaged archive raises nearly anything
        raise ValueError(
            f"{name!r} is no readable torch.export file: {one_line(error)[:200]}"
        ) from None
    module: Any = program.module()
    graph = fx.Graph()
    node: Any = graph.graph_copy(module.graph, {})
    while isinstance(node, (tuple, list)) and len(node) == 1:
        node = node[0]
    if not isinstance(node, fx.Node) or node.target != torch.ops.aten.linear.default:
        what = node.target if isinstance(node, fx.Node) else type(node).__name__
        raise ValueError(
            f"the exported graph ends in {what}, expected a linear layer that gives the logits"
        )
    features, *stored = (each for each in node.args if each is not None)
    if any(not isinstance(each, fx.Node) or each.op != "get_attr" for each in stored):
        raise ValueError(
            "the exported graph's last linear layer computes its weights, expected stored ones"
        )
    weight, *bias = (module.get_parameter(str(each.target)).detach() for each in stored)  # type: ignore[union-attr]
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(bias), dtype=weight.dtype)
    head.load_state_dict(dict(zip(("weight", "bias"), (weight, *bias))))
    graph.output(features)
    backbone = fx.GraphModule(module, graph)
    graph.eliminate_dead_code()
    backbone.recompile()
    return nn.Sequential(backbone, head)


def _is_initial(model: nn.Module) -> bool:
    """Whether all normalisation layers are as they were made, which training changes; False where
    there are none."""
    norms: list[Any] = [module for module in model.modules() if "Norm" in type(module).__name__]
    values = [
        (norm.weight, getattr(norm, "bias", None))
        for norm in norms
        if getattr(norm, "weight", None) is not None
    ]
    return bool(values) and all(
        len(w.unique()) == 1 and (b is None or not b.any()) for w, b in values
    )


def _find_checkpoint(path: str) -> str:
    if "+" in path and not Path(path).is_file():  # backbone and head in files of their own
        return "+".join(_find_checkpoint(part) for part in path.split("+"))
    places = [Path(path), *(root / path for root in data_roots())]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise FileNotFoundError(f"no checkpoint at {path!r}: no such file")
    return str(found)
