"""AdaSCALE against its formulas, written with loops in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import fdbd
from fdbd import AdaSCALE, Batch, Classifier, Energy, Guard, Head, Shaped
from fdbd.fitting.driver import fit_detector
from fdbd.fitting.statistics import NonFiniteRow

WIDTH = 40


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Flatten(), nn.Linear(48, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 5))
        .double()
        .eval()
    )


def make_images(count: int, seed: int = 1) -> Tensor:
    return torch.randn(
        count, 3, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def oodness_by_definition(
    z: list[float], moved: list[float], shift: int, level: int, weight: float
) -> float:
    order = sorted(range(len(z)), key=lambda j: -z[j])
    shifts = math.fsum(abs(z[j] - moved[j]) for j in order[:shift])
    return weight * shifts + math.fsum(max(moved[j], 0.0) for j in order[:level])


def oodness_of_rows(batch: Batch) -> list[float]:
    rows = zip(batch.features.tolist(), batch.perturbed.tolist())
    return [oodness_by_definition(z, moved, 2, 4, 3.0) for z, moved in rows]


def test_the_score_follows_the_formulas() -> None:
    model = make_model()
    train = make_images(700)
    images = make_images(40, 2)
    settings = {"low": 60, "high": 90, "shift": 5, "level": 10, "weight": 3.0}
    classifier = Classifier(model)
    head = Head.from_linear(model[3])
    for variant in ("activation", "logit"):
        guard = Guard(model, Shaped(AdaSCALE(**settings, variant=variant), Energy())).fit([train])
        shaping = guard.detector.shaping
        known = shaping.observe(train, classifier)
        new = shaping.observe(images, classifier)
        known_oodness = oodness_of_rows(known)
        expected = []
        for z, q in zip(new.features.tolist(), oodness_of_rows(new)):
            share = sum(value <= q for value in known_oodness) / len(known_oodness)
            percentile = 60 + (1 - share) * 30
            positive = sorted((max(value, 0.0) for value in z), reverse=True)
            kept = WIDTH - round(WIDTH * percentile / 100)
            r = math.fsum(positive) / math.fsum(positive[:kept])
            if variant == "logit":
                logits = head(torch.tensor([z], dtype=torch.float64)) * r**2
            else:
                logits = head(torch.tensor([z], dtype=torch.float64) * math.exp(r))
            expected.append(float(logits.logsumexp(dim=1)))
        scores = guard.score(images)
        # The distribution of Q' is kept as 1,024 quantiles of a histogram: a sample whose
        # percentile lies at the edge of a rounding step may keep one activation more or less. All
        # others agree to the last digits.
        close = torch.isclose(scores, torch.tensor(expected, dtype=torch.float64), rtol=1e-9)
        assert close.double().mean() > 0.9


def test_only_the_pixels_that_matter_least_are_moved() -> None:
    model = make_model()
    images = make_images(6)
    seen: list[Tensor] = []
    classifier = Classifier(model)

    def watched(inputs: Tensor) -> Batch:
        seen.append(inputs.detach().clone())
        return classifier(inputs)

    with torch.no_grad():
        batch = AdaSCALE(pixels=25, step=0.3).observe(images, watched)
    torch.testing.assert_close(batch.logits, model(images).detach())
    torch.testing.assert_close(batch.perturbed, model[:3](seen[1]).detach())
    moved = (seen[1] - images).flatten(1)
    inputs = images.clone().requires_grad_()
    model(inputs).amax(dim=1).sum().backward()
    gradient = inputs.grad.flatten(1)
    for row in range(6):
        # 25 % of 48.
        trivial = gradient[row].abs().argsort()[:12]
        expected = torch.zeros(48, dtype=torch.float64)
        expected[trivial] = 0.3 * gradient[row, trivial].sign()
        torch.testing.assert_close(moved[row], expected)


def test_a_larger_shift_means_weaker_scaling() -> None:
    features = torch.rand(200, WIDTH, dtype=torch.float64)
    moved = features + torch.linspace(0, 1, 200, dtype=torch.float64)[:, None] * torch.rand(
        200, WIDTH
    )
    head = Head(torch.randn(5, WIDTH, dtype=torch.float64))
    detector = Shaped(AdaSCALE(50, 95, level=100), Energy())
    fit_detector(detector, Batch(features, perturbed=moved), head)
    same = features[:1].expand(200, -1)
    shaped = detector.shape(
        Batch(same, head(same), perturbed=same + (moved - features).abs())
    ).features
    order = detector.shaping.oodness(Batch(same, perturbed=same + (moved - features).abs()))[
        :, 0
    ].argsort()
    factors = (shaped / same)[order, 0]
    assert (factors.diff() <= 1e-12).all()
    assert factors[0] > factors[-1] * 1.5


def test_neither_split_nor_order_changes_the_fit() -> None:
    model = make_model()
    train = make_images(300)
    whole = Guard(model, "adascale").fit([train]).detector.state_dict()
    split = Guard(model, "adascale").fit(train.flip(0).split(70)).detector.state_dict()
    for key, tensor in whole.items():
        torch.testing.assert_close(split[key], tensor, rtol=1e-9, atol=1e-9)


def test_it_combines_with_any_detector_and_is_saved(tmp_path) -> None:
    model = make_model()
    guard = Guard(model, "adascale+fdbd").fit([make_images(300)]).calibrate([make_images(100, 3)])
    guard.save(tmp_path / "guard.safetensors")
    loaded = fdbd.load(tmp_path / "guard.safetensors", model)
    decision = guard(make_images(9, 4))
    assert torch.equal(decision.logits, model(make_images(9, 4)))
    assert torch.equal(loaded(make_images(9, 4)).scores, decision.scores)


def test_outside_a_guard_it_says_where_it_works() -> None:
    batch = Batch(torch.rand(4, 8))
    head = Head(torch.rand(3, 8))
    with pytest.raises(ValueError, match=r"fdbd.Guard\(model, 'adascale\+energy'\)"):
        fdbd.create("adascale").fit(batch, head)
    guard = Guard(make_model(), "adascale").fit([make_images(64)])
    with pytest.raises(ValueError, match=r"fdbd.Guard\(model, 'adascale\+energy'\)"):
        guard.detector.score(Batch(torch.rand(4, WIDTH, dtype=torch.float64)))
    with pytest.raises(TypeError, match="one floating-point tensor"):
        AdaSCALE().observe({"ids": torch.ones(2)}, Classifier(make_model()))


def test_a_broken_image_scores_minus_infinity() -> None:
    guard = Guard(make_model(), "adascale").fit([make_images(64)])
    images = make_images(4, 2)
    images[1, 0, 0, 0] = torch.nan
    scores = guard.score(images)
    assert scores[1] == -torch.inf
    assert torch.isfinite(scores[[0, 2, 3]]).all()


def test_moved_images_that_overflow_are_neither_scored_nor_learnt_from() -> None:
    guard = Guard(make_model(), "adascale").fit([make_images(64)])
    batch = guard.detector.observe(make_images(4, 2), guard.classifier)
    broken = batch.perturbed.clone()
    broken[1] = torch.nan
    scores = guard.detector.score(batch._replace(perturbed=broken))
    assert scores[1] == -torch.inf
    assert torch.equal(scores[[0, 2, 3]], guard.detector.score(batch)[[0, 2, 3]])
    with pytest.raises(NonFiniteRow, match="row 1 of its features, or those of the moved images,"):
        next(AdaSCALE().passes(guard.detector.head)).update(batch._replace(perturbed=broken))


@pytest.mark.parametrize(
    "wrong",
    [
        {"low": 90, "high": 80},
        {"shift": 0},
        {"pixels": 101},
        {"weight": -1},
        {"step": math.inf},
        {"variant": "x"},
    ],
)
def test_bad_settings_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="expected"):
        AdaSCALE(**wrong)
