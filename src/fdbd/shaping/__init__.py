"""Activation shaping: Batch in, Batch out, before any detector. One file per shaping; every module in
this folder is registered."""

import importlib
import pkgutil

from fdbd.shaping.adascale import AdaSCALE
from fdbd.shaping.ash import ASHB, ASHP, ASHS
from fdbd.shaping.base import Shaping
from fdbd.shaping.lts import LTS
from fdbd.shaping.react import ReAct
from fdbd.shaping.scale import SCALE
from fdbd.shaping.vra import VRA

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
