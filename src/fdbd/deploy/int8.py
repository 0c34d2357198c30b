"""Deprecated: use `fdbd.export.int8`."""

from fdbd.export.int8 import Shift as Shift
from fdbd.export.int8 import export_int8 as export_int8
from fdbd.util.deprecation import warn_of_move

warn_of_move("fdbd.deploy.int8", "fdbd.export.int8")
