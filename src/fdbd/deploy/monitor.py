"""Deprecated: use `fdbd.monitor.monitor`."""

from fdbd.monitor.monitor import Monitor as Monitor
from fdbd.util.deprecation import warn_of_move

warn_of_move("fdbd.deploy.monitor", "fdbd.monitor.monitor")
