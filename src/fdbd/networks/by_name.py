"""From the name that a user types, or that a file holds, to a model with its weights and preprocessing."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from fdbd.data.datasets import info
from fdbd.data.preprocessing import Preprocess
from fdbd.networks.checkpoint import read_weights
from fdbd.networks.find_head import find_heads
from fdbd.networks.public import public_network
from fdbd.networks.registry import Published, create, find_published, list_models, list_zoo, zoo, zoo_card
from fdbd.util.devices import choose_device
from fdbd.util.files import data_roots, downloads_allowed
from fdbd.util.terminal import one_line


@dataclass(frozen=True)
class NamedModel:
    """A model in eval mode, on its device, and what is known of it."""

    model: nn.Module
    weights: str  #: one line about the weights, such as "resnet20, weights resnet20.th"
    num_classes: int | None = None  #: None where only the model itself can tell
    preprocess: Preprocess | None = None  #: how images are prepared; None where neither the model nor the user says
    class_names: tuple[str, ...] = ()  #: one per class, or none
    untrained: bool = False  #: whether the weights are random; a warning was given
    origin: dict[str, Any] = field(default_factory=dict)  #: JSON values to build it again, and its `weights_hash`


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
    """The model that a name stands for, with weights: the same in every command, config and guard file. A ValueError
    says where there is no such model, or none with weights.

    Args:
        name: a zoo model, ``NAME`` or ``zoo:NAME``; ``public:NAME``, one of `fdbd.networks.public.list_public()`;
            ``timm:NAME`` or ``torchvision:NAME``, or such a name alone, with its published weights (torchvision's
            ``NAME.WEIGHTS`` chooses among several); one of `fdbd.models.list_models()`;
            ``package.module:factory``, also from the current folder, whose factory may bring its own weights; or a
            ``.pt2`` file of `torch.export`.
        checkpoint: weights, as `fdbd.models.load_checkpoint` reads them, as the path stands or below ``FDBD_DATA``.
        num_classes: C; None: as the checkpoint or the published weights have it.
        preprocess: as for `Preprocess.parse`; None: the model's own.
        device: where the model goes, as for `choose_device`.
        trust: the user's word that code may run: for a ``.pt2`` file, and for a factory that a file names.
        named_by: the config or guard file that holds `name`, and does not choose what code runs; None: the user.
        allow_untrained: take random weights where there are no others, with a warning, instead of raising.
    """
    if runs_code(name) and named_by is not None and not trust:
        what = f"{os.fspath(named_by)!r} names the model {name}, which is code to run"
        raise ValueError(f"{what}: say that you trust it (--trust-model), or name the model yourself")
    origin: dict[str, Any] = {"name": os.path.abspath(name) if is_export(name) else name}
    if checkpoint is not None:
        checkpoint = _find_checkpoint(os.fspath(checkpoint))
        origin["checkpoint"] = os.path.abspath(checkpoint)
    found = _build(name, checkpoint, num_classes, trust)
    if found.untrained:
        if not allow_untrained:
            raise ValueError(f"{name} comes without weights: give them with --checkpoint")
        said = f"{name} has random weights, and every number from it is noise; give a checkpoint"
        warnings.warn(f"UNTRAINED WEIGHTS: {said}", stacklevel=2)
    if found.num_classes is not None:
        origin["num_classes"] = found.num_classes
    origin["weights"] = weights_hash(found.model)
    own = found.preprocess if preprocess is None else Preprocess.parse(preprocess)
    model = found.model.eval().to(choose_device(device))
    return replace(found, model=model, preprocess=own, origin=origin)


def runs_code(name: str) -> bool:
    """Whether building the model runs code that its name chooses: a factory, or a ``.pt2`` file."""
    source, _, rest = name.partition(":")
    return is_export(name) or (bool(rest) and source not in ("zoo", "public", "timm", "torchvision"))


def is_export(name: str) -> bool:
    """Whether a model's name is that of a `torch.export` file."""
    return name.endswith(".pt2")


def weights_hash(model: nn.Module) -> str:
    """SHA-256 of all parameters and buffers by name, whatever file or package they come from."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _build(name: str, checkpoint: str | None, num_classes: int | None, trust: bool) -> NamedModel:
    zoo_name = name.removeprefix("zoo:")
    is_zoo, is_public = name.startswith("zoo:") or name in list_zoo(), name.startswith("public:")
    if (is_zoo or is_public or is_export(name)) and checkpoint is not None:
        raise ValueError(f"{zoo_name} has its own weights: leave the checkpoint out")
    if is_zoo:
        card = zoo_card(zoo_name)
        weights = f"{zoo_name} of the zoo ({card.recipe}, seed {card.seed})"
        return NamedModel(zoo(zoo_name), weights, card.num_classes, card.preprocess, info(card.dataset).classes)
    if is_public:
        network = public_network(name.removeprefix("public:"))
        data, preprocess = info(network.dataset), Preprocess.preset(network.preprocess)
        weights = f"{network.title} from {network.source}"
        model = network.build().to(memory_format=torch.channels_last)  # on CPUs some run several times as fast
        return NamedModel(model, weights, data.num_classes, preprocess, data.classes)
    if is_export(name):
        return NamedModel(load_exported(name, trust=trust), f"{name}, a torch.export file")
    published = None if name in list_models() or runs_code(name) else find_published(name)
    own = None if published is None else published.preprocess
    if checkpoint is not None:
        name = name if published is None else published.name
        if num_classes is None:
            head = next(iter(find_heads(create(name, None), None)))
            weight = read_weights(checkpoint).get(f"{head}.weight")
            num_classes = None if weight is None else len(weight)
        return NamedModel(create(name, num_classes, checkpoint), f"{name}, weights {checkpoint}", num_classes, own)
    if published is not None and num_classes in (None, published.num_classes):
        weights = f"{published.name}, published weights"
        return NamedModel(_download(published), weights, published.num_classes, own, published.class_names)
    model = create(name, num_classes)
    untrained = not runs_code(name) or _is_initial(model)
    weights = f"{name}, {'UNTRAINED WEIGHTS' if untrained else 'as its factory makes it'}"
    return NamedModel(model, weights, num_classes, own, untrained=untrained)


def load_exported(path: str | os.PathLike[str], *, trust: bool = False) -> nn.Module:
    """The model in a ``.pt2`` file of `torch.export.save`, with a dynamic batch size, that ends in a linear layer, as
    ``nn.Sequential(backbone, linear head)``. Torch unpickles parts of the file: without `trust` it is refused."""
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
        raise ValueError(f"{name!r} is no readable torch.export file: {one_line(error)[:200]}") from None
    module: Any = program.module()
    graph = fx.Graph()
    node: Any = graph.graph_copy(module.graph, {})
    while isinstance(node, (tuple, list)) and len(node) == 1:
        node = node[0]
    if not isinstance(node, fx.Node) or node.target != torch.ops.aten.linear.default:
        what = node.target if isinstance(node, fx.Node) else type(node).__name__
        raise ValueError(f"the exported graph ends in {what}, expected a linear layer that gives the logits")
    features, *stored = (each for each in node.args if each is not None)
    if any(not isinstance(each, fx.Node) or each.op != "get_attr" for each in stored):
        raise ValueError("the exported graph's last linear layer computes its weights, expected stored ones")
    weight, *bias = (module.get_parameter(str(each.target)).detach() for each in stored)  # type: ignore[union-attr]
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(bias), dtype=weight.dtype)
    head.load_state_dict({"weight": weight, **({"bias": bias[0]} if bias else {})})
    graph.output(features)
    backbone = fx.GraphModule(module, graph)
    graph.eliminate_dead_code()
    backbone.recompile()
    return nn.Sequential(backbone, head)


def _download(published: Published) -> nn.Module:
    which, how = f"the published weights of {published.name}", f"{published.how} give the file with --checkpoint"
    if not published.is_here and not downloads_allowed():
        raise OSError(f"{which} are not here, and downloads are off: {how}")
    try:
        return create(published.name, published.num_classes, **published.options)
    except OSError as error:
        raise OSError(f"{which} cannot be downloaded here ({one_line(error)}): {how}") from None


def _is_initial(model: nn.Module) -> bool:
    """Whether all normalisation layers are as they were made, which training changes; False where there are none."""
    norms: list[Any] = [module for module in model.modules() if "Norm" in type(module).__name__]
    values = [(norm.weight, getattr(norm, "bias", None)) for norm in norms if getattr(norm, "weight", None) is not None]
    return bool(values) and all(len(w.unique()) == 1 and (b is None or not b.any()) for w, b in values)


def _find_checkpoint(path: str) -> str:
    if "+" in path and not Path(path).is_file():  # backbone and head in files of their own
        return "+".join(_find_checkpoint(part) for part in path.split("+"))
    places = [Path(path), *(root / path for root in data_roots())]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise FileNotFoundError(f"no checkpoint at {path!r}: no such file")
    return str(found)
