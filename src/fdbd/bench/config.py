"""Benchmarks as small files that read like the sentence "this model, this ID set, these OOD sets, these detectors"; and
detectors as a config or the command line names them: with options, titles, or as a class of the user's own."""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

from fdbd.data.datasets import info
from fdbd.data.preprocessing import Preprocess
from fdbd.detectors import Detector, create
from fdbd.util.extras import import_object
from fdbd.util.files import parse_toml
from fdbd.util.terminal import one_line

Spec = str | Mapping[str, Any]
"""A name such as "react+fdbd" or "package.module:Class", or a table with `name`, options and perhaps a `title`."""
EXAMPLE = Path(__file__).with_name("example.toml")
"""The file that `fdbd bench --init` copies."""
_EXPECTED: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    str: ("a text", lambda value: isinstance(value, str)),
    int: ("a positive whole number", lambda value: type(value) is int and value >= 1),
    float: ("a share of the ID images, in (0, 1)", lambda value: isinstance(value, float) and 0 < value < 1),
    Literal["id", "ood"]: ("'id' or 'ood'", lambda value: value in ("id", "ood")),
}
"""What an entry of each type in `Config` is to be; entries of other types are checked one by one."""


@dataclass(frozen=True)
class Config:
    """One benchmark, as its file says it.

    Attributes:
        ood: what to load by name; a set that was given without a name stands under what it is loaded from.
        groups: names of groups with the keys of `ood` in them; a file may call a set by any name that it has.
        limit, train_limit, ood_limit: at most so many images of the ID set, the training set and each OOD set; an
            `ood_limit` that is not given is `limit`.
        holdout: the share of the ID set that is scored while the rest is fitted on, where no training set is at hand.
        validation: the share of the scored ID images that is set aside for what must be learnt from data that the
            network has not seen: a temperature, or the p-values of an ensemble.
        batch_size: images per forward pass; None: chosen by a short trial.
        source: the file, where it came from one; a file does not choose what code runs.

    >>> config = Config.from_dict({"model": "cifar10-ce", "id": "cifar10", "ood": ["mnist"], "limit": 100})
    >>> config.train, config.ood
    ('cifar10', {'mnist': 'mnist'})
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
            values = parse_toml(source.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:  # those of TOML and of text encodings are ValueErrors
            raise ValueError(f"{source} is no valid TOML: {one_line(error)}") from None
        return cls.from_dict(values, source, is_file=True)

    @classmethod
    def from_dict(cls, values: Any, source: str | os.PathLike[str] = "config", *, is_file: bool = False) -> Config:
        """Check all that can be checked before any work: names and kinds of the entries, groups, detectors and their
        options, and the preprocessing.

        Raises:
            ValueError: for the first entry that is wrong, in one sentence that starts with `source`.
        """
        try:
            return cls(**_checked(values), source=Path(source) if is_file else None)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{source}: {error}") from None


def _checked(values: Any) -> dict[str, Any]:
    """The entries as `Config` keeps them."""
    if not isinstance(values, dict):
        raise ValueError(f"expected entries such as model, id and ood, got {type(values).__name__}")
    hints = get_type_hints(Config)
    del hints["source"]
    for name, value in values.items():
        if name not in hints:
            close = difflib.get_close_matches(str(name), hints, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(hints))}"
            raise ValueError(f"unknown entry {_short(name)}; {hint}")
        for kind, (expected, fits) in _EXPECTED.items():
            if hints[name] in (kind, kind | None) and not fits(value):
                raise ValueError(f"{name!r} is {_short(value)}, expected {expected}")
    for name in ("model", "id", "ood"):
        if not values.get(name):
            raise ValueError(f"{name!r} is missing; `fdbd bench --init` writes an example")
    if "holdout" in values and values.get("train"):
        raise ValueError("'holdout' fits on a part of 'id'; leave out 'train', or 'holdout'")
    if "preprocess" in values:
        Preprocess.parse(values["preprocess"])
    checked = {**values, "ood": _ood(values["ood"]), "train": values.get("train") or values["id"]}
    checked["groups"] = _groups(values.get("groups", {}), checked["ood"])
    if "detectors" in values:
        checked["detectors"] = _detectors(values["detectors"])
    return checked


def _ood(value: Any) -> dict[str, str]:
    value = [value] if isinstance(value, str) else value
    texts = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"'ood' is {_short(value)}, expected a list of names, or a table of names and what to load")
    if isinstance(value, dict):
        return value
    names = [_dataset(item) or Path(item).stem for item in value]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"two OOD sets would both be called {name!r}: give them names of their own in a table, "
                f'[ood] with lines such as "first {name}" = "path"'
            )
    return {item: item for item in value}


def _groups(value: Any, ood: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The keys of each group's sets. A set is called by its key, or by any name that what is loaded has."""
    if not isinstance(value, dict):
        raise ValueError(f"'groups' is {_short(value)}, expected names with lists of OOD sets")
    names = {
        key: {key} if key != item else {key, _dataset(key) or Path(key).name, Path(key).stem}
        for key, item in ood.items()
    }
    found = {}
    for group, members in value.items():
        if not isinstance(members, list) or not members or not all(isinstance(item, str) for item in members):
            raise ValueError(f"'groups.{group}' is {_short(members)}, expected a list of OOD sets")
        if unknown := [member for member in members if not any(member in known for known in names.values())]:
            raise ValueError(f"group {group!r} has {unknown[0]!r}, which is not among the OOD sets {', '.join(ood)}")
        found[str(group)] = tuple(key for key, known in names.items() if known & set(members))
    return found


def _detectors(value: Any) -> tuple[Spec, ...]:
    value = [value] if isinstance(value, (str, dict)) else value
    if not isinstance(value, list) or not value:
        raise ValueError(f"'detectors' is {_short(value)}, expected a list of names, or tables with name and options")
    detectors_from([spec for spec in value if not runs_code(spec)])  # code waits for the user's word
    return tuple(value)


def _dataset(name: str) -> str | None:
    """The dataset's own name; None where `name` is that of no dataset."""
    try:
        return info(name).name
    except ValueError:
        return None


def _short(value: Any) -> str:
    """For a message: at most a hundred characters of a value."""
    text = reprlib.repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def detectors_from(specs: Iterable[Spec], *, trust: bool = False) -> dict[str, Detector]:
    """Unfitted detectors by the title of their row.

    Args:
        specs: names, or tables of a name and options. The text "none" stands for None, which TOML has not.
        trust: the user's word that ``package.module:Class`` may be imported, which runs code.

    >>> list(detectors_from(["fdbd", {"name": "react+energy", "percentile": 80}]))
    ['fdbd', 'react+energy (percentile=80)']
    """
    found: dict[str, Detector] = {}
    for spec in specs:
        options = {"name": spec} if isinstance(spec, str) else dict(spec)
        name, title = options.pop("name", None), options.pop("title", None)
        if not isinstance(name, str):
            raise ValueError(f"a detector is {spec!r}, expected a name, or a table with name and options")
        options = {key: None if value == "none" else value for key, value in options.items()}
        if runs_code(name) and not trust:
            raise ValueError(f"the detector {name} is code to run: say that you trust it with --trust-model")
        detector = _own(name, options) if runs_code(name) else create(name, **options)
        shown = ", ".join(f"{key}={value}" for key, value in options.items())
        title = title or (f"{name} ({shown})" if shown else name)
        if title in found:
            raise ValueError(f"two detectors would both be called {title!r}: give them titles of their own")
        found[title] = detector
    return found


def runs_code(spec: Spec) -> bool:
    """Whether a detector is a class that has to be imported."""
    name = spec if isinstance(spec, str) else spec.get("name")
    return isinstance(name, str) and ":" in name


def _own(name: str, options: Mapping[str, Any]) -> Detector:
    make: Any = import_object(name, "detector")
    try:
        detector = make(**options)
    except TypeError as error:
        raise ValueError(f"{name} does not make a detector with these options: {error}") from None
    if not isinstance(detector, Detector):
        raise ValueError(f"{name} makes a {type(detector).__name__}, expected an fdbd detector")
    return detector
