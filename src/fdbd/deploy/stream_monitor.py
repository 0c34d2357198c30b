"""Deprecated: use `fdbd.monitor.stream`."""

from fdbd.monitor.stream import Snapshot as Snapshot
from fdbd.monitor.stream import StreamMonitor as StreamMonitor
from fdbd.util.deprecation import warn_of_move

warn_of_move("fdbd.deploy.stream_monitor", "fdbd.monitor.stream")
