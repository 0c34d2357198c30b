"""Every detector, by class and by name."""

from .base import Configured, Detector, NotFittedError, Paper, fit_together
from .energy import Energy
from .fdbd import FDBD, Deviation
from .msp import MSP

__all__ = ["FDBD", "MSP", "Configured", "Detector", "Deviation", "Energy", "NotFittedError", "Paper", "fit_together"]
