"""Deprecated: use `fdbd.networks`."""

from fdbd.networks import *  # noqa: F403
from fdbd.util.deprecation import warn_of_move

warn_of_move("fdbd.models", "fdbd.networks")
