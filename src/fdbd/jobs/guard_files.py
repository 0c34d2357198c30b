"""From what a user types to a model, and from a guard's file to a guard with its model. For commands and engines:

- `build_model("cifar10-ce" | "timm:NAME" | "torchvision:NAME" | "package.module:factory" | "model.pt2", …)` gives
  `Built(model, preprocess, class_names, origin)`; `origin` is what `Guard.about["model"]` keeps to build it again.
- `open_guard(path, …)` gives `Opened(guard, preprocess, class_names)`: a guard ready for ``rows.decide_rows``, with the
  model that its file names, or without one where it was fitted on features (then `preprocess` is None).
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fdbd import networks as models
from fdbd.core import artifact
from fdbd.data.datasets import info
from fdbd.data.preprocessing import Preprocess
from fdbd.decision.guard import Guard, load
from fdbd.networks.checkpoint import read_weights
from fdbd.networks.exported_program import load_exported
from fdbd.networks.heads import find_heads
from fdbd.networks.published import find_published


class Built(NamedTuple):
    """A model in eval mode and what is known of it."""

    model: nn.Module
    preprocess: Preprocess | None
    """None where neither the model nor the user says."""
    class_names: tuple[str, ...]
    """One a class, or none."""
    origin: dict[str, Any]
    """JSON-able: name, checkpoint, number of classes, and a SHA-256 of the weights."""


class Opened(NamedTuple):
    """A guard with its model, ready to be asked."""

    guard: Guard
    preprocess: Preprocess | None
    """None: the guard takes features."""
    class_names: tuple[str, ...]


def build_model(
    name: str,
    checkpoint: str | os.PathLike[str] | None = None,
    *,
    num_classes: int | None = None,
    preprocess: str | None = None,
    trust: bool = False,
    device: str | None = None,
) -> Built:
    """The model that a name stands for, with weights.

    Args:
        name: a zoo name; ``timm:NAME`` or ``torchvision:NAME``, or such a name alone, with the published weights or
            those of the checkpoint; one of `fdbd.networks.list_models()` or ``package.module:factory``, with a
            checkpoint (a factory may bring its own weights); or a ``.pt2`` file of `torch.export`.
        checkpoint: weights, as `fdbd.networks.load_checkpoint` reads them; never unpickled.
        num_classes: C; None: what the checkpoint holds, or the published weights have.
        preprocess: a preset's name or JSON fields of `Preprocess`; None: the model's own.
        trust: allow a ``.pt2`` file, whose loading can run code.
        device: where the model goes; None: a GPU where there is one.
    """
    origin: dict[str, Any] = {"name": name}
    if checkpoint is not None:
        if not Path(checkpoint).is_file():
            raise FileNotFoundError(f"no checkpoint at {os.fspath(checkpoint)!r}: no such file")
        origin["checkpoint"] = os.path.abspath(checkpoint)
    model, own, class_names, num_classes = _build(name, checkpoint, num_classes, trust)
    if is_exported(name):
        origin["name"] = os.path.abspath(name)
    if num_classes is not None:
        origin["num_classes"] = num_classes
    origin["weights"] = weights_hash(model)
    model = model.eval().to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return Built(model, parse_preprocess(preprocess) if preprocess else own, class_names, origin)


def open_guard(
    path: str | os.PathLike[str],
    *,
    model: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    trust: bool = False,
    device: str | None = None,
) -> Opened:
    """A guard from its file, around the model that the file names.

    Args:
        path: what `fdbd fit` or `Guard.save` wrote.
        model: another name for the model, as for `build_model`. Needed where the file names none (images are then
            prepared as the model itself says), and where it names a factory or a ``.pt2`` file: those run code, and a
            file does not choose what code runs.
        checkpoint: where the weights lie now. Without it: where they lay at the fit, or beside the guard.
        trust, device: as for `build_model`.

    Raises:
        ArtifactError: the weights are not those of the fit, or the file is no guard.
    """
    description, _ = artifact.read(path)
    about = _About(description, path)
    if about.origin is None and model is None:
        return Opened(load(path), None, about.class_names)
    origin = about.origin or {}
    if model is None:
        model = str(origin["name"])
        if _runs_code(model):
            raise ValueError(
                f"{os.fspath(path)!r} names the model {model}, which is code to run; if you trust it, say so with "
                f"--model {model}"
            )
    if checkpoint is None and origin.get("checkpoint"):
        checkpoint = _find(str(origin["checkpoint"]), Path(path))
    built = build_model(model, checkpoint, num_classes=origin.get("num_classes"), trust=trust, device=device)
    if origin.get("weights") not in (None, built.origin["weights"]):
        raise artifact.ArtifactError(
            f"the weights of {os.fspath(checkpoint or model)!r} are not those that {os.fspath(path)!r} was fitted "
            "with: give the right --checkpoint, or fit a new guard"
        )
    preprocess = about.preprocess or built.preprocess
    if preprocess is None:
        raise ValueError(
            f"neither {os.fspath(path)!r} nor {model} says how images are prepared; fit the guard with fdbd fit, and "
            "say there with --preprocess"
        )
    return Opened(load(path, built.model), preprocess, about.class_names or built.class_names)


def parse_preprocess(text: str) -> Preprocess:
    """A preset's name, or the fields as JSON.

    >>> parse_preprocess('{"size": 8}').size
    8
    """
    if not text.lstrip().startswith("{"):
        return Preprocess.preset(text)
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the preprocessing {text!r} is no JSON ({error})") from None
    return Preprocess.from_dict(fields)


def weights_hash(model: nn.Module) -> str:
    """SHA-256 of all parameters and buffers by name: tells whether two models are the same, whatever file or package
    their weights come from."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def is_exported(name: str) -> bool:
    """Whether a model's name is that of a `torch.export` file."""
    return name.endswith(".pt2")


class _About:
    """What a guard's file says of its model; anything else there than expected is an ArtifactError."""

    def __init__(self, description: dict[str, Any], path: str | os.PathLike[str]) -> None:
        about = description.get("about") or {}
        try:
            self.origin: dict[str, Any] | None = about.get("model")
            if self.origin is not None and not isinstance(self.origin["name"], str):
                raise TypeError("the model's name is no text")
            fields = about.get("preprocess")
            self.preprocess = None if fields is None else Preprocess.from_dict(fields)
            self.class_names = tuple(map(str, about.get("class_names") or ()))
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise artifact.ArtifactError(f"{os.fspath(path)!r} does not describe its model: {error}") from None


def _runs_code(name: str) -> bool:
    source, _, rest = name.partition(":")
    return is_exported(name) or (bool(rest) and source not in ("zoo", "timm", "torchvision"))


def _find(checkpoint: str, guard: Path) -> Path:
    places = (Path(checkpoint), guard.resolve().parent / Path(checkpoint).name)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise FileNotFoundError(
            f"the weights of the model, {checkpoint!r}, are neither there nor beside the guard; say with --checkpoint "
            "where they are"
        )
    return found


def _build(
    name: str, checkpoint: str | os.PathLike[str] | None, num_classes: int | None, trust: bool
) -> tuple[nn.Module, Preprocess | None, tuple[str, ...], int | None]:
    """Model, its own preprocessing, class names and number of classes where known."""
    zoo_name = name.removeprefix("zoo:")
    if zoo_name in models.list_zoo() or name.startswith("zoo:"):
        if checkpoint is not None:
            raise ValueError(f"{zoo_name} of the zoo has its own weights: leave --checkpoint out")
        card = models.zoo_card(zoo_name)
        return models.zoo(zoo_name), card.preprocess, info(card.dataset).classes, card.num_classes
    if is_exported(name):
        if checkpoint is not None:
            raise ValueError(f"{name} has its own weights: leave --checkpoint out")
        return load_exported(name, trust=trust), None, (), None
    published = None if name in models.list_models() or _runs_code(name) else find_published(name)
    if checkpoint is None and published is not None:
        model = models.create(published.name, published.num_classes, **published.options)
        return model, published.preprocess, published.class_names, published.num_classes
    if checkpoint is None and not _runs_code(name):
        models.create(name)  # says that there is no such model, if so
        raise ValueError(f"{name} comes without weights: give them with --checkpoint")
    if checkpoint is not None and num_classes is None:
        num_classes = _classes_in(checkpoint, models.create(name, None))
    model = models.create(name, num_classes, checkpoint)
    return model, published.preprocess if published else None, (), num_classes


def _classes_in(checkpoint: str | os.PathLike[str], model: nn.Module) -> int | None:
    """The rows of the head's weight in a checkpoint."""
    weight = read_weights(checkpoint).get(f"{next(iter(find_heads(model, None)))}.weight")
    return None if weight is None else len(weight)
