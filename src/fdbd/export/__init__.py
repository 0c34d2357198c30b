"""A guard for other runtimes: ONNX, 8-bit ONNX and OpenVINO. One module per target; import the one
that you need."""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Export = TypeVar("Export", bound=Callable[..., object])
_TARGETS: dict[tuple[str, bool], Callable[..., object]] = {}


def export_target(suffix: str, int8: bool = False) -> Callable[[Export], Export]:
    """Makes `fdbd export` call a function of a module in this folder for an --out with this ending,
    in lower case. The function takes the arguments of `fdbd.export.onnx.export` (with --int8, those
    of `export_int8`). It returns the path if its answers agree with torch's, or an object whose
    text says how far they do."""

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
        endings = " or ".join(suffix for suffix, is_int8 in _TARGETS if is_int8 == int8)
        what = f"--out is {str(out)!r}" + (", and --int8 was given" if int8 else "")
        raise ValueError(f"{what}: end it with {endings}, which says what to write")
    return _TARGETS[key]
