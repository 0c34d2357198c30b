"""fdbd: out-of-distribution detection for any classifier with a linear head."""

from typing import TYPE_CHECKING, Any

from fdbd import metrics
from fdbd.core.artifact import ArtifactError
from fdbd.core.batch import Batch, Head
from fdbd.decision.guard import Decision, Explanation, Guard, NotCalibratedError, load
from fdbd.decision.threshold import Threshold
from fdbd.detectors import (
    CSI,
    DICE,
    FDBD,
    GEN,
    KNN,
    MDS,
    MSP,
    NCI,
    NECO,
    ODIN,
    RMDS,
    SHE,
    SSD,
    AdaSCALE,
    Detector,
    Deviation,
    Energy,
    Ensemble,
    Entropy,
    GradNorm,
    KLMatching,
    MaxLogit,
    NNGuide,
    NotFittedError,
    OpenMax,
    Paper,
    Residual,
    Shaped,
    TemperatureScaling,
    ViM,
    create,
    list_detectors,
    list_shapings,
)
from fdbd.networks.classifier import Classifier
from fdbd.networks.perturbation import InputPerturbation
from fdbd.shaping.shapings import ASHB, ASHP, ASHS, LTS, SCALE, VRA, ReAct, Shaping

if TYPE_CHECKING:
    from fdbd.bench import Benchmark
    from fdbd.deploy.monitor import Monitor

__version__ = "0.1.0"

# Parts that most programs do not need: imported when they are first asked for.
_LAZY = {"Benchmark": ".bench", "Monitor": ".deploy.monitor"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    if name in (
        "bench",
        "data",
        "deploy",
        "geometry",
        "jobs",
        "models",
        "networks",
        "paper",
        "report",
        "statistics",
        "train",
    ):
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ASHB",
    "ASHP",
    "ASHS",
    "CSI",
    "DICE",
    "FDBD",
    "GEN",
    "KNN",
    "LTS",
    "MDS",
    "MSP",
    "NCI",
    "NECO",
    "ODIN",
    "RMDS",
    "SCALE",
    "SHE",
    "SSD",
    "VRA",
    "AdaSCALE",
    "ArtifactError",
    "Batch",
    "Benchmark",
    "Classifier",
    "Decision",
    "Detector",
    "Deviation",
    "Energy",
    "Ensemble",
    "Entropy",
    "Explanation",
    "GradNorm",
    "Guard",
    "Head",
    "InputPerturbation",
    "KLMatching",
    "MaxLogit",
    "Monitor",
    "NNGuide",
    "NotCalibratedError",
    "NotFittedError",
    "OpenMax",
    "Paper",
    "ReAct",
    "Residual",
    "Shaped",
    "Shaping",
    "TemperatureScaling",
    "Threshold",
    "ViM",
    "create",
    "list_detectors",
    "list_shapings",
    "load",
    "metrics",
]
