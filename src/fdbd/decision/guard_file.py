"""From a guard's file to a guard: around a model that is given, or around the one that the file
names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fdbd.core import artifact
from fdbd.core.batch import Head
from fdbd.core.configuration import NotFittedError, from_config
from fdbd.core.perturbation import InputPerturbation
from fdbd.core.preprocessing import Preprocess
from fdbd.decision import hub
from fdbd.decision.guard import Guard, warn_of_other_weights
from fdbd.decision.threshold import Threshold
from fdbd.detectors import Detector
from fdbd.fitting.overlap import Sketch
from fdbd.kernels.threads import run_apart
from fdbd.networks.by_name import model_by_name, model_runs_code
from fdbd.networks.classifier import PRECISIONS
from fdbd.networks.find_head import HeadName
from fdbd.util.devices import device_of


class OpenedGuard(NamedTuple):
    """A guard with its model, as `open_guard` returns it.

    >>> OpenedGuard(Guard(Head(torch.eye(2))), None, ("cat", "dog")).class_names
    ('cat', 'dog')
    """

    guard: Guard
    preprocess: Preprocess | None
    """None: the guard takes features."""
    class_names: tuple[str, ...]
    sha256: str = ""
    """Of the file's content: identifies the guard."""


def load(
    path: str | os.PathLike[str], model: nn.Module | Head | None = None, *, head: HeadName = None
) -> Guard:
    """The guard in a file, around a model and on its device; without a model it takes features.

    Raises ArtifactError when the file is damaged, too new, or was made for another head. Loading
    compiles nothing and leaves no threads behind, so a process may load a guard and then fork.

    >>> import fdbd, os, tempfile, torch
    >>> guard = fdbd.Guard(fdbd.Head(torch.eye(3))).fit([fdbd.Batch(torch.rand(50, 3))])
    >>> path = os.path.join(tempfile.mkdtemp(), "guard.safetensors")
    >>> guard.calibrate([fdbd.Batch(torch.rand(50, 3))], tpr=0.9).save(path)
    >>> fdbd.load(path).threshold
    Threshold(quantile, tpr=0.9, 50 calibration scores)
    """
    guard = _on_its_device(lambda: _assemble(path, *artifact.read(path), model, head))
    warn_of_other_weights(guard, path)
    return guard


def from_hub(
    repo: str,
    model: nn.Module | Head | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    head: HeadName = None,
) -> Guard:
    """The guard in a repository of the Hugging Face Hub, or in a folder with the same files. None
    of its code is run.

    Args:
        repo: "owner/name", or a folder.
        model, head: as for `fdbd.load`.
        revision: a branch, a tag, or a commit, which never changes.
        token: of the Hub; None: that of your login.

    >>> import fdbd, tempfile
    >>> from fdbd.decision.hub import write_folder
    >>> guard = fdbd.Guard(fdbd.Head(torch.eye(3))).fit([fdbd.Batch(torch.rand(50, 3))])
    >>> folder = write_folder(guard, tempfile.mkdtemp())
    >>> from_hub(str(folder)).detector
    FDBD(normalizer='deviation', nearest=None)
    """
    return load(hub.fetch(repo, revision, token), model, head=head)


def open_guard(
    path: str | os.PathLike[str],
    *,
    model: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    trust: bool = False,
    device: str | torch.device | None = "auto",
    features: bool = False,
) -> OpenedGuard:
    """A guard from its file, around the model that the file names; without a model if it was fitted
    on features. ArtifactError: the weights are not those of the fit, or the file is no guard.

    Args:
        path: what `fdbd fit` or `Guard.save` wrote.
        model: another name for the model. Needed if the file names none (images are then prepared
            as the model says), or names a factory or a ``.pt2`` file: a file does not choose what
            code runs.
        checkpoint: the model's weights; None: those at the place of the fit, or beside the guard.
        trust, device: as for `model_by_name`.
        features: leave the model out, for a guard that takes features.
    """
    shown = repr(os.fspath(path))
    description, tensors = run_apart(lambda: artifact.read(path))
    about = description.get("about") or {}
    try:
        origin, fields = about.get("model"), about.get("preprocess")
        if origin is not None and not isinstance(origin["name"], str):
            raise TypeError("the model's name is no text")
        preprocess = None if fields is None else Preprocess.from_dict(fields)
        class_names = tuple(map(str, about.get("class_names") or ()))
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise artifact.ArtifactError(f"{shown} does not describe its model: {error}") from None
    if features or (origin is None and model is None):
        found, preprocess = None, None
    else:
        origin = origin or {}
        name = str(origin["name"]) if model is None else model
        if model is None and model_runs_code(name):
            raise ValueError(
                f"{shown} names the model {name}, which is code to run; to trust it, add --model {name}"
            )
        if checkpoint is None and (then := origin.get("checkpoint")):
            places = (Path(str(then)), Path(path).resolve().parent / Path(str(then)).name)
            checkpoint = next((place for place in places if place.is_file()), None)
            if checkpoint is None:
                where = (
                    "are neither there nor beside the guard; say with --checkpoint where they are"
                )
                raise FileNotFoundError(f"the weights of the model, {then!r}, {where}")
        found = model_by_name(
            name, checkpoint, num_classes=origin.get("num_classes"), trust=trust, device=device
        )
        if origin.get("weights") not in (None, found.origin["weights"]):
            raise artifact.ArtifactError(
                f"the weights of {os.fspath(checkpoint or name)!r} are not those that {shown} was fitted with: give "
                "the right --checkpoint, or fit a new guard"
            )
        preprocess = preprocess or found.preprocess
        if preprocess is None and found.tokenizer is None:
            remedy = "fit the guard with fdbd fit, and say there with --preprocess"
            raise ValueError(f"neither {shown} nor {name} says how images are prepared; {remedy}")
    guard = _on_its_device(
        lambda: _assemble(path, description, tensors, found.model if found else None)
    )
    if class_names and len(class_names) != (classes := guard.detector.head.num_classes):
        names = f"{len(class_names)} classes, and its head has {classes}"
        raise artifact.ArtifactError(f"{shown} names {names}: fit a new guard")
    return OpenedGuard(
        guard,
        preprocess,
        class_names or (found.class_names if found else ()),
        description["sha256"],
    )


def _assemble(
    path: str | os.PathLike[str],
    description: dict[str, Any],
    tensors: dict[str, Tensor],
    model: nn.Module | Head | None = None,
    head: HeadName = None,
) -> Guard:
    def under(prefix: str) -> dict[str, Tensor]:
        return {
            name[len(prefix) :]: tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }

    try:
        detector = from_config(description["detector"])
        if not isinstance(detector, Detector):
            raise ValueError(f"{description['detector']!r} is no detector")
        detector.load_state_dict(under("detector."))
        perturb = InputPerturbation(**description["perturb"]) if description["perturb"] else None
        classes, threshold = detector.head.num_classes, description["threshold"] or None
        if threshold is not None:
            if threshold["num_classes"] not in (None, classes):
                raise ValueError(f"its threshold is not for the {classes} classes of the head")
            threshold = Threshold.from_state(threshold, under("threshold."))
        layers, saved_head, head_name = (
            description["layers"],
            description["head"],
            description["head_name"],
        )
        seen = Sketch(tensors["seen"]) if "seen" in tensors else None
        if not isinstance(layers, list) or not all(
            isinstance(n, str) for n in [*layers, saved_head, head_name or ""]
        ):
            raise ValueError("the names of its head and layers are not text")
        autocast = (
            None if description.get("autocast") is None else PRECISIONS[description["autocast"]]
        )
        version, weights = _version(description), _weights(description)
        _try(detector, perturb, threshold)
    except Exception as error:  # a forged file can make any of this raise nearly anything
        reason = (" ".join(str(error).split()) or type(error).__name__)[:500]
        raise artifact.ArtifactError(
            f"{os.fspath(path)!r} does not hold a working guard: {reason}"
        ) from None
    if model is not None and not isinstance(model, Head):
        head = head or (head_name.split("+") if isinstance(head_name, str) else None)
    guard = Guard(model, detector, perturb=perturb, head=head, layers=layers)
    if guard.classifier is not None and guard.classifier is not model:
        guard.classifier.autocast = autocast
    guard.threshold, guard.seen = threshold, seen
    if isinstance(about := description.get("about"), dict):
        guard.about = about
    guard.restore_identity(version, weights)
    if model is not None and (present := guard.head.fingerprint()) != saved_head:
        heads = f"was fitted with the head {saved_head[:16]}…, this model has {present[:16]}…"
        remedy = "load it with the model that it was fitted on, or fit a new guard"
        raise artifact.ArtifactError(f"{os.fspath(path)!r} {heads}: {remedy}")
    return guard


def _version(description: dict[str, Any]) -> int:
    """How many thresholds the guard has had; older files do not say."""
    version = description.get("guard_version", 1 if description["threshold"] else 0)
    if type(version) is not int or not 0 <= version < 2**31:
        raise ValueError(f"its version is {version!r}, expected a whole number")
    return version


def _weights(description: dict[str, Any]) -> str | None:
    """The hash of the model's weights. Older files have one only if `fdbd fit` built the model."""
    about = description.get("about")
    origin = about.get("model") if isinstance(about, dict) else None
    older = origin.get("weights") if isinstance(origin, dict) else None
    weights = description.get("weights", older)
    if weights is not None and not isinstance(weights, str):
        raise ValueError("the hash of its model's weights is not text")
    return weights


def _on_its_device(assemble: Callable[[], Guard]) -> Guard:
    """A guard assembled in another thread, then moved to its model's device in this one, whose
    settings apply."""
    guard = run_apart(assemble)
    return guard if guard.classifier is None else guard.to(device_of(guard.classifier))


def _try(
    detector: Detector, perturb: InputPerturbation | None, threshold: Threshold | None
) -> None:
    """Score two rows, so that a file whose parts do not fit each other fails when it is loaded."""
    if detector.needs.network or perturb is not None:
        return
    batch = detector.example()
    try:
        answers = [detector.score(batch), detector.head(batch.features).argmax(dim=1)]
    except NotFittedError:  # an ensemble that is not calibrated yet
        return
    if threshold is not None:
        answers += threshold.decide(
            answers[0], answers[1].new_tensor([0, detector.head.num_classes - 1])
        )
    if any(answer.shape != (2,) for answer in answers):
        raise ValueError(
            f"answers on two samples have the shapes {[tuple(answer.shape) for answer in answers]}"
        )
