"""Every detector, by class and by name."""

from .adascale import AdaSCALE
from .base import Configured, Detector, NotFittedError, Paper, fit_together
from .csi import CSI
from .dice import DICE
from .energy import Energy
from .ensemble import Ensemble
from .entropy import Entropy
from .fdbd import FDBD, Deviation
from .gen import GEN
from .gradnorm import GradNorm
from .klm import KLMatching
from .knn import KNN
from .maxlogit import MaxLogit
from .mds import MDS
from .msp import MSP
from .nci import NCI
from .neco import NECO
from .nnguide import NNGuide
from .odin import ODIN
from .openmax import OpenMax
from .registry import as_detector, create, create_shaping, list_detectors, list_shapings
from .rmds import RMDS
from .shaped import Shaped
from .she import SHE
from .ssd import SSD
from .tempscale import TemperatureScaling
from .vim import Residual, ViM

__all__ = [
    "CSI",
    "DICE",
    "FDBD",
    "GEN",
    "KNN",
    "MDS",
    "MSP",
    "NCI",
    "NECO",
    "ODIN",
    "RMDS",
    "SHE",
    "SSD",
    "AdaSCALE",
    "Configured",
    "Detector",
    "Deviation",
    "Energy",
    "Ensemble",
    "Entropy",
    "GradNorm",
    "KLMatching",
    "MaxLogit",
    "NNGuide",
    "NotFittedError",
    "OpenMax",
    "Paper",
    "Residual",
    "Shaped",
    "TemperatureScaling",
    "ViM",
    "as_detector",
    "create",
    "create_shaping",
    "fit_together",
    "list_detectors",
    "list_shapings",
]
