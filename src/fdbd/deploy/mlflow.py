"""Deprecated: use `fdbd.integrations.mlflow`."""

from fdbd.integrations.mlflow import log_model as log_model
from fdbd.integrations.mlflow import save_model as save_model
from fdbd.util.deprecation import warn_of_move

warn_of_move("fdbd.deploy.mlflow", "fdbd.integrations.mlflow")
