"""Deprecated: use `fdbd.integrations.sklearn`."""

from fdbd.integrations.sklearn import OODDetector as OODDetector
from fdbd.util.deprecation import warn_of_move

warn_of_move("fdbd.deploy.sklearn", "fdbd.integrations.sklearn")
