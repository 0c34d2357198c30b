"""Training classifiers: cross-entropy, SupCon and CSI, by presets; plain torch, one loop."""

from .augment import Augment
from .loop import Trained, train
from .objectives import CSI, CrossEntropy, SupCon
from .presets import PRESETS, Preset, list_presets, preset

__all__ = [
    "CSI",
    "PRESETS",
    "Augment",
    "CrossEntropy",
    "Preset",
    "SupCon",
    "Trained",
    "list_presets",
    "preset",
    "train",
]
