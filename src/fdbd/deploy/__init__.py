"""To production: ONNX graphs, scikit-learn estimators, Ray jobs and monitoring. Import the part that you need."""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Export = TypeVar("Export", bound=Callable[..., object])
_TARGETS: dict[tuple[str, bool], Callable[..., object]] = {}


def export_target(suffix: str, int8: bool = False) -> Callable[[Export], Export]:
    """Makes a function of a module in this folder what `fdbd export` calls for an --out of this ending, in lower case.
    It takes the arguments of `fdbd.deploy.onnx.export` (with --int8, of `export_int8`). It returns the path where its
    answers agree with torch's, or something that says in print how far they do."""

    def register(function: Export) -> Export:
        _TARGETS[suffix, int8] = function
        return function

    return register


def find_export(out: Path, int8: bool = False) -> Callable[..., object]:
    """The function that writes this file; ValueError: there is none."""
    key = out.suffix.lower(), int8
    for module in pkgutil.iter_modules(__path__):  # one after the other, since some import a lot
        if key not in _TARGETS:
            importlib.import_module(f"{__name__}.{module.name}")
    if key not in _TARGETS:
        endings = ", ".join(suffix for suffix, is_int8 in _TARGETS if is_int8 == int8)
        raise ValueError(f"{'--int8' if int8 else 'fdbd export'} writes {endings} files, not {str(out)!r}")
    return _TARGETS[key]
