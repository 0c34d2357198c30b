"""fdbd doctor: what is installed, what is missing, and where things are kept."""

import os
import platform
import shutil
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from fdbd.commands.options import JSON, answer
from fdbd.util.terminal import one_line

EXTRAS = {
    "vision": ("torchvision", "timm", "PIL"),
    "report": ("matplotlib", "pandas", "pyarrow", "jinja2"),
    "knn": ("faiss",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "ray": ("ray",),
    "serve": ("starlette", "uvicorn", "multipart", "prometheus_client"),
}
"""Modules of each extra."""


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


def examine() -> dict[str, dict[str, Any]]:
    """All findings, by chapter."""
    import torch

    from fdbd.util.devices import choose_device
    from fdbd.util.files import cache_root, data_roots
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
    devices = {
        "in use": str(choose_device("auto")),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    extras = {}
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if find_spec(module) is None]
        extras[extra] = (
            f"missing {', '.join(missing)}: pip install 'fdbd[{extra}]'" if missing else "installed"
        )
    cache = cache_root()
    size = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
    state = f"{size / 1e9:.2f} GB{'' if os.access(cache, os.W_OK) else ', cannot be written'}"
    folders = {
        "cache": f"{cache}, {state if cache.is_dir() else 'not there yet'}",
        "data": ", ".join(map(str, data_roots())) or "none: FDBD_DATA names none",
        "free here": f"{shutil.disk_usage('.').free / 1e9:.2f} GB",
    }
    kernels = {"compiled": _kernels()}
    return {
        "Versions": versions,
        "Devices": devices,
        "Extras": extras,
        "Folders": folders,
        "Kernels": kernels,
    }


def _kernels() -> str:
    """Whether the kernel of fDBD's score compiles here and agrees with its definition."""
    import torch

    from fdbd.kernels import dispatch

    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return "no: NUMBA_DISABLE_JIT is set, plain torch does the work"
    width, classes = 64, 3
    features = torch.linspace(-1, 1, dispatch.WORTH_A_KERNEL).reshape(-1, width)
    predicted = torch.arange(len(features)) % classes
    folded = (
        torch.eye(classes, width),
        torch.zeros(classes),
        torch.zeros(width),
        torch.tensor(1e-6),
    )
    try:
        score = dispatch.folded_score(features, folded, True, predicted=predicted)
        expected = dispatch.plain_score(features, predicted, folded, True)
    except Exception as error:  # whatever a broken compiler raises
        return f"no: {type(error).__name__}: {one_line(error)[:200]}"
    return (
        "yes"
        if torch.allclose(score, expected, rtol=1e-4, atol=1e-5)
        else "no: its results are wrong here"
    )
