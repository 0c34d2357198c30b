"""Benchmarks as small files that read like the sentence "this model, this ID set, these OOD sets,
these detectors"."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from typing_extensions import Self

from fdbd.bench.tuning import Grid
from fdbd.core.preprocessing import Preprocess
from fdbd.core.tables import from_table
from fdbd.data.datasets import info
from fdbd.decision.choice import AUTO, Auto
from fdbd.detectors import Detector, create
from fdbd.util.extras import import_object
from fdbd.util.files import parse_toml
from fdbd.util.terminal import one_line

Spec = str | Mapping[str, Any]
"""A name such as "react+fdbd" or "package.module:Class", or a table with `name`, options and
perhaps a `title`."""
EXAMPLE = Path(__file__).with_name("example.toml")
"""The file that `fdbd bench --init` copies."""
PROTOCOLS = Path(__file__).with_name("protocols")
"""Configs that are part of the package."""
SEED = "{seed}"
"""Stands in the path of a checkpoint for the number of a run."""


@dataclass(frozen=True)
class PublishedTable:
    """Numbers of others for the same protocol, as a config holds them.

    Attributes:
        source, date, note: as in `fdbd.bench.rows.Published`.
        groups: the groups that the columns of `auroc` stand for.
        auroc: percent by detector, one number per group.

    >>> table = PublishedTable("a paper", "2026-01", ["near", "far"], {"msp": [80.1, 90.2]})
    >>> dict(zip(table.groups, table.auroc["msp"]))
    {'near': 80.1, 'far': 90.2}
    """

    source: str
    date: str
    groups: list[str]
    auroc: dict[str, list[float]]
    note: str = ""


@dataclass(frozen=True)
class Entries:
    """What the file may say; `Config` is what it means."""

    model: str = ""
    id: str = ""
    ood: str | list[str] | dict[str, str] = field(default_factory=list)
    train: str = ""
    title: str = ""
    checkpoint: str | None = None
    seeds: list[int] = field(default_factory=list)
    num_classes: int | None = None
    head: str | None = None
    preprocess: str | dict[str, Any] | None = None
    detectors: str | list[str | dict[str, Any]] | None = None
    groups: dict[str, list[str]] = field(default_factory=dict)
    positive: str = "id"
    limit: int | None = None
    train_limit: int | None = None
    ood_limit: int | None = None
    holdout: float | None = None
    validation: float | str | None = None
    ood_validation: str | None = None
    shifted: dict[str, str] = field(default_factory=dict)
    unresized: list[str] = field(default_factory=list)
    batch_size: int | None = None
    tune: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    published: PublishedTable | None = None
    sources: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Config:
    """One benchmark, as its file says it.

    Attributes:
        ood: what to load, by name; a set that was given without one has the name of its dataset,
            file or folder.
        groups: names of groups with the names of their OOD sets.
        checkpoint, seeds: weights; with ``{seed}`` in the path, one file for each of the seeds.
        limit, train_limit, ood_limit: the largest number of images of the ID set, of the training
            set and of each OOD set; an `ood_limit` that is not given is `limit`.
        holdout: without a training set, the share of the ID set that is scored; the rest is
            fitted on.
        validation: what must be learnt from data that the network has not seen (a temperature, the
            p-values of an ensemble, options) is learnt from this: a share of the scored ID images,
            which is set aside, or another dataset.
        ood_validation: an OOD set for choosing options, apart from those that are scored.
        shifted: covariate-shifted ID sets, what to load by name.
        unresized: names of sets whose images have the network's input size already, so that they
            are cropped at most.
        batch_size: images per forward pass; None: chosen by a short trial.
        tune: the values to choose from by detector and option.
        published: numbers of others for the same protocol.
        sources: where to get what is missing, by the start of a dataset's or checkpoint's path.
        source: the file that it came from, if any; a file does not choose what code runs.

    >>> entries = {"model": "cifar10-ce", "id": "cifar10", "ood": ["mnist"], "limit": 100}
    >>> config = Config.from_dict(entries)
    >>> config.train, config.ood
    ('cifar10', {'mnist': 'mnist'})
    """

    model: str
    id: str
    ood: Mapping[str, str]
    train: str = ""
    title: str = ""
    checkpoint: str | None = None
    seeds: tuple[int, ...] = ()
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
    validation: float | str | None = None
    ood_validation: str | None = None
    shifted: Mapping[str, str] = field(default_factory=dict)
    unresized: tuple[str, ...] = ()
    batch_size: int | None = None
    tune: Mapping[str, Grid] = field(default_factory=dict)
    published: PublishedTable | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    source: Path | None = None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Read a .toml file."""
        source = Path(path)
        if source.suffix != ".toml":
            raise ValueError(f"{str(source)!r} is not a config: expected a .toml file")
        if not source.is_file():
            raise FileNotFoundError(
                f"no config at {str(source)!r}; `fdbd bench --init {source.name}` writes one"
            )
        try:
            values = parse_toml(source.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            # Those of TOML and of text encodings are ValueErrors.
            raise ValueError(f"{source} is not valid TOML: {one_line(error)}") from None
        return replace(cls.from_dict(values, source), source=source)

    @classmethod
    def from_dict(cls, values: Any, source: str | os.PathLike[str] = "config") -> Self:
        """Check all that can be checked before any work: names and types of the entries, groups,
        detectors and their options, and the preprocessing.

        Raises:
            ValueError: for the first entry that is wrong, in one sentence that starts with
                `source`.
        """
        if not isinstance(values, dict):
            found = type(values).__name__
            raise ValueError(f"{source}: expected entries such as model, id and ood, got {found}")
        entries = from_table(values, Entries, name=str(source))
        try:
            return cls._from_entries(entries)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{source}: {error}") from None

    @classmethod
    def _from_entries(cls, entries: Entries) -> Self:
        _check_numbers(entries)
        for name in ("model", "id", "ood"):
            if not getattr(entries, name):
                raise ValueError(f"{name!r} is missing; `fdbd bench --init` writes an example")
        if entries.holdout is not None and entries.train:
            raise ValueError("'holdout' fits on a part of 'id'; leave out 'train', or 'holdout'")
        if entries.preprocess is not None:
            Preprocess.parse(entries.preprocess)
        ood = _named_sets(entries.ood)
        values = {each.name: getattr(entries, each.name) for each in fields(Entries)}
        values["ood"] = ood
        values["train"] = entries.train or entries.id
        values["groups"] = _groups(entries.groups, ood)
        values["detectors"] = _checked_detectors(entries.detectors)
        values["seeds"] = _checked_seeds(entries)
        values["unresized"] = tuple(entries.unresized)
        _check_tuning(entries)
        _check_sets(entries, ood)
        return cls(**values)

    def for_seed(self, seed: int) -> Config:
        """The same benchmark with the weights of one seed."""
        assert self.checkpoint is not None
        return replace(self, checkpoint=self.checkpoint.replace(SEED, str(seed)), seeds=())


def _check_numbers(entries: Entries) -> None:
    for name in ("num_classes", "limit", "train_limit", "ood_limit", "batch_size"):
        value = getattr(entries, name)
        if value is not None and value < 1:
            raise ValueError(f"{name!r} is {value}, expected a positive whole number")
    for name in ("holdout", "validation"):
        value = getattr(entries, name)
        if isinstance(value, (int, float)) and not 0 < value < 1:
            raise ValueError(f"{name!r} is {value}, expected a share of the ID images, in (0, 1)")
    if entries.positive not in ("id", "ood"):
        raise ValueError(f"'positive' is {entries.positive!r}, expected 'id' or 'ood'")


def _named_sets(ood: str | list[str] | dict[str, str]) -> dict[str, str]:
    """OOD sets by name; those without one have the name of their dataset, file or folder."""
    if isinstance(ood, dict):
        return ood
    items = [ood] if isinstance(ood, str) else ood
    found: dict[str, str] = {}
    for item in items:
        name = _name_of(item)
        if name in found:
            raise ValueError(
                f"two OOD sets would both be called {name!r}: give them names of their own in a "
                f'table, [ood] with lines such as "first {name}" = "path"'
            )
        found[name] = item
    return found


def _name_of(item: str) -> str:
    """The name of a dataset, or that of a file or folder."""
    try:
        return info(item).name
    except ValueError:
        path = Path(item)
        return path.stem if path.suffix.lower() in (".npz", ".txt") else path.name


def _groups(
    groups: Mapping[str, Sequence[str]], ood: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """The OOD sets of each group, which a file may also call by what is loaded."""
    found = {}
    for group, members in groups.items():
        if not members:
            raise ValueError(f"'groups.{group}' is empty, expected a list of OOD sets")
        names = []
        for member in members:
            name = member if member in ood else _name_of(member)
            if name not in ood:
                raise ValueError(
                    f"group {group!r} has {member!r:.80}, which is not among the OOD sets "
                    f"{', '.join(ood):.500}"
                )
            names.append(name)
        found[group] = tuple(name for name in ood if name in names)
    return found


def _checked_detectors(
    detectors: str | list[str | dict[str, Any]] | None,
) -> tuple[Spec, ...] | None:
    if detectors is None:
        return None
    specs = [detectors] if isinstance(detectors, str) else detectors
    if not specs:
        raise ValueError("'detectors' is empty, expected names, or tables of a name and options")
    # Detectors whose import runs code are checked later, once the user has allowed it.
    detectors_from([spec for spec in specs if not names_code(spec)])
    return tuple(specs)


def _checked_seeds(entries: Entries) -> tuple[int, ...]:
    has_place = SEED in (entries.checkpoint or "")
    if entries.seeds and not has_place:
        raise ValueError("'seeds' takes a 'checkpoint' with {seed} in its path")
    if has_place and not entries.seeds:
        raise ValueError("'checkpoint' has {seed} in its path: give 'seeds', such as [0, 1, 2]")
    return tuple(entries.seeds)


def _check_tuning(entries: Entries) -> None:
    """ValueError if a grid names an unknown detector, or an option that the detector lacks."""
    for name, grid in entries.tune.items():
        if not grid or not all(grid.values()):
            raise ValueError(f"'tune.{name}' is empty, expected options with lists of values")
        create(name, **{option: values[0] for option, values in grid.items()})


def _check_sets(entries: Entries, ood: Mapping[str, str]) -> None:
    for name in entries.shifted:
        if name in ood:
            raise ValueError(f"{name!r} is both among 'ood' and among 'shifted'")
    for name in entries.unresized:
        if name not in ood and name not in entries.shifted:
            raise ValueError(f"'unresized' has {name!r}, which is neither in 'ood' nor 'shifted'")
    if entries.published is not None:
        for group in entries.published.groups:
            if group not in entries.groups:
                raise ValueError(f"'published' has the group {group!r}, which 'groups' lacks")
        for detector, values in entries.published.auroc.items():
            if len(values) != len(entries.published.groups):
                raise ValueError(
                    f"'published.auroc.{detector}' has {len(values)} numbers, expected one for "
                    f"each of {', '.join(entries.published.groups)}"
                )


def detectors_from(specs: Iterable[Spec], *, trust: bool = False) -> dict[str, Detector | Auto]:
    """Unfitted detectors, or the options of "auto", by the title of their row.

    Args:
        specs: names, or tables of a name and options. The text "none" stands for None, which TOML
            lacks.
        trust: the user's word that ``package.module:Class`` may be imported, which runs code.

    >>> list(detectors_from(["fdbd", {"name": "react+energy", "percentile": 80}]))
    ['fdbd', 'react+energy (percentile=80)']
    """
    found: dict[str, Detector | Auto] = {}
    for spec in specs:
        title, detector = _detector_from(spec, trust)
        if title in found:
            raise ValueError(
                f"two detectors would both be called {title!r}: give them titles of their own"
            )
        found[title] = detector
    return found


def _detector_from(spec: Spec, trust: bool) -> tuple[str, Detector | Auto]:
    """One detector with its title."""
    options: dict[str, Any] = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = options.pop("name", None)
    title = options.pop("title", None)
    if not isinstance(name, str):
        raise ValueError(
            f"a detector is {spec!r}, expected a name, or a table with name and options"
        )
    for key, value in options.items():
        if value == "none":
            options[key] = None
    detector: Detector | Auto
    if name == AUTO:
        detector = _auto_from(options)
    elif names_code(name):
        if not trust:
            raise ValueError(
                f"the detector {name} is code to run: say that you trust it with --trust-model"
            )
        detector = _own_detector(name, options)
    else:
        detector = create(name, **options)
    if title is None:
        shown = ", ".join(f"{key}={value}" for key, value in options.items())
        title = f"{name} ({shown})" if shown else name
    return title, detector


def _auto_from(options: Mapping[str, Any]) -> Auto:
    """The options of "auto", as a table names them."""
    known = [each.name for each in fields(Auto)]
    for option in options:
        if option not in known:
            raise ValueError(
                f"{AUTO!r} has no option {option!r}; its options are {', '.join(known)}"
            )
    return Auto(**options)


def names_code(spec: Spec) -> bool:
    """Whether a detector is a class that has to be imported."""
    name = spec if isinstance(spec, str) else spec.get("name")
    return isinstance(name, str) and ":" in name


def _own_detector(name: str, options: Mapping[str, Any]) -> Detector:
    make: Any = import_object(name, "detector")
    try:
        detector = make(**options)
    except TypeError as error:
        raise ValueError(f"{name} does not make a detector with these options: {error}") from None
    if not isinstance(detector, Detector):
        raise ValueError(f"{name} makes a {type(detector).__name__}, expected an fdbd detector")
    return detector
