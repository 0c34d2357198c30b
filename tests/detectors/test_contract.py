"""Every detector and shaping passes every check that `fdbd.testing` has for a user's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fdbd
from fdbd import Batch, Detector
from fdbd.core.configuration import registered
from fdbd.detectors.base import Needs, Passes
from fdbd.fitting.statistics import ClassMoments, Mean
from fdbd.testing import CHECKS, check_detector, check_onnx, check_rows, run_check

SMALL = {"knn": {"k": 3}, "nnguide": {"k": 3}, "openmax": {"tail": 5}, "weiper": {"copies": 5}}
"""Options for 120 training samples."""


def plain(name: str) -> Detector:
    return fdbd.create(name, **SMALL.get(name, {}))


# Other tests register detectors of their own.
def is_ours(name: str) -> bool:
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
    fdbd.NAC(bins=10, fill=0.2, steepness=3.0),
    fdbd.ActSub(percentile=50, power=0.5, k=3, alpha=0.5),
    fdbd.GROOD(alpha=0.5),
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
    """The negated squared distance from the mean, with one fault."""

    needs = Needs(passes=1)

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.memory: list[torch.Tensor] = []
        if fault == "no yield":
            # As a method without a yield does.
            self.passes = lambda head: None  # type: ignore[method-assign]

    def passes(self, head: fdbd.Head) -> Passes:
        width = head.num_features
        mean = yield First(width) if self.fault == "order" else Mean(width)
        if self.fault == "passes":
            yield Mean(width)
        if self.fault == "labels":
            yield ClassMoments(head.num_classes, width)
        if self.fault == "list":
            self.memory.append(mean.mean())
        if self.fault == "attribute":
            self.center = mean.mean()
        elif self.fault == "buffer":
            self.register_buffer("center", mean.mean())
        elif self.fault == "parameter":
            self.center = torch.nn.Parameter(mean.mean())
        else:
            self.set_buffers(center=mean.mean())

    def formula(self, batch: Batch) -> torch.Tensor:
        features = batch.features
        scores = -(features - self.center).square().sum(dim=1)
        if self.fault == "in place":
            features.mul_(2)
        if self.fault == "relu in place":
            features.relu_()
        if self.fault == "batch":
            return -(features - features.mean(dim=0)).square().sum(dim=1)
        if self.fault == "logits":
            return batch.logits.amax(dim=1)
        if self.fault == "some logits" and batch.logits is not None:
            return batch.logits.amax(dim=1)
        if self.fault == "device":
            return scores + torch.zeros(features.shape[0])
        if self.fault == "random":
            return scores + torch.rand(features.shape[0]).to(scores)
        if self.fault == "loop":
            return torch.stack([-(row - self.center).square().sum() for row in features])
        if self.fault == "shape":
            return scores[:, None]
        if self.fault == "number":
            return scores.sum().item()
        if self.fault == "sign":
            return -scores
        if self.fault == "nan":
            return (features.amin(dim=1) - 1).log()
        if self.fault == "dtype":
            return scores.float()
        if self.fault == "graph":
            return torch.tensor([float(score) for score in scores], dtype=scores.dtype)
        return scores


class First(Mean):
    """The mean of the first batch alone."""

    def update(self, batch: Batch) -> None:
        if not self.count:
            super().update(batch)


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("shape", r"check_fit_and_score: 16 samples have scores of shape \(16, 1\), not \(16,\)"),
        ("number", r"check_fit_and_score: .*Careless.formula returned a float, expected a tensor \(N,\)"),
        ("sign", "check_direction: only .* is the sign wrong"),
        ("logits", "check_fit_and_score: the formula reads logits, and needs does not say logits=True"),
        ("some logits", "check_needs: needs says that no logits are read, but they change the score"),
        ("labels", "check_fit_and_score: the fit reads labels, and needs does not say labels=True"),
        ("passes", "check_needs: needs says passes=1, and the fit asks for 2"),
        ("list", "check_state_is_in_buffers: the fit keeps memory as an attribute"),
        ("no yield", "check_fit_and_score: .*Careless.passes yields nothing, expected to ask for a stat"),
        ("in place", "check_inputs_are_left_alone: the features that were given have changed"),
        ("relu in place", "check_inputs_are_left_alone: the features that were given have changed"),
        ("attribute", r"check_state_is_in_buffers: the fit keeps center .* self.set_buffers\(center=tensor\)"),
        ("buffer", r"check_state_is_in_buffers: .*center is torch.float64.* self.set_buffers\(center=tensor\)"),
        ("parameter", r"check_state_is_in_buffers: .*center is a parameter.* self.set_buffers\(center=tensor\)"),
        ("random", "check_fit_and_score: the same samples have other scores the second time"),
        ("loop", "check_export: .*cannot be recorded as a graph .* without .* a loop over samples"),
        ("nan", r"check_fit_and_score: samples \[.*\] have only finite numbers and the score −inf"),
        ("dtype", "check_fit_and_score: after a fit in float64 the scores are torch.float32"),
        ("graph", "check_export: .*cannot be recorded as a graph|check_export: an exported graph scores otherwise"),
        ("order", "check_fit: the split of the training data changes scores"),
        ("batch", "check_rows: a sample's score depends on the rest of its batch"),
        ("device", r"check_devices: .*give device=batch.features.device \(line \d+, in formula"),
    ],
)  # fmt: skip
def test_a_careless_author_is_told_which_check_failed_and_what_was_promised(
    fault: str, complaint: str
) -> None:
    with pytest.raises(AssertionError, match=complaint) as error:
        check_detector(Careless(fault))
    assert "promised: " in str(error.value)


class Undeclared(Careless):
    """Says that a fit takes no pass, and asks for one."""

    needs = Needs(passes=0)


class Forgetful(Detector):
    """Does not keep its argument."""

    def __init__(self, k: int = 3) -> None:
        super().__init__()
        self.neighbours = k

    def formula(self, batch: Batch) -> torch.Tensor:
        return batch.features.amax(dim=1)


class Unprepared(Forgetful):
    """Does not begin as a torch module."""

    def __init__(self) -> None:
        self.neighbours = 3


@pytest.mark.parametrize(
    ("detector", "complaint"),
    [
        (Undeclared(), "check_needs: needs says passes=0, and the fit asks for 1"),
        (Forgetful(), "check_documentation: .*does not keep the argument k of its constructor"),
        (Unprepared(), r"check_documentation: .*does not begin with super\(\).__init__\(\)"),
    ],
    ids=["no passes", "argument", "super"],
)
def test_a_careless_class_is_told_what_it_lacks(detector: Detector, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_detector(detector)


def test_an_error_in_a_formula_is_shown_with_its_line() -> None:
    with pytest.raises(AssertionError, match=r"line \d+, in formula: return batch.logits.amax"):
        run_check(check_rows, Careless("logits"))


class Remembering(Detector):
    """Keeps what `observe` saw, in one way or another."""

    needs = Needs(perturbed=True, network=True, passes=0)

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def observe(self, images, classifier, labels=None) -> Batch:
        batch = classifier(images)
        with torch.no_grad():
            batch = batch._replace(perturbed=classifier(images / 2).features)
        seen = batch.features.detach().mean(dim=0)
        if self.how == "attribute":
            self.seen = seen
        elif self.how == "buffer":
            self.register_buffer("seen", seen.double())
        elif self.how == "parameter":
            self.seen = torch.nn.Parameter(seen)
        elif self.how == "module":
            self.seen = torch.nn.Linear(2, 2)
        return batch

    def formula(self, batch: Batch) -> torch.Tensor:
        return -(batch.features - batch.perturbed).square().sum(dim=1)


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ("attribute", r"keeps seen as an attribute .* self.set_buffers\(seen=tensor\)"),
        ("buffer", r"the buffer seen is torch.float64: call self.set_buffers\(seen=tensor\)"),
        ("parameter", r"seen is a parameter .* self.set_buffers\(seen=tensor\)"),
        ("module", "adds the module seen, .*: create it in __init__"),
    ],
)
def test_state_that_observe_leaves_outside_buffers_is_refused(how: str, complaint: str) -> None:
    with pytest.raises(AssertionError, match=f"check_state_is_in_buffers: .*{complaint}"):
        check_detector(Remembering(how))


def test_a_careful_detector_of_a_user_passes() -> None:
    check_detector(Careless())


class Clipped(fdbd.Shaping):
    """Activations above 1 clipped; without a name, as for a trial."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features.clamp_max(1)


def test_a_shaping_needs_no_name_to_be_checked() -> None:
    check_detector(Clipped())


def test_a_detector_without_a_known_direction_may_say_so() -> None:
    backwards = Careless("sign")
    backwards.has_known_direction = False
    check_detector(backwards)
