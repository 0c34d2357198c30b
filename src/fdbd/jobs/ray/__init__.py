"""A guard on a Ray cluster: fitted by partial sums, asked by tasks that keep the model, with the result of one machine.

Every row counts once whatever happens to the nodes: a piece of work that was lost with a node is done again elsewhere,
and its result reaches the driver once.
"""

from fdbd.jobs.ray.datasets import calibrate, fit, score
from fdbd.jobs.ray.fitting import fit_loaders
from fdbd.jobs.ray.pool import Workers, connect

__all__ = ["Workers", "calibrate", "connect", "fit", "fit_loaders", "score"]
