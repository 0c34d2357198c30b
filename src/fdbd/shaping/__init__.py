"""Activation shaping: Batch in, Batch out, before any detector."""

from fdbd.shaping.shapings import ASHB, ASHP, ASHS, LTS, SCALE, VRA, ReAct, Shaping

__all__ = ["ASHB", "ASHP", "ASHS", "LTS", "SCALE", "VRA", "ReAct", "Shaping"]
