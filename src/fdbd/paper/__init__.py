"""Every table, figure and statement of the fDBD paper as a named experiment, small enough to run here in minutes."""

from fdbd.paper.experiment import Experiment, find, list_experiments
from fdbd.paper.models import MissingData
from fdbd.paper.runner import run_all

__all__ = ["Experiment", "MissingData", "find", "list_experiments", "run_all"]
