"""On a device, a decision never waits for a number: tried on torch's meta device, which has shapes
and no numbers, so that looking at one or copying one is an error."""

import pytest
import torch
from torch import nn

import fdbd

NAMES = [
    "fdbd",
    "msp",
    "energy",
    "gen",
    "mds",
    "vim",
    "knn",
    "react+fdbd",
    "scale+energy",
    "ash-s+energy",
]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)
    ).eval()


def fitted(name: str, **target: object) -> fdbd.Guard:
    torch.manual_seed(1)
    images = torch.randn(120, 3, 6, 6)
    guard = fdbd.Guard(model(), name).fit([(images, torch.arange(120) % 5)], progress=False)
    return guard.calibrate([torch.randn(120, 3, 6, 6)], progress=False, **target)


def test_looking_at_a_number_of_this_device_is_an_error() -> None:
    number = torch.ones((), device="meta")
    for look in (number.item, number.cpu, lambda: bool(number > 0), number[None].nonzero):
        with pytest.raises((RuntimeError, NotImplementedError)):
            look()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_decision_waits_for_no_number(name: str) -> None:
    guard = fitted(name).to("meta")
    decision = guard(torch.randn(4, 3, 6, 6, device="meta"))
    assert all(part.device.type == "meta" for part in decision)
    assert decision.is_ood.shape == (4,)
    assert guard.decide(fdbd.Batch(torch.randn(4, 32, device="meta"))).scores.shape == (4,)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_threshold_per_class_waits_for_no_number() -> None:
    guard = fitted("fdbd", per_class=True).to("meta")
    assert guard(torch.randn(4, 3, 6, 6, device="meta")).is_ood.shape == (4,)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_compiled_guard_decides_the_same(value: float) -> None:
    guard = fitted("fdbd")
    images = torch.randn(6, 3, 6, 6)
    images[2, 1, 3, 3] = value
    expected = guard(images)
    try:
        guard.compile(backend="aot_eager")
        found = guard(images)
    finally:
        guard._compiled_call_impl = None
    assert torch.equal(found.labels, expected.labels)
    assert torch.equal(found.is_ood, expected.is_ood)
    assert found.scores[2] == -torch.inf
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.p_values, expected.p_values)
