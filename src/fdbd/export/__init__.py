"""A guard for other runtimes: ONNX, 8-bit ONNX and OpenVINO. One module per target; import the one
that you need. Targets of other packages are registered by `export_target`."""

import importlib
import pkgutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from fdbd.util.terminal import one_line

ENTRY_POINTS = "fdbd.export_targets"
"""The group of entry points under which packages register targets: each names a module or a
function that uses `export_target` when it is loaded."""
Export = TypeVar("Export", bound=Callable[..., object])
_TARGETS: dict[tuple[str, bool], Callable[..., object]] = {}


def export_target(suffix: str, int8: bool = False) -> Callable[[Export], Export]:
    """Makes `fdbd export` call a function for an --out with this ending, in lower case. The
    function takes the arguments of `fdbd.export.onnx.export` (with --int8, those of `export_int8`)
    and returns an `ExportRecord` of what it wrote and verified; the command says "not verified" of
    anything else.

    A package names its module under the entry points ``fdbd.export_targets``:

        [project.entry-points."fdbd.export_targets"]
        toy = "my_package.toy_export"

    >>> @export_target(".doctest")
    ... def export_nothing(guard, path, example, *, class_names=None, opset=18): ...
    >>> find_export(Path("guard.doctest")) is export_nothing
    True
    """
    if not suffix.startswith(".") or suffix != suffix.lower():
        raise ValueError(f"the ending is {suffix!r}, expected one such as '.onnx', in lower case")

    def register(function: Export) -> Export:
        _TARGETS[suffix, int8] = function
        return function

    return register


def find_export(out: Path, int8: bool = False) -> Callable[..., object]:
    """The function that writes this file; ValueError: there is none."""
    key = (out.suffix.lower(), int8)
    if key not in _TARGETS:
        _load_own(key)
    if key not in _TARGETS:
        _load_others()
    if key not in _TARGETS:
        endings = " or ".join(suffix for suffix, is_int8 in _TARGETS if is_int8 == int8)
        what = f"--out is {str(out)!r}"
        if int8:
            what += ", and --int8 was given"
        raise ValueError(f"{what}: end it with {endings}, which says what to write")
    return _TARGETS[key]


def _load_own(key: tuple[str, bool]) -> None:
    """Import the modules of this package until one writes such a file: some import a lot."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
        if key in _TARGETS:
            return


def _load_others() -> None:
    """Load what other packages registered as targets."""
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        try:
            entry.load()
        except Exception as error:
            raise ValueError(
                f"the export target {entry.name!r} of another package ({entry.value}) cannot be "
                f"loaded: {one_line(error)}"
            ) from error
