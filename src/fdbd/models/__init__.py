"""Networks for small images, checkpoints, and the small trained zoo."""

from ..preprocess import Preprocess
from .checkpoint import load_checkpoint, read_metadata, save_weights
from .common import Network, count_parameters
from .registry import create, list_models
from .zoo import ZooCard, list_zoo, zoo, zoo_card

__all__ = [
    "Network",
    "Preprocess",
    "ZooCard",
    "count_parameters",
    "create",
    "list_models",
    "list_zoo",
    "load_checkpoint",
    "read_metadata",
    "save_weights",
    "zoo",
    "zoo_card",
]
