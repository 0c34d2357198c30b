"""Networks for small images, checkpoints, and the small trained zoo."""

from .checkpoint import load_checkpoint, read_metadata, save_weights
from .common import Network, count_parameters
from .registry import create, list_models

__all__ = ["Network", "count_parameters", "create", "list_models", "load_checkpoint", "read_metadata", "save_weights"]
