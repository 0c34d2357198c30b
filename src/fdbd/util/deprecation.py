"""Old import paths that still work for one minor release, with a warning that names the new one."""

import warnings


def warn_of_move(old: str, new: str) -> None:
    """DeprecationWarning for the module that imports `old`, a module that is now `new`."""
    warnings.warn(
        f"{old} has moved to {new}; the old path will be removed in 0.4",
        DeprecationWarning,
        stacklevel=3,
    )
