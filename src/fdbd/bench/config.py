"""Benchmarks as small files that read like the sentence "this model, this ID set, these OOD sets, these detectors"."""

from __future__ import annotations

import difflib
import os
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

EXAMPLE = """\
# fdbd bench CONFIG: this model, this ID set, these OOD sets, these detectors.

title = "ResNet-20 on CIFAR-10"

# A name (fdbd, torchvision or timm), package.module:function, or zoo:NAME; `checkpoint` loads weights into it, from
# this folder or from below FDBD_DATA.
model = "zoo:cifar10-ce"
# checkpoint = "resnet20.th"
# num_classes = 10

# Dataset names (`fdbd data` lists them), folders of images, .npz files or OpenOOD image lists.
train = "cifar10"          # split "train"
id = "cifar10"             # split "test"
ood = ["textures", "tiny-imagenet", "flowers102", "mnist", "fashion-mnist"]

# holdout = 0.5            # instead of `train`: fit on the other half of the ID images

# Optional: a preset (cifar10, cifar100, imagenet, …) or its fields.
# preprocess = { size = 32, mean = [0.485, 0.456, 0.406], std = [0.229, 0.224, 0.225] }

# Optional; left out, every detector that works on features runs, with the shaping combinations.
# detectors = ["fdbd", "energy", "knn", "react+energy"]

# Optional: averages by group.
[groups]
near = ["tiny-imagenet"]
far = ["textures", "flowers102", "mnist", "fashion-mnist"]
"""


@dataclass(frozen=True)
class Config:
    """One benchmark, as its file says it.

    holdout: the share of the ID set that is scored while the rest is fitted on, where there is no training set at hand.
    """

    model: str
    id: str
    ood: tuple[str, ...]
    train: str = ""
    title: str = ""
    checkpoint: str | None = None
    num_classes: int | None = None
    head: str | None = None
    preprocess: Any = None
    detectors: tuple[str, ...] | None = None
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    positive: str = "id"
    limit: int | None = None
    train_limit: int | None = None
    holdout: float | None = None
    batch_size: int = 128

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Config:
        """Read a .toml, .yaml or .yml file."""
        source = Path(path)
        if not source.is_file():
            raise FileNotFoundError(f"no config at {str(source)!r}; `fdbd bench --init {source.name}` writes one")
        return cls.from_dict(_parse(source), source)

    @classmethod
    def from_dict(cls, values: Any, source: str | os.PathLike[str] = "config") -> Config:
        """Check names and kinds of the entries."""
        if not isinstance(values, dict):
            raise ValueError(f"{source}: expected entries such as model, id and ood, got {type(values).__name__}")
        known = {entry.name: entry for entry in fields(cls)}
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
                raise ValueError(f"{source}: unknown entry {_short(name)}; {hint}")
        for name in ("model", "id", "ood"):
            if not values.get(name):
                raise ValueError(f"{source}: {name!r} is missing; `fdbd bench --init` writes an example")
        for name in ("model", "id", "train", "title", "checkpoint", "head", "positive"):
            if name in values and not isinstance(values[name], str):
                raise ValueError(f"{source}: {name!r} is {_short(values[name])}, expected a text")
        for name in ("num_classes", "limit", "train_limit", "batch_size"):
            value = values.get(name)
            if name in values and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{source}: {name!r} is {_short(value)}, expected a positive whole number")
        holdout = values.get("holdout", 0.5)
        if not isinstance(holdout, float) or not 0 < holdout < 1:
            raise ValueError(f"{source}: 'holdout' is {_short(holdout)}, expected a share of the ID images, in (0, 1)")
        if "holdout" in values and values.get("train"):
            raise ValueError(f"{source}: 'holdout' fits on a part of 'id'; leave out 'train', or 'holdout'")
        if values.get("positive", "id") not in ("id", "ood"):
            raise ValueError(f"{source}: 'positive' is {_short(values['positive'])}, expected 'id' or 'ood'")
        lists = {name: _names(values[name], name, source) for name in ("ood", "detectors") if name in values}
        groups = values.get("groups", {})
        if not isinstance(groups, dict):
            raise ValueError(f"{source}: 'groups' is {_short(groups)}, expected names with lists of OOD sets")
        groups = {str(name): _names(members, f"groups.{name}", source) for name, members in groups.items()}
        return cls(**{**values, **lists, "groups": groups, "train": values.get("train") or values["id"]})


def _names(value: Any, entry: str, source: str | os.PathLike[str]) -> tuple[str, ...]:
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{source}: {entry!r} is {_short(value)}, expected a list of names")
    return tuple(value)


def _parse(source: Path) -> Any:
    if source.suffix not in (".toml", ".yaml", ".yml"):
        raise ValueError(f"{source} has the suffix {source.suffix!r}, expected .toml, .yaml or .yml")
    parse, kind = (_parse_toml, "TOML") if source.suffix == ".toml" else (_parse_yaml, "YAML")
    try:
        return parse(source.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # that of TOML and of text encodings are ValueErrors
        raise ValueError(f"{source} is no valid {kind}: {' '.join(str(error).split())}") from None


def _parse_toml(text: str) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def _parse_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _short(value: Any) -> str:
    """For a message: a few nested aliases of YAML print as gigabytes."""
    text = reprlib.repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
