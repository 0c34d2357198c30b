"""Training classifiers: cross-entropy, SupCon, CSI and heads of several labels, by presets; plain
torch, one loop."""

from fdbd.train.augment import Augment as Augment
from fdbd.train.loop import Trained as Trained
from fdbd.train.loop import train as train
from fdbd.train.objectives import CSI as CSI
from fdbd.train.objectives import CrossEntropy as CrossEntropy
from fdbd.train.objectives import SupCon as SupCon
from fdbd.train.presets import PRESETS as PRESETS
from fdbd.train.presets import Preset as Preset
from fdbd.train.presets import list_presets as list_presets
from fdbd.train.presets import preset as preset
