"""Every table, figure and statement of the fDBD paper as a named experiment, small enough to run
here in minutes."""

import warnings
from typing import Any

from fdbd.paper.experiment import SCALES, Experiment, find, list_experiments
from fdbd.paper.finding import Finding, Statement, TextTable
from fdbd.paper.models import MissingData
from fdbd.paper.runner import run, run_all

__all__ = [
    "SCALES",
    "Experiment",
    "Finding",
    "MissingData",
    "Statement",
    "TextTable",
    "find",
    "list_experiments",
    "run",
    "run_all",
]

_RENAMED: dict[str, type] = {"Result": Finding, "Check": Statement, "Table": TextTable}


def __getattr__(name: str) -> Any:
    """The classes of this package under the names that they had until 0.2."""
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    renamed = _RENAMED[name]
    warnings.warn(
        f"fdbd.paper.{name} is fdbd.paper.{renamed.__name__}; the old name will be removed in 0.4",
        DeprecationWarning,
        stacklevel=2,
    )
    return renamed
