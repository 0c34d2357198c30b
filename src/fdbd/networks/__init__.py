"""Networks for small images, checkpoints, and the small trained zoo."""

from fdbd.core.preprocessing import Preprocess
from fdbd.networks.architectures import Network, count_parameters
from fdbd.networks.checkpoint import load_checkpoint, read_metadata, save_weights
from fdbd.networks.factories import create, list_models
from fdbd.networks.sphere import CosineHead
from fdbd.networks.zoo import ZooCard, list_zoo, zoo, zoo_card

__all__ = [
    "CosineHead",
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
