"""Deprecated: use `fdbd.monitor.drift`."""

from fdbd.monitor.drift import DriftTest as DriftTest
from fdbd.util.deprecation import warn_of_move

warn_of_move("fdbd.deploy.drift", "fdbd.monitor.drift")
