"""`fdbd.deploy.ray`: fitting and scoring on a Ray cluster, under its documented name (the code is `fdbd.jobs.ray`)."""

from fdbd.jobs.ray import Workers, calibrate, connect, fit, score

__all__ = ["Workers", "calibrate", "connect", "fit", "score"]
