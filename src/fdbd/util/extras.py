"""Optional packages: imported where they are used, and named with their pip command where they are missing."""

import importlib
from typing import Any


class MissingExtraError(ImportError):
    """A package of an optional extra is not installed."""


def require(module: str, extra: str) -> Any:
    """The imported module, or an error that names the pip command.

    >>> require("json", "report").__name__
    'json'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        name = {"PIL": "Pillow", "sklearn": "scikit-learn"}.get(package, package)
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] != package:
            raise  # the package is there, something that it needs is not
        raise MissingExtraError(f"{name} is not installed; run: pip install 'fdbd[{extra}]'") from None
