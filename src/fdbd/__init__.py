"""fdbd: out-of-distribution detection for any classifier with a linear head.

Names are imported when they are first used, so that a program pays for what it needs: serving an
ONNX graph takes no torch. `__init__.pyi` lists them, each with the module that defines it.
"""

import lazy_loader

from fdbd.util.version import __version__ as __version__

_DEPRECATED = ("deploy", "models", "shaping", "statistics")
"""Old import paths, which work until 0.4; they are not among the public names."""

__getattr__, _, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = [name for name in _names if name not in _DEPRECATED]


def __dir__() -> list[str]:
    return list(__all__)
