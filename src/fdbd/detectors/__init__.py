"""Every detector, by class and by name. Every module in this folder is registered."""

import importlib
import pkgutil

from fdbd.detectors.actsub import ActSub
from fdbd.detectors.base import Configured, Detector, Needs, NotFittedError, Paper
from fdbd.detectors.csi import CSI
from fdbd.detectors.dice import DICE
from fdbd.detectors.energy import Energy
from fdbd.detectors.ensemble import Ensemble
from fdbd.detectors.entropy import Entropy
from fdbd.detectors.fdbd import FDBD, Deviation
from fdbd.detectors.gen import GEN
from fdbd.detectors.gradnorm import GradNorm
from fdbd.detectors.grood import GROOD
from fdbd.detectors.klm import KLMatching
from fdbd.detectors.knn import KNN
from fdbd.detectors.kpca import KPCA
from fdbd.detectors.maxlogit import MaxLogit
from fdbd.detectors.mcm import MCM
from fdbd.detectors.mds import MDS, MDSPlusPlus
from fdbd.detectors.msp import MSP
from fdbd.detectors.multilabel import JointEnergy, MultiLabelFDBD
from fdbd.detectors.nac import NAC
from fdbd.detectors.nci import NCI
from fdbd.detectors.neco import NECO
from fdbd.detectors.nnguide import NNGuide
from fdbd.detectors.odin import ODIN
from fdbd.detectors.openmax import OpenMax
from fdbd.detectors.optfs import OptFS
from fdbd.detectors.registry import (
    as_detector,
    create,
    create_shaping,
    list_detectors,
    list_shapings,
)
from fdbd.detectors.rmds import RMDS, RMDSPlusPlus
from fdbd.detectors.shaped import Shaped
from fdbd.detectors.shaping import AdaSCALE
from fdbd.detectors.she import SHE
from fdbd.detectors.ssd import SSD
from fdbd.detectors.tempscale import TemperatureScaling
from fdbd.detectors.vim import Residual, ViM
from fdbd.detectors.weiper import WeiPer

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
