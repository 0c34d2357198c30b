"""Every table, figure and statement of the fDBD paper as a named experiment, small enough to run
here in minutes."""

from fdbd.paper.experiment import SCALES, Experiment, find, list_experiments
from fdbd.paper.models import MissingData
from fdbd.paper.result import Check, Result, Table
from fdbd.paper.runner import run, run_all

__all__ = [
    "SCALES",
    "Check",
    "Experiment",
    "MissingData",
    "Result",
    "Table",
    "find",
    "list_experiments",
    "run",
    "run_all",
]
