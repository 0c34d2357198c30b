"""Deprecated: use `fdbd.jobs.ray`."""

from fdbd.jobs.ray import Workers as Workers
from fdbd.jobs.ray import calibrate as calibrate
from fdbd.jobs.ray import connect as connect
from fdbd.jobs.ray import fit as fit
from fdbd.jobs.ray import score as score
from fdbd.util.deprecation import warn_of_move

warn_of_move("fdbd.deploy.ray", "fdbd.jobs.ray")
