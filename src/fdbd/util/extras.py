"""Imports by name: optional packages, named with their pip command if they are missing, and a
user's objects."""

import importlib
import sys
from pathlib import Path
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
        if isinstance(error, ModuleNotFoundError):
            missing = (error.name or "").partition(".")[0]
            if missing != package:
                # The package is there, something that it needs is not.
                raise
        raise MissingExtraError(
            f"{name} is not installed; run: pip install 'fdbd[{extra}]'"
        ) from None


def import_object(name: str, what: str) -> object:
    """The object that ``package.module:object`` names; `what` it should be, for the error message:
    "model factory". Importing runs code: call this only for a name that the user has typed or
    vouched for."""
    module, _, attribute = name.partition(":")
    top = Path.cwd() / module.partition(".")[0]
    if (top.is_dir() or top.with_suffix(".py").is_file()) and str(top.parent) not in sys.path:
        sys.path.insert(0, str(top.parent))
    try:
        found: object = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot import the {what} {name} ({error})") from None
    return found
