"""Experiments as small TOML files: entries common to all scales first, then one section per
scale."""

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fdbd.util.files import parse_toml

FOLDER = Path(__file__).parent / "experiments"
NETWORKS = Path(__file__).parent / "networks.toml"
SCALES = ("small", "public", "paper")
"""In the package, in seconds; public networks and data below FDBD_DATA; the paper's own networks
and data."""


@dataclass(frozen=True)
class Experiment:
    """One table, figure or statement of the paper, at one scale."""

    name: str  #: what `fdbd paper NAME` takes
    kind: str  #: which program runs it, a key of `fdbd.paper.runner.PROGRAMS`
    title: str
    place: str  #: where it stands in the paper
    claim: str  #: what the paper says, in our words
    scale: str
    settings: Mapping[
        str, Any
    ]  #: all other entries of the file, overridden by those of the scale's section
    digest: str  #: SHA-256 of the file and the scale
    device: str = "auto"  #: where networks run, as for `choose_device`


def list_experiments() -> list[str]:
    """Names of all experiments, in the paper's order.

    >>> list_experiments()[:2]
    ['table-cifar10', 'table-imagenet']
    """
    orders = {
        path.stem: parse_toml(path.read_text(encoding="utf-8"))["order"]
        for path in FOLDER.glob("*.toml")
    }
    return sorted(orders, key=lambda name: (orders[name], name))


def find(name: str, scale: str = "small", device: str = "auto") -> Experiment:
    """The experiment of that name, or the one in the user's own .toml file.

    >>> find("proposition-1").kind
    'proposition-1'
    """
    if scale not in SCALES:
        raise ValueError(f"scale is {scale!r}, expected {', '.join(SCALES[:-1])} or {SCALES[-1]}")
    path = Path(name)
    if not name.endswith(".toml"):
        path, known = FOLDER / f"{name}.toml", list_experiments()
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "`fdbd paper` lists them"
            raise ValueError(f"no experiment is called {name!r}; {hint}")
    elif not path.is_file():
        raise FileNotFoundError(f"no experiment file at {name!r}")
    text, networks = (file.read_text(encoding="utf-8") for file in (path, NETWORKS))
    try:
        values = parse_toml(text)
    except ValueError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    for entry in ("kind", "title", "claim"):
        if not isinstance(values.get(entry), str):
            raise ValueError(f"{path} needs a text {entry!r}")
    sections = {section: values.pop(section, {}) for section in SCALES}
    settings = {"place": "", **values, **sections[scale]}
    if "models" in settings:
        settings["models"] = [
            _model(entry, parse_toml(networks), path) for entry in settings["models"]
        ]
    settings["claim"] = " ".join(settings["claim"].split())
    described = {entry: settings.pop(entry) for entry in ("kind", "title", "place", "claim")}
    digest = hashlib.sha256(f"{scale}\n{text}\n{networks}".encode()).hexdigest()
    return Experiment(
        path.stem, **described, scale=scale, settings=settings, digest=digest, device=device
    )


def _model(entry: Any, networks: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A model's entry, with those of the public network that it names; a name alone is such a
    network."""
    entry = {"network": entry} if isinstance(entry, str) else dict(entry)
    name = entry.pop("network", None)
    if name is not None and name not in networks:
        raise ValueError(
            f"{path}: no network is called {name!r}, expected one of {', '.join(networks)}"
        )
    return {**networks.get(name, {}), **entry}
