"""Deprecated: use `fdbd.fitting.statistics`."""

from fdbd.fitting.statistics import *  # noqa: F403
from fdbd.util.deprecation import warn_of_move

warn_of_move("fdbd.statistics", "fdbd.fitting.statistics")
