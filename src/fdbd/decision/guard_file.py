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
from fdbd.core.tokenizer import TextTokenizer
from fdbd.decision import hub
from fdbd.decision.choice import share_head
from fdbd.decision.guard import Guard, warn_of_other_weights
from fdbd.decision.inputs import InputRange
from fdbd.decision.map_threshold import MapThreshold, image_scores
from fdbd.decision.record import GuardRecord
from fdbd.decision.threshold import Threshold
from fdbd.detectors import Detector, Ensemble
from fdbd.fitting.overlap import Sketch
from fdbd.kernels.threads import run_apart
from fdbd.networks.by_name import SENTENCES, NamedModel, model_by_name, model_runs_code
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
    """SHA-256 of the file's content, which identifies the guard."""

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """How the guard's model takes texts; None if it takes none."""
        if self.guard.classifier is None:
            return None
        return TextTokenizer.from_model(self.guard.about.get("model"))


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
    guard.stages.warn_of_batch_statistics()
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
    on features. ArtifactError: the weights are not those of the fit, or the file is not a guard.

    Args:
        path: what `fdbd fit` or `Guard.save` wrote.
        model: another name for the model. Needed if the file names none (images are then prepared
            as the model says), or names a factory or a ``.pt2`` file: a file does not choose what
            code runs.
        checkpoint: the model's weights; None: those at the place of the fit, or beside the guard.
        trust: as for `model_by_name`.
        device: as for `model_by_name`.
        features: leave the model out, for a guard that takes features.
    """
    description, tensors = run_apart(lambda: artifact.read(path))
    about = _read_about(path, description.get("about") or {})
    found: NamedModel | None = None
    preprocess: Preprocess | None = None
    takes_features = features or (about.origin is None and model is None)
    if not takes_features:
        origin = about.origin or {}
        found = _find_model(path, origin, tensors, model, checkpoint, trust, device)
        preprocess = about.preprocess or found.preprocess
        if preprocess is None and found.tokenizer is None:
            raise ValueError(
                f"neither {_shown(path)} nor {found.origin['name']} says how images are prepared; "
                "fit the guard with fdbd fit, and say there with --preprocess"
            )
    network = None if found is None else found.model
    guard = _on_its_device(lambda: _assemble(path, description, tensors, network))
    classes = guard.detector.head.num_classes
    if about.class_names and len(about.class_names) != classes:
        raise artifact.ArtifactError(
            f"{_shown(path)} names {len(about.class_names)} classes, and its head has {classes}: "
            "fit a new guard"
        )
    class_names = about.class_names
    if not class_names and found is not None:
        class_names = found.class_names
    return OpenedGuard(guard, preprocess, class_names, description["sha256"])


class _About(NamedTuple):
    """What a file says of its guard's model."""

    origin: dict[str, Any] | None
    preprocess: Preprocess | None
    class_names: tuple[str, ...]


def _read_about(path: str | os.PathLike[str], about: Any) -> _About:
    """The checked description of the model; ArtifactError if it is not one."""
    try:
        origin = about.get("model")
        if origin is not None:
            if not isinstance(origin["name"], str):
                raise TypeError("the model's name is not text")
            _check_count(origin.get("num_classes"))
        fields = about.get("preprocess")
        preprocess = None if fields is None else Preprocess.from_dict(fields)
        class_names = tuple(str(name) for name in about.get("class_names") or ())
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise artifact.ArtifactError(
            f"{_shown(path)} does not describe its model: {error}"
        ) from None
    return _About(origin, preprocess, class_names)


def _check_count(num_classes: object) -> None:
    if num_classes is not None and type(num_classes) is not int:
        raise TypeError("the model's number of classes is not a whole number")


def _find_model(
    path: str | os.PathLike[str],
    origin: dict[str, Any],
    tensors: dict[str, Tensor],
    model: str | None,
    checkpoint: str | os.PathLike[str] | None,
    trust: bool,
    device: str | torch.device | None,
) -> NamedModel:
    """The model that the file or the user names, with the weights of the fit."""
    name = model
    if name is None:
        name = str(origin["name"])
        if model_runs_code(name) and not trust:
            raise ValueError(
                f"{_shown(path)} names the model {name}, which is code to run; to trust it, add "
                f"--model {name} or --trust-model"
            )
    if checkpoint is None and origin.get("checkpoint"):
        checkpoint = _find_checkpoint(path, Path(str(origin["checkpoint"])))
    num_classes = origin.get("num_classes")
    # A forged number would have a network of any size built, so it must agree with the head in
    # the file.
    if num_classes is not None:
        _check_classes(path, num_classes, tensors)
    head = None
    if name.startswith(f"{SENTENCES}:"):
        head = _read_head(tensors)
    found = model_by_name(
        name, checkpoint, num_classes=num_classes, trust=trust, device=device, head=head
    )
    if origin.get("weights") not in (None, found.origin["weights"]):
        raise artifact.ArtifactError(
            f"the weights of {os.fspath(checkpoint or name)!r} are not those that {_shown(path)} "
            "was fitted with: give the right --checkpoint, or fit a new guard"
        )
    return found


def _read_head(tensors: dict[str, Tensor]) -> Head | None:
    """The head that a detector in the file keeps; None if there is none."""
    for name, weight in tensors.items():
        if not name.endswith("head_weight"):
            continue
        bias = tensors.get(f"{name.removesuffix('weight')}bias")
        if bias is not None:
            return Head(weight, bias)
    return None


def _check_classes(
    path: str | os.PathLike[str], num_classes: int, tensors: dict[str, Tensor]
) -> None:
    """ArtifactError unless a detector in the file has a head of this many classes."""
    found = set()
    for name, tensor in tensors.items():
        if name.endswith("head_weight") and tensor.ndim == 2:
            found.add(len(tensor))
    # A head with a single row has become two.
    is_binary = num_classes == 1 and 2 in found
    if found and num_classes not in found and not is_binary:
        raise artifact.ArtifactError(
            f"{_shown(path)} names a model of {num_classes:,} classes, and its head has "
            f"{min(found):,}: fit a new guard"
        )


def _find_checkpoint(path: str | os.PathLike[str], named: Path) -> Path:
    """The model's weights at the place of the fit, or beside the guard."""
    beside = Path(path).resolve().parent / named.name
    for place in (named, beside):
        if place.is_file():
            return place
    raise FileNotFoundError(
        f"the weights of the model, {str(named)!r}, are neither there nor beside the guard; say "
        "with --checkpoint where they are"
    )


class _Saved(NamedTuple):
    """The checked parts of a guard's file."""

    detector: Detector
    perturb: InputPerturbation | None
    threshold: Threshold | None
    map_threshold: MapThreshold | None
    record: GuardRecord
    head: str
    """The fingerprint of the head of the fit."""
    head_name: str | None
    layers: list[str]
    autocast: torch.dtype | None


def _assemble(
    path: str | os.PathLike[str],
    description: dict[str, Any],
    tensors: dict[str, Tensor],
    model: nn.Module | Head | None = None,
    head: HeadName = None,
) -> Guard:
    """The guard that a file describes, around a model."""
    try:
        saved = _read_parts(description, tensors)
        _try(saved)
    except Exception as error:
        # A forged file can make any of this raise nearly anything.
        reason = (" ".join(str(error).split()) or type(error).__name__)[:500]
        raise artifact.ArtifactError(
            f"{_shown(path)} does not hold a working guard: {reason}"
        ) from None
    takes_images = model is not None and not isinstance(model, Head)
    if takes_images and head is None and saved.head_name is not None:
        head = saved.head_name.split("+")
    guard = Guard(model, saved.detector, perturb=saved.perturb, head=head, layers=saved.layers)
    # A Classifier that the user made keeps its own precision.
    if guard.classifier is not None and guard.classifier is not model:
        guard.classifier.autocast = saved.autocast
    guard.threshold = saved.threshold
    guard.map_threshold = saved.map_threshold
    guard.stages.replace_record(saved.record)
    if isinstance(description.get("about"), dict):
        guard.about = description["about"]
    if model is not None:
        present = guard.head.fingerprint()
        if present != saved.head:
            raise artifact.ArtifactError(
                f"{_shown(path)} was fitted with the head {saved.head[:16]}…, this model has "
                f"{present[:16]}…: load it with the model that it was fitted on, or fit a new guard"
            )
    return guard


def _read_parts(description: dict[str, Any], tensors: dict[str, Tensor]) -> _Saved:
    """The parts of a guard; a file that does not describe them raises anything."""
    detector = from_config(description["detector"])
    if not isinstance(detector, Detector):
        raise ValueError(f"{description['detector']!r} is not a detector")
    detector.load_state_dict(_under("detector.", tensors))
    if isinstance(detector, Ensemble):
        share_head(detector.members)
    perturb = None
    if description["perturb"]:
        perturb = InputPerturbation(**description["perturb"])
    threshold = None
    map_threshold = None
    config = description["threshold"]
    if config and config.get("maps"):
        map_threshold = MapThreshold.from_state(config, _under("threshold.", tensors))
    else:
        threshold = _read_threshold(config, tensors, detector.head.num_classes)
    head = description["head"]
    head_name = description["head_name"]
    layers = description["layers"]
    _check_names(head, head_name, layers)
    autocast = None
    if description.get("autocast") is not None:
        autocast = PRECISIONS[description["autocast"]]
    record = _read_record(description, tensors, threshold or map_threshold)
    return _Saved(
        detector, perturb, threshold, map_threshold, record, head, head_name, layers, autocast
    )


def _check_names(head: object, head_name: object, layers: object) -> None:
    """ValueError unless the fingerprint of the head and all names are text."""
    if not isinstance(layers, list):
        raise ValueError("the names of its layers are not a list")
    names = [head, *layers]
    if head_name is not None:
        names.append(head_name)
    for name in names:
        if not isinstance(name, str):
            raise ValueError("the names of its head and layers are not text")


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names start with a prefix, without it."""
    found = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            found[name.removeprefix(prefix)] = tensor
    return found


def _read_threshold(
    config: dict[str, Any] | None, tensors: dict[str, Tensor], num_classes: int
) -> Threshold | None:
    if not config:
        return None
    if config["num_classes"] not in (None, num_classes):
        raise ValueError(f"its threshold is not for the {num_classes} classes of the head")
    return Threshold.from_state(config, _under("threshold.", tensors))


def _read_record(
    description: dict[str, Any],
    tensors: dict[str, Tensor],
    threshold: Threshold | MapThreshold | None,
) -> GuardRecord:
    """What the guard noted at its fit. Older files know less."""
    record = GuardRecord()
    if "seen" in tensors:
        record.seen = Sketch(tensors["seen"])
    if description.get("inputs") is not None:
        record.inputs = InputRange.from_values(description["inputs"])
    # Older files say so by their threshold alone.
    gives_maps = description.get("gives_maps", isinstance(threshold, MapThreshold))
    if not isinstance(gives_maps, bool):
        raise ValueError(f"whether it gives maps is {gives_maps!r}, expected true or false")
    record.gives_maps = gives_maps
    # Version 1 is the first threshold.
    if threshold is None:
        version = description.get("guard_version", 0)
    else:
        version = description.get("guard_version", 1)
    if type(version) is not int or not 0 <= version < 2**31:
        raise ValueError(f"its version is {version!r}, expected a whole number")
    record.version = version
    # Older files have a hash only if `fdbd fit` built the model.
    about = description.get("about")
    origin = about.get("model") if isinstance(about, dict) else None
    older = origin.get("weights") if isinstance(origin, dict) else None
    weights = description.get("weights", older)
    if weights is not None and not isinstance(weights, str):
        raise ValueError("the hash of its model's weights is not text")
    record.weights = weights
    return record


def _on_its_device(assemble: Callable[[], Guard]) -> Guard:
    """A guard assembled in another thread, then moved to its model's device in this one, whose
    settings apply."""
    guard = run_apart(assemble)
    if guard.classifier is None:
        return guard
    return guard.to(device_of(guard.classifier))


def _try(saved: _Saved) -> None:
    """Score two rows, so that a file whose parts do not fit each other fails when it is loaded."""
    detector = saved.detector
    if detector.needs.network or saved.perturb is not None:
        return
    batch = detector.example()
    try:
        scores = detector.score(batch)
    except NotFittedError:
        # An ensemble that is not calibrated yet.
        return
    labels = detector.head(batch.features).argmax(dim=1)
    answers = [scores, labels]
    if saved.threshold is not None:
        # The first and the last class, whose thresholds stand at the ends.
        ends = labels.new_tensor([0, detector.head.num_classes - 1])
        answers.extend(saved.threshold.decide(scores, ends))
    if saved.map_threshold is not None:
        answers.append(saved.map_threshold.is_ood(scores))
        # As two images of one position each.
        answers.extend(saved.map_threshold.image_threshold.decide(image_scores(scores[:, None])))
    shapes = [tuple(answer.shape) for answer in answers]
    if any(shape != (2,) for shape in shapes):
        raise ValueError(f"answers on two samples have the shapes {shapes}")


def _shown(path: str | os.PathLike[str]) -> str:
    return repr(os.fspath(path))
