"""Activation shaping: Batch in, Batch out, before any detector. One file per shaping."""

from fdbd.shaping.adascale import AdaSCALE
from fdbd.shaping.ash import ASHB, ASHP, ASHS
from fdbd.shaping.base import Shaping
from fdbd.shaping.lts import LTS
from fdbd.shaping.react import ReAct
from fdbd.shaping.scale import SCALE
from fdbd.shaping.vra import VRA

__all__ = ["ASHB", "ASHP", "ASHS", "LTS", "SCALE", "VRA", "AdaSCALE", "ReAct", "Shaping"]
