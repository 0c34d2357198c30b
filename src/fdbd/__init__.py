"""fdbd: out-of-distribution detection for any classifier with a linear head.

Names are imported when they are first used, so that a program pays for what it needs: serving an
ONNX graph takes no torch. `__init__.pyi` lists them, each with the module that defines it.
"""

import lazy_loader

from fdbd.util.version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
