"""A guard on a Ray cluster, with the result of one machine: every row counts once, whatever happens
to the nodes."""

from fdbd.jobs.ray.datasets import calibrate, fit, score
from fdbd.jobs.ray.pool import Workers, connect

__all__ = ["Workers", "calibrate", "connect", "fit", "score"]
