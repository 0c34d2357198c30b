"""Detectors as a config or the command line names them: with options, titles, or as a class of the user's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fdbd.detectors import Detector, create
from fdbd.util.imports import import_object

Spec = str | Mapping[str, Any]
"""A name such as "react+fdbd" or "package.module:Class", or a table with `name`, options and perhaps a `title`."""


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
