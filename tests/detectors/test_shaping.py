"""Shapings against their papers' formulas, written with loops in float64, and against
pytorch-ood."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fdbd
from fdbd import ASHB, ASHP, ASHS, LTS, SCALE, VRA, Batch, Energy, Head, ReAct, Shaped
from fdbd.core.linear_algebra import largest
from fdbd.detectors.shaping import Shaping
from fdbd.detectors.shaping.top_share import prune

BY_SAMPLE = [ASHP(60), ASHB(65), ASHS(90), SCALE(85)]


def make_features(
    count: int, width: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Positive, all different, so that no ties blur the comparison."""
    return (
        torch.rand(
            count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        ).to(dtype)
        + 0.01
    )


def make_head(width: int, classes: int = 5, dtype: torch.dtype = torch.float64) -> Head:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(classes, width, generator=generator, dtype=dtype)
    return Head(weight, torch.randn(classes, generator=generator, dtype=dtype))


def by_definition(shaping: Shaping, row: list[float]) -> list[float]:
    """One row shaped as its paper says, with Python floats."""
    width = len(row)
    k = width - int(np.round(width * shaping.percentile / 100))
    kept = sorted(range(width), key=lambda j: (-row[j], j))[:k]
    total = math.fsum(row)
    top = math.fsum(row[j] for j in kept)
    if isinstance(shaping, SCALE):
        return [value * math.exp(total / top) for value in row]
    shaped = [0.0] * width
    for j in kept:
        if isinstance(shaping, ASHP):
            shaped[j] = row[j]
        elif isinstance(shaping, ASHB):
            shaped[j] = total / k
        else:
            assert isinstance(shaping, ASHS)
            shaped[j] = row[j] * math.exp(total / top)
    return shaped


@pytest.mark.parametrize("shaping", BY_SAMPLE, ids=lambda s: s.name)
@pytest.mark.parametrize("width", [16, 37, 512])
def test_shapings_by_sample_follow_their_papers(shaping: Shaping, width: int) -> None:
    features = make_features(20, width)
    expected = torch.tensor(
        [by_definition(shaping, row) for row in features.tolist()], dtype=torch.float64
    )
    torch.testing.assert_close(shaping(features), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shaping", BY_SAMPLE, ids=lambda s: s.name)
def test_the_kernel_and_the_differentiable_path_agree(shaping: Shaping) -> None:
    features = make_features(50, 64, dtype=torch.float32)
    differentiable = features.clone().requires_grad_()
    shaped = shaping(differentiable)
    torch.testing.assert_close(shaping(features), shaped.detach())
    shaped.sum().backward()
    assert torch.isfinite(differentiable.grad).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(-1, 3), min_size=9, max_size=9), min_size=1, max_size=6),
    st.integers(1, 9),
)
def test_ties_go_to_the_lower_index(rows: list[list[int]], k: int) -> None:
    features = torch.tensor(rows, dtype=torch.float32)
    for fill in (None, torch.full((len(rows), 1), 7.0)):
        expected = torch.zeros_like(features)
        for i, row in enumerate(rows):
            for j in sorted(range(9), key=lambda j: (-row[j], j))[:k]:
                expected[i, j] = row[j] if fill is None else 7.0
        assert torch.equal(prune(features, largest(features, k), fill), expected)
    ordered = features.sort(dim=1, descending=True).values
    assert torch.equal(largest(features, k).sort(dim=1, descending=True).values, ordered[:, :k])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shaping", [ASHP(10), ASHB(65), ASHS(65)], ids=lambda s: s.name)
def test_half_precision_prunes_as_many(shaping: Shaping, dtype: torch.dtype) -> None:
    features = make_features(3, 2500).abs().to(dtype) + 0.5
    kept = 2500 - round(25 * shaping.percentile)
    assert (shaping(features) != 0).sum(dim=1).tolist() == [kept] * 3


@pytest.mark.parametrize("shaping", [*BY_SAMPLE, LTS(95)], ids=lambda s: s.name)
def test_rows_of_zeros_and_narrow_features_stay_finite(shaping: Shaping) -> None:
    assert torch.equal(shaping(torch.zeros(2, 64)), torch.zeros(2, 64))
    # 95 % of 3 features would leave none.
    head = make_head(3, dtype=torch.float32)
    features = torch.rand(10, 3)
    assert torch.isfinite(
        Shaped(shaping, Energy()).fit(Batch(features), head).score(Batch(features))
    ).all()


def test_lts_scales_logits_by_the_squared_ratio_of_positive_activations() -> None:
    features = make_features(20, 40) - 0.3
    logits = make_head(40)(features)
    expected = []
    for z, row in zip(features.tolist(), logits.tolist()):
        positive = sorted((max(value, 0.0) for value in z), reverse=True)
        scale = (math.fsum(positive) / math.fsum(positive[: 40 - round(40 * 0.9)])) ** 2
        expected.append([value * scale for value in row])
    shaped = LTS(90).shape(Batch(features, logits))
    torch.testing.assert_close(
        shaped.logits, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0
    )
    assert shaped.features is features


@pytest.mark.parametrize("percentile", [50.0, 80.0, 90.0, 99.0])
def test_react_clips_at_the_percentile_of_all_training_activations(percentile: float) -> None:
    train = torch.randn(400, 30).relu()
    new = make_features(10, 30, dtype=torch.float32) * 4
    shaping = (
        Shaped(ReAct(percentile), Energy())
        .fit(Batch(train), make_head(30, dtype=torch.float32))
        .shaping
    )
    threshold = float(np.percentile(train.numpy(), percentile))
    assert float(shaping.threshold) == pytest.approx(threshold, rel=1e-3, abs=1e-12)
    torch.testing.assert_close(shaping(new), new.clamp_max(threshold), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "make", [torch.randn, torch.rand, lambda *s: torch.randn(*s).relu(), lambda *s: -torch.rand(*s)]
)
def test_vra_takes_each_features_own_percentiles(make) -> None:
    torch.manual_seed(3)
    train = make(501, 12) * torch.logspace(-20, 20, 12)
    shaping = (
        Shaped(VRA(60, 95), Energy()).fit(Batch(train), make_head(12, dtype=torch.float32)).shaping
    )
    for name, fraction in (("alpha", 0.60), ("beta", 0.95)):
        expected = np.quantile(train.numpy(), fraction, axis=0)
        np.testing.assert_allclose(getattr(shaping, name).numpy(), expected, rtol=2**-12)
    alpha = shaping.alpha.tolist()
    beta = shaping.beta.tolist()
    new = make(20, 12) * torch.logspace(-20, 20, 12)
    expected = []
    for row in new.tolist():
        shaped = []
        for value, low, high in zip(row, alpha, beta):
            if value < low:
                shaped.append(0.0)
            else:
                shaped.append(min(value, high))
        expected.append(shaped)
    torch.testing.assert_close(shaping(new), torch.tensor(expected))
    torch.testing.assert_close(shaping(new.requires_grad_()).detach(), torch.tensor(expected))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_vra_takes_percentiles_between_few_samples_as_its_authors_do(count: int) -> None:
    train = torch.arange(count).float()[:, None].expand(-1, 3)
    shaping = (
        Shaped(VRA(60, 95), Energy()).fit(Batch(train), make_head(3, dtype=torch.float32)).shaping
    )
    for found, fraction in ((shaping.alpha, 0.6), (shaping.beta, 0.95)):
        torch.testing.assert_close(found, train.quantile(fraction, dim=0), rtol=2**-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vra_keeps_a_feature_that_never_changes(dtype: torch.dtype) -> None:
    train = torch.full((9, 1), 1 - 1e-12, dtype=dtype).expand(-1, 3).contiguous()
    shaping = Shaped(VRA(60, 95), Energy()).fit(Batch(train), make_head(3, dtype=dtype)).shaping
    torch.testing.assert_close(shaping(train), train, rtol=2**-12, atol=0)


@pytest.mark.parametrize("detector", ["csi", "deviation"])
@pytest.mark.parametrize("shaping", ["react", "vra", "scale"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_broken_view_scores_minus_infinity_and_is_not_learnt_from(
    bad: float, shaping: str, detector: str
) -> None:
    features = make_features(40, 6).relu() + 0.1
    head = make_head(6)
    views = torch.stack([features, features.flip(1)])
    fitted = fdbd.create(f"{shaping}+{detector}").fit(Batch(features, views=views), head)
    broken = views.clone()
    broken[1, 7, 2] = bad
    scores = fitted.score(Batch(features, views=broken))
    assert scores[7] == -math.inf
    rest = torch.arange(40) != 7
    torch.testing.assert_close(scores[rest], fitted.score(Batch(features, views=views))[rest])
    with pytest.raises(ValueError, match="batch 0, row 7: its views hold NaN or infinity"):
        fdbd.create(f"{shaping}+{detector}").fit(Batch(features, views=broken), head)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 60), st.sampled_from(["react", "vra"]))
def test_thresholds_do_not_depend_on_the_split(size: int, name: str) -> None:
    train = torch.randn(150, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    head = make_head(6)
    whole = fdbd.create(name).fit(Batch(train), head).shaping.state_dict()
    split = (
        fdbd.create(name)
        .fit([Batch(part) for part in train.split(size)], head)
        .shaping.state_dict()
    )
    assert whole.keys() == split.keys()
    assert all(torch.equal(whole[key], split[key]) for key in whole)


def peers() -> dict[str, object]:
    peer = pytest.importorskip("pytorch_ood.detector")
    linear = nn.Linear(48, 5)
    head = make_head(48, dtype=torch.float32)
    linear.load_state_dict({"weight": head.weight, "bias": head.bias})
    # pytorch-ood shapes feature maps (N, C, H, W); ours are pooled.
    maps = nn.Sequential(nn.Flatten(), linear)
    return {
        "react": peer.ReAct(None, maps, percentile=0.9),
        "ash-p": peer.ASH(None, maps, "ash-p", 0.65),
        "ash-b": peer.ASH(None, maps, "ash-b", 0.65),
        "ash-s": peer.ASH(None, maps, "ash-s", 0.90),
        "scale": peer.SCALE(None, maps, 0.85),
        "lts": peer.LTS(None, linear, 0.05),
        "vra": peer.VRA(None, maps, 0.0, 0.95),
    }


@pytest.mark.parametrize("name", ["react", "ash-p", "ash-b", "ash-s", "scale", "lts", "vra"])
def test_scores_equal_those_of_pytorch_ood(name: str) -> None:
    peer = peers()[name]
    train = make_features(2000, 48, dtype=torch.float32)
    new = make_features(100, 48, 5, dtype=torch.float32)
    if name in ("react", "vra"):
        peer.fit_feature_maps(train[:, :, None, None], torch.zeros(2000))
    # pytorch-ood raises what lies below VRA's lower threshold to it, the paper and its authors'
    # code set it to 0. Both agree if nothing lies below: the threshold is the lowest training value,
    # and new values are above it.
    options = {"low": 0.0} if name == "vra" else {}
    if name == "vra":
        new = new.clamp_min(0.02)
    detector = fdbd.create(name, **options).fit(Batch(train), make_head(48, dtype=torch.float32))
    theirs = (
        peer.predict_features(new)
        if name == "lts"
        else peer.predict_feature_maps(new[:, :, None, None])
    )
    tolerance = 1e-5
    if name in ("react", "vra"):
        # Their thresholds come from histograms, right to a relative 5e-4.
        tolerance = 2e-3
    elif name == "scale":
        # It multiplies features: logits in the hundreds, whose float32 digits end at 1e-5, cancel.
        tolerance = 1e-4
    torch.testing.assert_close(
        detector.score(Batch(new)), -theirs.detach(), rtol=tolerance, atol=tolerance
    )


def test_percentiles_are_in_percent_and_in_range() -> None:
    for wrong in (-1, 100, 150, float("nan")):
        for kind in (ReAct, ASHP, ASHB, ASHS, SCALE, LTS):
            with pytest.raises(ValueError, match="expected percent from 0 to below 100"):
                kind(wrong)
    with pytest.raises(ValueError, match="expected at most high"):
        VRA(95, 60)


def test_a_shaping_that_learns_says_so_when_it_has_not() -> None:
    for shaping in (ReAct(), VRA()):
        with pytest.raises(fdbd.NotFittedError, match="seen no training data"):
            shaping(torch.rand(2, 3))


def test_defaults_are_those_of_the_papers() -> None:
    assert {s.name: s.percentile for s in (ReAct(), ASHP(), ASHB(), ASHS(), SCALE(), LTS())} == {
        "react": 90,
        "ash-p": 65,
        "ash-b": 65,
        "ash-s": 90,
        "scale": 85,
        "lts": 95,
    }
