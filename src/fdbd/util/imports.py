"""Objects by name: ``package.module:object``, where a module may lie in the current folder."""

import importlib
import sys
from pathlib import Path


def import_object(name: str, what: str) -> object:
    """The object that ``package.module:object`` names; `what` it should be, for the error message: "model factory".
    Importing runs code: call this only for a name that the user has typed or vouched for."""
    module, _, attribute = name.partition(":")
    top = Path.cwd() / module.partition(".")[0]
    if (top.is_dir() or top.with_suffix(".py").is_file()) and str(top.parent) not in sys.path:
        sys.path.insert(0, str(top.parent))
    try:
        found: object = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot import the {what} {name} ({error})") from None
    return found
