"""Every detector and shaping passes every check that `fdbd.testing` has for a user's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fdbd
from fdbd import Batch, Detector
from fdbd.core.configuration import registered
from fdbd.detectors.base import Needs, Passes
from fdbd.fitting.statistics import Mean
from fdbd.testing import CHECKS, check_detector, check_onnx

SMALL = {"knn": {"k": 3}, "nnguide": {"k": 3}, "openmax": {"tail": 5}, "weiper": {"copies": 5}}
"""Options for 120 training samples."""


def plain(name: str) -> Detector:
    return fdbd.create(name, **SMALL.get(name, {}))


def is_ours(name: str) -> bool:  # other tests register detectors of their own
    return registered()[name].__module__.startswith("fdbd.")


OURS = {name: plain(name) for name in filter(is_ours, fdbd.list_detectors())}
OURS.update(
    {
        f"{shaping}+fdbd": fdbd.create(f"{shaping}+fdbd")
        for shaping in filter(is_ours, fdbd.list_shapings())
    }
)
VARIANTS: list[Detector] = [
    fdbd.FDBD("norm"),
    fdbd.FDBD(None),
    fdbd.FDBD(nearest=2),
    fdbd.GEN(gamma=0.5, top=3),
    fdbd.NCI(alpha=0.01),
    fdbd.NECO(dimension=2, standardize=False, times_logit=False),
    fdbd.TemperatureScaling(scale="probability"),
    fdbd.MDS(layers=("early", "late")),
    fdbd.SSD(clusters=3),
    fdbd.SSD(shrinkage=1.0),
    fdbd.MDSPlusPlus(beta=0.5),
    fdbd.OptFS(bins=7),
    fdbd.JointEnergy("max"),
    fdbd.KNN(k=3, alpha=0.5),
    fdbd.ViM(dim=2),
    fdbd.Shaped(fdbd.ReAct(80), fdbd.FDBD(), mean="of_shaped"),
    fdbd.Shaped(fdbd.ReAct(80), fdbd.CSI()),
    fdbd.Shaped(fdbd.ReAct(80), fdbd.MDSPlusPlus()),
    fdbd.Ensemble(["fdbd", "energy"]),
    fdbd.Ensemble(["fdbd", "energy", "vim"], "fisher", weights=[3.0, 1.0, 0.5]),
]
OURS.update({" ".join(repr(variant).split()): variant for variant in VARIANTS})


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", OURS, ids=list(OURS))
def test_every_detector_keeps_every_promise(name: str, check: Callable[[Detector], None]) -> None:
    check(OURS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS, ids=list(OURS))
def test_every_detector_is_the_same_in_onnx(name: str) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    check_onnx(OURS[name])


class Careless(Detector):
    """The squared distance from the mean, with one fault."""

    needs = Needs(passes=1)

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault

    def passes(self, head: fdbd.Head) -> Passes:
        mean = yield (
            First(head.num_features) if self.fault == "order" else Mean(head.num_features)
        )
        if self.fault == "passes":
            yield Mean(head.num_features)
        self.set_buffers(center=mean.mean())

    def formula(self, batch: Batch) -> torch.Tensor:
        if self.fault == "in place":
            batch.features.mul_(2)
        if self.fault == "batch":
            return -(batch.features - batch.features.mean(dim=0)).square().sum(dim=1)
        if self.fault == "logits" and batch.logits is not None:
            return batch.logits.amax(dim=1)
        if self.fault == "device":
            return -(batch.features - self.center).abs().sum(dim=1) + torch.zeros(
                len(batch.features)
            )
        return -(batch.features - self.center).square().sum(dim=1)


class First(Mean):
    """The mean of the first batch alone."""

    def update(self, batch: Batch) -> None:
        if not self.count:
            super().update(batch)


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("order", "the split of the training data changes scores"),
        ("passes", "needs says 1 passes, the fit made 2"),
        ("in place", "the features that were given have changed"),
        ("batch", "a sample's score depends on the rest of its batch"),
        ("logits", "needs says that no logits are read"),
        ("device", "device"),
    ],
)
def test_a_careless_detector_is_told_what_it_broke(fault: str, complaint: str) -> None:
    told = []
    for check in CHECKS:
        try:
            check(Careless(fault))
        except (AssertionError, RuntimeError) as error:
            told.append(str(error))
    assert any(complaint in each for each in told), told
    with pytest.raises((AssertionError, RuntimeError)):
        check_detector(Careless(fault))


def test_a_careful_detector_of_a_user_passes() -> None:
    check_detector(Careless())
