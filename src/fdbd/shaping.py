"""Deprecated: use `fdbd.detectors.shaping`."""

from fdbd.detectors.shaping import *  # noqa: F403
from fdbd.util.deprecation import warn_of_move

warn_of_move("fdbd.shaping", "fdbd.detectors.shaping")
