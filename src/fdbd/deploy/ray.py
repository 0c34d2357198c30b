"""`fdbd.deploy.ray`: fitting and scoring on a Ray cluster, under its documented name (the code is `fdbd.jobs.ray`)."""

from fdbd.jobs.ray import *  # noqa: F403
