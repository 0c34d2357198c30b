"""fdbd: out-of-distribution detection for any classifier with a linear head.

Names are imported when they are first used, so that a program pays for what it needs: serving an ONNX graph takes no
torch. `fdbd.api` lists them.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from fdbd.util.version import __version__ as __version__

if TYPE_CHECKING:
    from fdbd import metrics as metrics
    from fdbd.api import *  # noqa: F403
    from fdbd.bench import Benchmark as Benchmark
    from fdbd.bench import Results as Results
    from fdbd.deploy.monitor import Monitor as Monitor

_ELSEWHERE = {"Benchmark": "fdbd.bench", "Results": "fdbd.bench", "Monitor": "fdbd.deploy.monitor"}
_ROOMS = {module.name for module in iter_modules(__path__)}  # noqa: F405


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return import_module(f"fdbd.{name}")
    if name in _ELSEWHERE:
        return getattr(import_module(_ELSEWHERE[name]), name)
    public = {key: value for key, value in vars(import_module("fdbd.api")).items() if not key.startswith("_")}
    if name == "__all__":
        return [*public, *_ELSEWHERE, "metrics"]
    if name not in public:
        raise AttributeError(f"module 'fdbd' has no attribute {name!r}")
    globals()[name] = public[name]
    return public[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__"), *_ROOMS})  # type: ignore[misc]
