"""fdbd: out-of-distribution detection for any classifier with a linear head."""

from .batch import Batch, Head
from .detectors import FDBD, MSP, Detector, Deviation, Energy, Paper

__version__ = "0.1.0"
__all__ = ["FDBD", "MSP", "Batch", "Detector", "Deviation", "Energy", "Head", "Paper"]
