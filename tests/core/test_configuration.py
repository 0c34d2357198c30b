"""Names, options and buffers: what a file may say, and what is refused."""

from __future__ import annotations

import math
import sys

import pytest
import torch

import fdbd
from fdbd import Batch, Detector, Head, Shaping
from fdbd.core import configuration
from fdbd.core.configuration import from_config, registered

HEAD = Head(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
DATA = Batch(
    torch.randn(60, 4, generator=torch.Generator().manual_seed(1)).relu(),
    labels=torch.arange(60) % 3,
)


@pytest.mark.parametrize(
    ("base", "name"), [(Detector, "energy"), (Shaping, "react"), (Detector, "react")]
)
def test_a_name_that_is_taken_is_refused(base: type, name: str) -> None:
    with pytest.raises(ValueError, match=f"the name '{name}' of .*Mine is taken by fdbd"):
        type("Mine", (base,), {"name": name})
    assert fdbd.create("energy").__class__ is fdbd.Energy


def test_the_same_class_defined_again_replaces_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "_REGISTRY", dict(registered()))
    first, second = (
        type("Mine", (Detector,), {"name": "mine", "__module__": "notebook"}) for _ in range(2)
    )
    assert first is not second
    assert registered()["mine"] is second


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_buffers_that_are_not_finite_are_refused(bad: float) -> None:
    state = fdbd.FDBD().fit(DATA, HEAD).state_dict()
    state["normals"] = state["normals"].clone()
    state["normals"][1, 2] = bad
    with pytest.raises(ValueError, match="normals of FDBD holds NaN or infinity"):
        fdbd.FDBD().load_state_dict(state)


@pytest.mark.parametrize(
    ("detector", "buffer"),
    [(fdbd.SHE(), "offsets"), (fdbd.FDBD(), "offsets"), (fdbd.ViM(), "shift")],
)
def test_a_buffer_of_another_length_is_refused(detector: Detector, buffer: str) -> None:
    state = detector.fit(DATA, HEAD).state_dict()
    state[buffer] = state[buffer][:1].clone()
    with pytest.raises(
        ValueError, match=rf"{buffer} of {type(detector).__name__} has shape \(1,\), expected"
    ):
        type(detector)().load_state_dict(state)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"name": "knn", "options": {"k": 10**9}},
            "k is 1000000000, expected .* at most 1,000,000",
        ),
        ({"name": "openmax", "options": {"tail": 10**12}}, "tail is .* at most 1,000,000"),
        (
            {"name": "ensemble", "options": {"detectors": ["energy"] * 200_000}},
            "more than 2,000 entries",
        ),
        (
            {"name": "ensemble", "options": {"detectors": ["energy"] * 200}},
            "detectors is 200, expected at most 100",
        ),
        (
            {"name": "ensemble", "options": {"detectors": ["react+" * 10**5 + "energy", "msp"]}},
            "100001 parts",
        ),
    ],
)
def test_absurd_options_are_refused_before_anything_is_built(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_config(config)


def test_more_neighbours_than_a_file_holds_are_refused() -> None:
    state = fdbd.KNN(k=3).fit(DATA, HEAD).state_dict()
    with pytest.raises(ValueError, match="k is 100000, but only 54 training samples were kept"):
        fdbd.KNN(k=100_000).load_state_dict(state)


def test_options_that_did_not_exist_yet_have_the_meaning_of_their_time() -> None:
    assert from_config({"name": "tempscale", "options": {}}).scale == "probability"
    assert fdbd.create("tempscale").scale == "log"
    assert from_config(fdbd.create("tempscale").to_config()).scale == "log"


@pytest.mark.parametrize("name", ["deviation", "csi", "fdbd", "she", "gradnorm"])
def test_a_row_too_large_for_float64_is_never_in_distribution(name: str) -> None:
    head = Head(HEAD.weight.double(), HEAD.bias.double())
    data = DATA._replace(features=DATA.features.double())
    scores = (
        fdbd.create(name)
        .fit(data, head)
        .score(Batch(torch.full((2, 4), sys.float_info.max, dtype=torch.float64)))
    )
    assert not (scores == math.inf).any()
    assert not scores.isnan().any()


def test_the_log_scale_keeps_certain_predictions_apart() -> None:
    logits = torch.tensor([[20.0, 0.0, 0.0], [30.0, 0.0, 0.0], [40.0, 0.0, 0.0], [3.0, 0.0, 0.0]])
    detector = fdbd.create("tempscale").fit(DATA, HEAD)
    detector.set_buffers(temperature=torch.tensor(1.0))
    scores = detector.score(Batch(torch.zeros(4, 4), logits))
    expected = -torch.log1p(2 * torch.exp(-logits[:, 0].double()))
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=0)
    assert scores.argsort().tolist() == [3, 0, 1, 2]


@pytest.mark.parametrize(
    ("name", "percentile"),
    [
        ("react+fdbd", 80),
        ("ash-s+fdbd", 90),
        ("ash-b+fdbd", 90),
        ("scale+fdbd", 90),
        ("react+energy", 90),
        ("scale", 85),
    ],
)
def test_shapings_before_fdbd_follow_its_paper(name: str, percentile: float) -> None:
    detector = fdbd.create(name)
    assert detector.shaping.percentile == percentile
    assert fdbd.create(name, percentile=70).shaping.percentile == 70
    if not name.endswith("fdbd"):
        assert detector.mean == "of_shaped"
    else:
        assert detector.mean == "shaped"
        assert fdbd.create(name, mean="of_shaped").mean == "of_shaped"
        guard = fdbd.Guard(HEAD, "fdbd", shaping=name.split("+")[0])
        assert guard.detector.shaping.percentile == percentile
