"""Benchmarks as small files that read like the sentence "this model, this ID set, these OOD sets, these detectors"."""

from __future__ import annotations

import difflib
import os
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from fdbd.bench.detector_specs import Spec, detectors_from, runs_code
from fdbd.data.datasets import info
from fdbd.data.preprocessing import Preprocess

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXAMPLE = """\
# fdbd bench CONFIG: this model, this ID set, these OOD sets, these detectors.

title = "ResNet-20 on CIFAR-10"

# A model of the zoo, timm:NAME, torchvision:NAME, public:NAME, or package.module:function (which takes --trust-model);
# `checkpoint` loads weights into it, from this folder or from below FDBD_DATA.
model = "cifar10-ce"
# checkpoint = "resnet20.th"
# num_classes = 10

# Dataset names (`fdbd data` lists them), folders of images, .npz files or OpenOOD image lists.
train = "cifar10"          # split "train"
id = "cifar10"             # split "test"
ood = ["textures", "tiny-imagenet", "flowers102", "mnist", "fashion-mnist"]
# To name OOD sets, give a table instead, below the other entries:
# [ood]
# "my textures" = "photos/dtd"

# limit = 5000             # at most so many ID images; train_limit and ood_limit do the same for the other sets
# holdout = 0.5            # instead of `train`: fit on the other half of the ID images
# validation = 0.1         # this share of the ID images is not scored: temperatures and ensembles learn from it

# Optional: a preset (cifar10, cifar100, imagenet, …) or its fields.
# preprocess = { size = 32, mean = [0.485, 0.456, 0.406], std = [0.229, 0.224, 0.225] }

# Optional; left out, every detector that works on features runs, with the shaping combinations. Options stand beside
# the name; package.module:Class is a detector of your own (which takes --trust-model).
# detectors = ["fdbd", "knn", { name = "react+fdbd", percentile = 80, title = "ReAct 80 + fDBD" }]

# Optional: averages by group.
[groups]
near = ["tiny-imagenet"]
far = ["textures", "flowers102", "mnist", "fashion-mnist"]
"""

_TEXTS = ("model", "id", "train", "title", "checkpoint", "head", "positive")
_COUNTS = ("num_classes", "limit", "train_limit", "ood_limit", "batch_size")


@dataclass(frozen=True)
class Config:
    """One benchmark, as its file says it.

    Attributes:
        ood: what to load by name; a set that was given without a name stands under what it is loaded from.
        limit, train_limit, ood_limit: at most so many images of the ID set, the training set and each OOD set; an
            `ood_limit` that is not given is `limit`.
        holdout: the share of the ID set that is scored while the rest is fitted on, where no training set is at hand.
        validation: the share of the scored ID images that is set aside for what must be learnt from data that the
            network has not seen: a temperature, or the p-values of an ensemble.
        batch_size: images per forward pass; None: chosen by a short trial.
        source: the file, where it came from one; a file does not choose what code runs.
    """

    model: str
    id: str
    ood: Mapping[str, str]
    train: str = ""
    title: str = ""
    checkpoint: str | None = None
    num_classes: int | None = None
    head: str | None = None
    preprocess: str | Mapping[str, Any] | None = None
    detectors: tuple[Spec, ...] | None = None
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    positive: Literal["id", "ood"] = "id"
    limit: int | None = None
    train_limit: int | None = None
    ood_limit: int | None = None
    holdout: float | None = None
    validation: float | None = None
    batch_size: int | None = None
    source: Path | None = None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Config:
        """Read a .toml file."""
        source = Path(path)
        if source.suffix != ".toml":
            raise ValueError(f"{str(source)!r} is no config: expected a .toml file")
        if not source.is_file():
            raise FileNotFoundError(f"no config at {str(source)!r}; `fdbd bench --init {source.name}` writes one")
        try:
            values = tomllib.loads(source.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:  # those of TOML and of text encodings are ValueErrors
            raise ValueError(f"{source} is no valid TOML: {' '.join(str(error).split())}") from None
        return cls.from_dict(values, source, is_file=True)

    @classmethod
    def from_dict(cls, values: Any, source: str | os.PathLike[str] = "config", *, is_file: bool = False) -> Config:
        """Check all that can be checked before any work: names and kinds of the entries, groups, detectors and their
        options, and the preprocessing.

        Raises:
            ValueError: for the first entry that is wrong, in one sentence that starts with `source`.
        """
        try:
            checked = _checked(values)
            if is_file:
                checked["source"] = Path(source)
            return cls(**checked)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{source}: {error}") from None

    def names_of(self, key: str) -> set[str]:
        """What an OOD set can be called in `groups`: the name that it was given, or any that it has by itself."""
        return _names_of(key, self.ood[key])


def _checked(values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"expected entries such as model, id and ood, got {type(values).__name__}")
    known = {entry.name for entry in fields(Config)} - {"source"}
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(known))}"
            raise ValueError(f"unknown entry {_short(name)}; {hint}")
    for name in ("model", "id", "ood"):
        if not values.get(name):
            raise ValueError(f"{name!r} is missing; `fdbd bench --init` writes an example")
    for name in _TEXTS:
        if name in values and not isinstance(values[name], str):
            raise ValueError(f"{name!r} is {_short(values[name])}, expected a text")
    for name in _COUNTS:
        value = values.get(name)
        if name in values and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name!r} is {_short(value)}, expected a positive whole number")
    for name in ("holdout", "validation"):
        value = values.get(name, 0.5)
        if not isinstance(value, float) or not 0 < value < 1:
            raise ValueError(f"{name!r} is {_short(value)}, expected a share of the ID images, in (0, 1)")
    if "holdout" in values and values.get("train"):
        raise ValueError("'holdout' fits on a part of 'id'; leave out 'train', or 'holdout'")
    if values.get("positive", "id") not in ("id", "ood"):
        raise ValueError(f"'positive' is {_short(values['positive'])}, expected 'id' or 'ood'")
    if "preprocess" in values:
        Preprocess.parse(values["preprocess"])
    ood = _ood(values["ood"])
    checked = {**values, "ood": ood, "train": values.get("train") or values["id"]}
    checked["groups"] = _groups(values.get("groups", {}), ood)
    if "detectors" in values:
        checked["detectors"] = _detectors(values["detectors"])
    return checked


def _ood(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        value = [value]
    if isinstance(value, dict) and all(isinstance(item, str) for item in value.values()):
        return value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"'ood' is {_short(value)}, expected a list of names, or a table of names and what to load")
    names = [info(item).name if _is_dataset(item) else Path(item).stem for item in value]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"two OOD sets would both be called {name!r}: give them names of their own in a table, "
                f'[ood] with lines such as "first {name}" = "path"'
            )
    return {item: item for item in value}


def _groups(value: Any, ood: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, dict):
        raise ValueError(f"'groups' is {_short(value)}, expected names with lists of OOD sets")
    known = {name for key, data in ood.items() for name in _names_of(key, data)}
    for group, members in value.items():
        if not isinstance(members, list) or not members or not all(isinstance(item, str) for item in members):
            raise ValueError(f"'groups.{group}' is {_short(members)}, expected a list of OOD sets")
        for member in members:
            if member not in known:
                raise ValueError(f"group {group!r} has {member!r}, which is not among the OOD sets {', '.join(ood)}")
    return {str(group): tuple(members) for group, members in value.items()}


def _detectors(value: Any) -> tuple[Spec, ...]:
    value = [value] if isinstance(value, (str, dict)) else value
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"'detectors' is {_short(value)}, expected a list of names, or of tables with name and options"
        )
    detectors_from([spec for spec in value if not runs_code(spec)])  # code waits for the user's word
    return tuple(value)


def _names_of(key: str, data: str) -> set[str]:
    if key != data:
        return {key}
    return {key, info(key).name} if _is_dataset(key) else {key, Path(key).name, Path(key).stem}


def _is_dataset(name: str) -> bool:
    try:
        return bool(info(name))
    except ValueError:
        return False


def _short(value: Any) -> str:
    """For a message: at most a hundred characters of a value."""
    text = reprlib.repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
