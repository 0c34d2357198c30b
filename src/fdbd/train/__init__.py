"""Training classifiers: cross-entropy, SupCon and CSI, by presets; plain torch, one loop."""

from fdbd.train.augment import Augment
from fdbd.train.loop import Trained, train
from fdbd.train.objectives import CSI, CrossEntropy, SupCon
from fdbd.train.presets import PRESETS, Preset, list_presets, preset

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
