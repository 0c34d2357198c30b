"""Experiments as small TOML files: entries common to all scales first, then one section per
scale."""

import difflib
import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fdbd.core.tables import from_table
from fdbd.paper.settings import KINDS, Description, Settings
from fdbd.util.files import parse_toml

FOLDER = Path(__file__).parent / "experiments"
NETWORKS = Path(__file__).parent / "networks.toml"
SCALES = ("small", "public", "paper")
"""In the package, in seconds; public networks and data below FDBD_DATA; the paper's own networks
and data."""


@dataclass(frozen=True)
class Experiment:
    """One table, figure or statement of the paper, at one scale."""

    #: what `fdbd paper NAME` takes
    name: str
    #: which program runs it, a key of `fdbd.paper.runner.PROGRAMS`
    kind: str
    title: str
    #: where it stands in the paper
    place: str
    #: what the paper says, in our words
    claim: str
    scale: str
    #: the other entries of the file, overridden by those of the scale's section; the type is that
    #: of the kind in `fdbd.paper.settings.KINDS`
    settings: Any
    #: SHA-256 of the file and the scale
    digest: str
    #: where networks run, as for `choose_device`
    device: str = "auto"
    #: what is asked here beyond the paper
    question: str = ""


def list_experiments() -> list[str]:
    """Names of all experiments, in the paper's order.

    >>> list_experiments()[:2]
    ['table-cifar10', 'table-imagenet']
    """
    orders: dict[str, float] = {}
    for path in FOLDER.glob("*.toml"):
        orders[path.stem] = parse_toml(path.read_text(encoding="utf-8"))["order"]
    return sorted(orders, key=lambda name: (orders[name], name))


def find(name: str, scale: str = "small", device: str = "auto") -> Experiment:
    """The experiment of that name, or the one in the user's own .toml file.

    Raises:
        ValueError: if there is no such experiment or scale, or if the file has a key that its kind
            does not know, or a value of the wrong type.

    >>> find("proposition-1").kind
    'proposition-1'
    """
    if scale not in SCALES:
        raise ValueError(f"scale is {scale!r}, expected {', '.join(SCALES[:-1])} or {SCALES[-1]}")
    path = _path_of(name)
    text = path.read_text(encoding="utf-8")
    networks_text = NETWORKS.read_text(encoding="utf-8")
    try:
        values = parse_toml(text)
    except ValueError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    description, settings = _parse(values, parse_toml(networks_text), path, scale)
    digest = hashlib.sha256(f"{scale}\n{text}\n{networks_text}".encode()).hexdigest()
    return Experiment(
        name=path.stem,
        kind=description.kind,
        title=description.title,
        place=description.place,
        claim=" ".join(description.claim.split()),
        scale=scale,
        settings=settings,
        digest=digest,
        device=device,
        question=" ".join(description.question.split()),
    )


def _path_of(name: str) -> Path:
    """The file of an experiment of the package, or the user's own."""
    if name.endswith(".toml"):
        own = Path(name)
        if not own.is_file():
            raise FileNotFoundError(f"no experiment file at {name!r}")
        return own
    known = list_experiments()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "`fdbd paper` lists them"
        raise ValueError(f"no experiment is called {name!r}; {hint}")
    return FOLDER / f"{name}.toml"


def _parse(
    values: dict[str, Any], networks: dict[str, Any], path: Path, scale: str
) -> tuple[Description, Settings]:
    """The two parts of a file: what is the same at all scales, and the settings of one scale."""
    described_keys = {field.name for field in fields(Description)}
    described = {key: value for key, value in values.items() if key in described_keys}
    common = {key: value for key, value in values.items() if key not in described_keys}
    description = from_table(described, Description, name=str(path))
    if description.kind not in KINDS:
        raise ValueError(
            f"{path}: kind is {description.kind!r}, expected one of {', '.join(KINDS)}"
        )
    sections = {
        "small": description.small,
        "public": description.public,
        "paper": description.paper,
    }
    settings = {}
    for each, section in sections.items():
        # A mistake in a section is told whichever scale is asked for.
        if section or each == scale:
            name = f"{path}, scale {each}"
            settings[each] = _settings(description.kind, common, section, networks, path, name)
    return description, settings[scale]


def _settings(
    kind: str,
    common: dict[str, Any],
    section: dict[str, Any],
    networks: dict[str, Any],
    path: Path,
    name: str,
) -> Settings:
    """The settings of one scale, whose section comes on top of the common entries."""
    merged = {**common, **section}
    if "models" in merged:
        merged["models"] = [_model(entry, networks, path) for entry in merged["models"]]
    return from_table(merged, KINDS[kind], name=name)


def _model(entry: Any, networks: dict[str, Any], path: Path) -> dict[str, Any]:
    """A model's entry, with those of the network in networks.toml that it names; a text alone is
    such a name."""
    own = {"network": entry} if isinstance(entry, str) else dict(entry)
    name = own.pop("network", None)
    if name is None:
        return own
    if name not in networks:
        raise ValueError(
            f"{path}: no network is called {name!r}, expected one of {', '.join(networks)}"
        )
    return {**networks[name], **own}
