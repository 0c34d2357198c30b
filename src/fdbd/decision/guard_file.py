"""From a guard's file to a guard around the model that the file names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fdbd.core import artifact
from fdbd.data.preprocessing import Preprocess
from fdbd.decision.guard import Guard, load
from fdbd.networks.by_name import model_by_name, runs_code


class OpenedGuard(NamedTuple):
    """A guard with its model, ready to be asked."""

    guard: Guard
    preprocess: Preprocess | None
    """None: the guard takes features."""
    class_names: tuple[str, ...]


def open_guard(
    path: str | os.PathLike[str],
    *,
    model: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    trust: bool = False,
    device: str | torch.device | None = "auto",
) -> OpenedGuard:
    """A guard from its file, around the model that the file names; without a model where it was fitted on features.

    Args:
        path: what `fdbd fit` or `Guard.save` wrote.
        model: another name for the model, as for `model_by_name`. Needed where the file names none (images are then
            prepared as the model itself says), and where it names a factory or a ``.pt2`` file: those run code, and a
            file does not choose what code runs.
        checkpoint: where the weights lie now. Without it: where they lay at the fit, or beside the guard.
        trust, device: as for `model_by_name`.

    Raises:
        ArtifactError: the weights are not those of the fit, or the file is no guard.
    """
    description, _ = artifact.read(path)
    about = _About(description, path)
    if about.origin is None and model is None:
        return OpenedGuard(load(path), None, about.class_names)
    origin = about.origin or {}
    if model is None:
        model = str(origin["name"])
        if runs_code(model):
            raise ValueError(
                f"{os.fspath(path)!r} names the model {model}, which is code to run; if you trust it, say so with "
                f"--model {model}"
            )
    if checkpoint is None and origin.get("checkpoint"):
        checkpoint = _find(str(origin["checkpoint"]), Path(path))
    found = model_by_name(model, checkpoint, num_classes=origin.get("num_classes"), trust=trust, device=device)
    if origin.get("weights") not in (None, found.origin["weights"]):
        raise artifact.ArtifactError(
            f"the weights of {os.fspath(checkpoint or model)!r} are not those that {os.fspath(path)!r} was fitted "
            "with: give the right --checkpoint, or fit a new guard"
        )
    preprocess = about.preprocess or found.preprocess
    if preprocess is None:
        raise ValueError(
            f"neither {os.fspath(path)!r} nor {model} says how images are prepared; fit the guard with fdbd fit, and "
            "say there with --preprocess"
        )
    return OpenedGuard(load(path, found.model), preprocess, about.class_names or found.class_names)


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


def _find(checkpoint: str, guard: Path) -> Path:
    places = (Path(checkpoint), guard.resolve().parent / Path(checkpoint).name)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise FileNotFoundError(
            f"the weights of the model, {checkpoint!r}, are neither there nor beside the guard; say with --checkpoint "
            "where they are"
        )
    return found
