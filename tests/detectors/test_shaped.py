"""Shaped: any detector on shaped features, fitted, asked, saved and exported like any other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fdbd
from fdbd import ASHP, FDBD, KNN, LTS, MDS, MSP, SCALE, VRA, Batch, Energy, Head, ReAct, Shaped, ViM


def make_data(
    count: int = 300, width: int = 16, classes: int = 4, seed: int = 0
) -> tuple[Tensor, Tensor, Head]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, width, generator=generator, dtype=torch.float64).relu()
    labels = torch.randint(0, classes, (count,), generator=generator)
    weight = torch.randn(classes, width, generator=generator, dtype=torch.float64)
    return (
        features,
        labels,
        Head(weight, torch.randn(classes, generator=generator, dtype=torch.float64)),
    )


@pytest.mark.parametrize("make", [FDBD, Energy, MSP, MDS, lambda: KNN(k=3), ViM])
@pytest.mark.parametrize("shaping", [ReAct(80), SCALE(90), ASHP(50), VRA()], ids=lambda s: s.name)
def test_it_is_the_detector_fitted_on_shaped_features(make, shaping) -> None:
    features, labels, head = make_data()
    shaped = Shaped(shaping, make(), mean="of_shaped").fit(Batch(features, None, labels), head)
    moved = shaped.shaping(features)
    by_hand = make().fit(Batch(moved, head(moved), labels), head)
    torch.testing.assert_close(shaped.score(Batch(features[:50])), by_hand.score(Batch(moved[:50])))


def test_given_logits_are_those_of_raw_features_and_are_not_used() -> None:
    features, _, head = make_data()
    detector = Shaped(ReAct(50), Energy()).fit(Batch(features), head)
    plain = detector.score(Batch(features))
    assert torch.equal(detector.score(Batch(features, head(features))), plain)
    torch.testing.assert_close(plain, head(detector.shaping(features)).logsumexp(dim=1))


def test_lts_scales_the_logits_it_is_given() -> None:
    features, _, head = make_data()
    detector = Shaped(LTS(), Energy()).fit(Batch(features), head)
    logits = head(features)
    expected = (logits * detector.shaping.ratio(features).square()).logsumexp(dim=1)
    torch.testing.assert_close(detector.score(Batch(features, logits)), expected)
    torch.testing.assert_close(detector.score(Batch(features)), expected)


def test_the_shaped_mean_of_the_paper() -> None:
    features, _, head = make_data()
    detector = Shaped(ReAct(80), FDBD()).fit(Batch(features), head)
    clipped = features.clamp_max(float(detector.shaping.threshold))
    center = features.mean(dim=0).clamp_max(float(detector.shaping.threshold))
    torch.testing.assert_close(detector.detector.center, center)
    expected = fdbd.detectors.fdbd.geometry.Folded(head, center).score(
        clipped, logits=head(clipped)
    )
    torch.testing.assert_close(detector.score(Batch(features)), expected)
    other = Shaped(ReAct(80), FDBD(), mean="of_shaped").fit(Batch(features), head)
    torch.testing.assert_close(other.detector.center, clipped.mean(dim=0))


def test_a_shaped_mean_is_only_for_detectors_with_one_mean() -> None:
    with pytest.raises(ValueError, match="energy has none"):
        Shaped(ReAct(), Energy(), mean="shaped")
    with pytest.raises(ValueError, match="expected 'of_shaped', 'shaped' or None"):
        Shaped(ReAct(), FDBD(), mean="raw")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["react", "scale", "vra"])
def test_features_too_large_for_float32_are_scored_all_the_same(name: str) -> None:
    features, _, head = make_data()
    head = Head(head.weight.float(), head.bias.float())
    detector = fdbd.create(f"{name}+fdbd").fit(Batch(features.float()), head)
    scores = detector.score(Batch(torch.cat([features[:3], features[:3] * 1e37]).float()))
    assert torch.isfinite(scores).all()


def test_a_one_shot_iterator_is_not_enough_for_two_passes() -> None:
    features, _, head = make_data()
    with pytest.raises(ValueError, match="needs another pass"):
        fdbd.create("react+fdbd").fit(iter([Batch(features)]), head)
    assert fdbd.create("scale+fdbd").fit(iter([Batch(features)]), head).is_fitted


def test_a_non_finite_training_row_is_named() -> None:
    features, _, head = make_data()
    features[7, 2] = torch.inf
    with pytest.raises(ValueError, match="batch 0, row 7"):
        fdbd.create("react+energy").fit(Batch(features), head)


def test_shapings_follow_each_other_from_left_to_right() -> None:
    features, _, head = make_data()
    detector = fdbd.create("react+ash-p+energy").fit(Batch(features), head)
    clipped = features.clamp_max(float(detector.shaping.threshold))
    expected = head(ASHP(65)(clipped)).logsumexp(dim=1)
    torch.testing.assert_close(detector.score(Batch(features)), expected)
    assert detector.label == "react+ash-p+energy"


def test_views_are_shaped_too() -> None:
    features, _, head = make_data()
    views = torch.stack([features, features * 2])
    detector = Shaped(ReAct(70), fdbd.CSI()).fit(Batch(features, views=views), head)
    moved = detector.shaping(views)
    by_hand = fdbd.CSI().fit(Batch(moved[0], views=moved), head)
    torch.testing.assert_close(
        detector.score(Batch(features, views=views)), by_hand.score(Batch(moved[0], views=moved))
    )


def test_the_head_is_kept_once() -> None:
    features, _, head = make_data()
    state = fdbd.create("react+scale+fdbd").fit(Batch(features), head).state_dict()
    assert [key for key in state if key.endswith("head_weight")] == [
        "detector.detector.head_weight"
    ]


@pytest.mark.parametrize(
    "make", [lambda: fdbd.create("react+scale+fdbd"), lambda: fdbd.Ensemble(["react+fdbd", "mds"])]
)
def test_the_head_is_at_hand_however_deep_it_is_kept(make) -> None:
    features, labels, head = make_data()
    detector = make()
    with pytest.raises(fdbd.NotFittedError, match="not fitted"):
        detector.head  # noqa: B018
    detector.fit(Batch(features, None, labels), head)
    assert torch.equal(detector.head.weight, head.weight)
    assert torch.equal(detector.head.bias, head.bias)


def test_it_is_fitted_together_with_others() -> None:
    features, labels, head = make_data()
    ensemble = fdbd.Ensemble(["react+mds", "fdbd", "scale+energy", "vra+vim"])
    ensemble.fit([Batch(f, None, y) for f, y in zip(features.split(50), labels.split(50))], head)
    for detector in ensemble.members:
        alone = fdbd.create(detector.label).fit(Batch(features, None, labels), head)
        torch.testing.assert_close(detector.score(Batch(features)), alone.score(Batch(features)))


def test_labels_are_asked_for_if_the_detector_needs_them() -> None:
    features, _, head = make_data()
    with pytest.raises(ValueError, match="needs labels"):
        Shaped(ReAct(), MDS()).fit(Batch(features), head)


def test_wrong_parts_are_refused() -> None:
    with pytest.raises(TypeError, match="expected an fdbd shaping"):
        Shaped(Energy(), Energy())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected an fdbd detector"):
        Shaped(ReAct(), ReAct())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="would change nothing"):
        Shaped(LTS(), KNN())
    with pytest.raises(ValueError, match="both perturb"):
        Shaped(fdbd.AdaSCALE(), fdbd.ODIN())
    with pytest.raises(ValueError, match="shape the members"):
        Shaped(ReAct(), fdbd.Ensemble(["fdbd", "energy"]))
    with pytest.raises(fdbd.NotFittedError):
        fdbd.create("react+fdbd").score(Batch(torch.rand(2, 3)))


def test_shapings_of_logits_that_would_change_nothing_are_refused() -> None:
    for name in ("lts+odin", "lts+adascale+energy"):
        with pytest.raises(ValueError, match=r"lts changes logits.*it would change nothing"):
            fdbd.create(name)
    with pytest.raises(ValueError, match="adascale changes logits, and knn reads features alone"):
        Shaped(fdbd.AdaSCALE(variant="logit"), KNN())
    with pytest.raises(ValueError, match="adascale needs images"):
        Shaped(fdbd.AdaSCALE(), FDBD(), mean="shaped")


def test_a_constant_feature_is_not_below_its_own_percentile() -> None:
    features = torch.cat(
        [torch.full((50, 1), 1.1), torch.full((50, 1), -0.3), torch.rand(50, 2)], dim=1
    )
    detector = Shaped(VRA(), Energy()).fit(Batch(features), Head(torch.randn(3, 4)))
    shaped = detector.shape(Batch(features)).features
    torch.testing.assert_close(shaped[:, :2], features[:, :2], rtol=2**-11, atol=0)


@pytest.mark.parametrize("name", ["ash-p", "ash-b", "ash-s"])
def test_ties_are_broken_alike_with_gradients(name: str) -> None:
    features = torch.randint(0, 3, (40, 64)).float().relu()
    shaping = fdbd.create(f"{name}+energy").shaping
    assert torch.equal(shaping(features), shaping(features.clone().requires_grad_()).detach())
