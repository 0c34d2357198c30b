"""A guard on a Ray cluster: fitted by partial sums, asked by a pool of actors, with the result of one machine.

Every row counts once whatever happens to the nodes: blocks that were lost with a node are computed again from their
source, and each reaches the driver once.
"""

from .files import fit_loaders
from .fitting import fit
from .pool import Workers, connect
from .scoring import calibrate, file_tables, score

__all__ = ["Workers", "calibrate", "connect", "file_tables", "fit", "fit_loaders", "score"]
