"""Every table, figure and statement of the fDBD paper as a named experiment, small enough to run here in minutes."""

from fdbd.paper.experiment import SCALES, Experiment, find, list_experiments
from fdbd.paper.finding import Check, Finding, Table
from fdbd.paper.runner import run, run_all
from fdbd.paper.subject import MissingData

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
