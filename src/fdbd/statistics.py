"""`fdbd.statistics`: mergeable statistics, under their documented name (the code is `fdbd.fitting.statistics`)."""

from fdbd.fitting.statistics import *  # noqa: F403
