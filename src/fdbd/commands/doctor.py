"""fdbd doctor: what is installed, what is missing, and where things are kept."""

import os
import platform
import re
import shutil
from importlib import metadata
from typing import Any

from fdbd.commands.options import JSON, answer
from fdbd.util.terminal import one_line

# Extras for those who work on the library itself.
OF_DEVELOPMENT = ("dev", "docs")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([A-Za-z0-9._-]+)['\"]")


def doctor(as_json: bool = JSON) -> None:
    """Say what is installed, which extras are missing, which devices there are, and where files are
    kept.

    Example: `fdbd doctor`
    """
    found = examine()
    lines = []
    for title, part in found.items():
        lines += [title, *(f"  {name:<14} {value}" for name, value in part.items())]
    answer(found, as_json, *lines)


def packages_of_extras() -> dict[str, list[str]]:
    """The packages of each extra, as the installed package itself lists them."""
    found: dict[str, list[str]] = {}
    try:
        requirements = metadata.requires("fdbd") or []
    except metadata.PackageNotFoundError:
        # Run from a folder of sources that was never installed.
        return found
    for requirement in requirements:
        package = _REQUIREMENT.match(requirement)
        extra = _EXTRA.search(requirement)
        if package is None or extra is None or extra[1] in OF_DEVELOPMENT:
            continue
        if not _is_for_this_system(requirement):
            continue
        found.setdefault(extra[1], []).append(package[1])
    return found


def _is_for_this_system(requirement: str) -> bool:
    """Whether a requirement's marker leaves out this system, such as ``sys_platform !=
    'win32'``."""
    is_windows = platform.system() == "Windows"
    return not (is_windows and re.search(r"sys_platform\s*!=\s*['\"]win32", requirement))


def is_installed(package: str) -> bool:
    """Whether a package of this name is installed, in any version."""
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def examine() -> dict[str, dict[str, Any]]:
    """All findings, by chapter."""
    return {
        "Versions": _versions(),
        "Devices": _devices(),
        "Extras": _extras(),
        "Folders": _folders(),
        "Kernels": {"compiled": _kernels()},
    }


def _versions() -> dict[str, Any]:
    from fdbd.util.version import __version__

    versions = {
        "fdbd": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    for name in ("torch", "numpy", "numba", "scikit-learn", "safetensors"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "missing"
    return versions


def _devices() -> dict[str, Any]:
    import torch

    from fdbd.util.devices import choose_device

    return {
        "in use": str(choose_device("auto")),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _extras() -> dict[str, Any]:
    """Whether each extra is installed, or how to install it."""
    extras = {}
    for extra, packages in packages_of_extras().items():
        missing = [package for package in packages if not is_installed(package)]
        if missing:
            extras[extra] = f"missing {', '.join(missing)}: pip install 'fdbd[{extra}]'"
        else:
            extras[extra] = "installed"
    return extras


def _folders() -> dict[str, Any]:
    """The folders of the cache and of data, and the space that is left."""
    from fdbd.util.files import cache_root, data_roots

    cache = cache_root()
    state = "not there yet"
    if cache.is_dir():
        size = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
        state = f"{size / 1e9:.2f} GB"
        if not os.access(cache, os.W_OK):
            state += ", cannot be written"
    return {
        "cache": f"{cache}, {state}",
        "data": ", ".join(map(str, data_roots())) or "none: FDBD_DATA names none",
        "free here": f"{shutil.disk_usage('.').free / 1e9:.2f} GB",
    }


def _kernels() -> str:
    """Whether the kernel of fDBD's score compiles here and agrees with its definition."""
    import torch

    from fdbd.kernels import dispatch

    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return "no: NUMBA_DISABLE_JIT is set, plain torch does the work"
    width = 64
    classes = 3
    features = torch.linspace(-1, 1, dispatch.WORTH_A_KERNEL).reshape(-1, width)
    predicted = torch.arange(len(features)) % classes
    normals = torch.eye(classes, width)
    offsets = torch.zeros(classes)
    center = torch.zeros(width)
    floor = torch.tensor(1e-6)
    folded = (normals, offsets, center, floor)
    try:
        score = dispatch.folded_score(features, folded, divide=True, predicted=predicted)
        expected = dispatch.plain_score(features, predicted, folded, divide=True)
    except Exception as error:
        # A broken compiler may raise anything.
        return f"no: {type(error).__name__}: {one_line(error)[:200]}"
    if not torch.allclose(score, expected, rtol=1e-4, atol=1e-5):
        return "no: its results are wrong here"
    return "yes"
