"""A guard on a Ray cluster: fitted by partial sums, asked by a pool of actors, with the result of one machine.

Every row counts once whatever happens to the nodes: blocks that were lost with a node are computed again from their
source, and each reaches the driver once.
"""

from fdbd.jobs.ray.files import fit_loaders
from fdbd.jobs.ray.fitting import fit
from fdbd.jobs.ray.pool import Workers, connect
from fdbd.jobs.ray.scoring import calibrate, file_tables, score

__all__ = ["Workers", "calibrate", "connect", "file_tables", "fit", "fit_loaders", "score"]
