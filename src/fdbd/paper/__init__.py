"""Every table, figure and statement of the fDBD paper as a named experiment, small enough to run here in minutes."""

from fdbd.paper.experiment import SCALES as SCALES
from fdbd.paper.experiment import Experiment as Experiment
from fdbd.paper.experiment import find as find
from fdbd.paper.experiment import list_experiments as list_experiments
from fdbd.paper.models import MissingData as MissingData
from fdbd.paper.result import Check as Check
from fdbd.paper.result import Result as Result
from fdbd.paper.result import Table as Table
from fdbd.paper.runner import run as run
from fdbd.paper.runner import run_all as run_all
