"""Every table, figure and statement of the fDBD paper as a named experiment, small enough to run here in minutes."""

from .experiment import SCALES, Experiment, find, list_experiments
from .finding import Check, Finding, Table
from .runner import run, run_all
from .subject import MissingData

__all__ = [
    "SCALES",
    "Check",
    "Experiment",
    "Finding",
    "MissingData",
    "Table",
    "find",
    "list_experiments",
    "run",
    "run_all",
]
