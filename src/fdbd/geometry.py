"""`fdbd.geometry`: the geometry of a linear head, under its documented name (the code is `fdbd.core.geometry`)."""

from fdbd.core.geometry import *  # noqa: F403
