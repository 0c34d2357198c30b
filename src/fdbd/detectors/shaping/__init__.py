"""Activation shaping: Batch in, Batch out, before any detector. One file per shaping; every module
in this folder is registered."""

import importlib
import pkgutil

from fdbd.detectors.shaping.adascale import AdaSCALE
from fdbd.detectors.shaping.ash import ASHB, ASHP, ASHS
from fdbd.detectors.shaping.base import Shaping
from fdbd.detectors.shaping.lts import LTS
from fdbd.detectors.shaping.react import ReAct
from fdbd.detectors.shaping.scale import SCALE
from fdbd.detectors.shaping.vra import VRA

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
