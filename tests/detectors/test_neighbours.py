"""KNN, NNGuide and CSI against their formulas in float64, pytorch-ood and faiss."""

from __future__ import annotations

import copy
import math
import pickle
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdbd.core.batch import Batch, Head
from fdbd.core.linear_algebra import largest_products
from fdbd.detectors.csi import CSI
from fdbd.detectors.knn import KNN
from fdbd.detectors.nnguide import NNGuide
from fdbd.detectors.shaped import Shaped
from fdbd.detectors.shaping import LTS

CLASSES, WIDTH = 4, 6


def training_data(count: int = 200, dtype: torch.dtype = torch.float64) -> tuple[Batch, Head]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64) + 1
    head = Head(torch.randn(CLASSES, WIDTH, generator=generator, dtype=torch.float64).to(dtype))
    return Batch(features.to(dtype)), head


def queries(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (
        3 * torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    ).to(dtype)


def normalised(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def energy(head: Head, x: np.ndarray) -> float:
    return float(np.log(sum(np.exp(head.weight.double().numpy() @ x + head.bias.double().numpy()))))


def test_knn_is_the_distance_to_the_kth_neighbour_of_normalised_features() -> None:
    batch, head = training_data()
    bank = normalised(batch.features.numpy())
    expected = []
    for x in normalised(queries().numpy()):
        distances = sorted(np.linalg.norm(x - b) for b in bank)
        expected.append(-distances[4])
    np.testing.assert_allclose(
        KNN(5).fit(batch, head).score(Batch(queries())).numpy(), expected, rtol=1e-9
    )


def test_nnguide_is_energy_times_the_mean_of_the_largest_scaled_similarities() -> None:
    batch, head = training_data()
    guides = [normalised(z) * energy(head, z) for z in batch.features.numpy()]
    expected = []
    for x in queries().numpy():
        similarities = sorted(normalised(x) @ guide for guide in guides)
        expected.append(energy(head, x) * np.mean(similarities[-4:]))
    np.testing.assert_allclose(
        NNGuide(4).fit(batch, head).score(Batch(queries())).numpy(), expected, rtol=1e-9
    )


def test_csi_with_one_view_is_the_nearest_cosine_times_the_norm() -> None:
    batch, head = training_data()
    bank = normalised(batch.features.numpy())
    expected = []
    for x in queries().numpy():
        nearest_cosine = max(normalised(x) @ b for b in bank)
        expected.append(nearest_cosine * np.linalg.norm(x))
    detector = CSI().fit(batch, head)
    np.testing.assert_allclose(detector.score(Batch(queries())).numpy(), expected, rtol=1e-9)
    one_view = Batch(queries(), None, None, None, queries()[None])
    np.testing.assert_allclose(detector.score(one_view).numpy(), expected, rtol=1e-9)


def views_of(features: torch.Tensor) -> torch.Tensor:
    return torch.stack([features, features.flip(1) * 2, -features.roll(1, 1)])


def test_csi_weighs_each_shifted_view_by_its_mean_norm_in_training() -> None:
    batch, head = training_data()
    trained = views_of(batch.features).numpy()
    asked = views_of(queries()).numpy()
    expected = []
    for i in range(40):
        total = 0.0
        for view in range(3):
            weight = len(trained[view]) / sum(np.linalg.norm(z) for z in trained[view])
            x = asked[view, i]
            total += (
                weight
                * max(normalised(x) @ normalised(z) for z in trained[view])
                * np.linalg.norm(x)
            )
        expected.append(total)
    detector = CSI().fit(batch._replace(views=views_of(batch.features)), head)
    scores = detector.score(Batch(queries(), views=views_of(queries())))
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-9)


def test_scores_agree_with_pytorch_ood() -> None:
    peer = pytest.importorskip("pytorch_ood.detector")
    batch, head = training_data(dtype=torch.float32)
    z = queries(torch.float32)
    labels = torch.zeros(200).long()
    theirs = peer.KNN(None, k=5).fit_features(batch.features, labels).predict_features(z)
    torch.testing.assert_close(
        KNN(5).fit(batch, head).score(Batch(z)), -theirs.float(), rtol=1e-5, atol=1e-6
    )
    theirs = peer.NNGuide(None, head, k=4).fit_features(batch.features, labels).predict_features(z)
    torch.testing.assert_close(
        NNGuide(4).fit(batch, head).score(Batch(z)), -theirs, rtol=1e-5, atol=1e-5
    )


def test_a_training_sample_is_its_own_first_neighbour_to_the_last_digit() -> None:
    batch, head = training_data(dtype=torch.float32)
    # √(2 − 2 cos) would give 3e-4 here.
    assert KNN(1).fit(batch, head).score(Batch(3 * batch.features)).abs().max() < 1e-6


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 700), st.integers(1, 40), st.integers(0, 5), st.booleans())
def test_the_largest_products_are_those_of_a_full_sort(
    points: int, k: int, seed: int, ties: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(5, 3, generator=generator)
    bank = torch.randn(points, 3, generator=generator)
    if ties:
        rows = rows.round()
        bank = bank.round()
    k = min(k, points)
    values, indices = largest_products(rows, bank, k)
    products = rows @ bank.T
    torch.testing.assert_close(values.sort(dim=1).values, products.sort(dim=1).values[:, -k:])
    torch.testing.assert_close(products.gather(1, indices), values)
    assert all(len(set(row)) == k for row in indices.tolist())


@pytest.mark.parametrize("with_gradient", [False, True])
def test_the_search_in_blocks_is_the_search_in_one(
    with_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fdbd.core import linear_algebra as linalg

    rows = torch.randn(30, 4)
    bank = torch.randn(1000, 4)
    whole = (rows @ bank.T).topk(20, dim=1).values.flip(1)
    monkeypatch.setattr(linalg, "_QUERIES", 7)
    monkeypatch.setattr(linalg, "_POINTS", 110)
    values, indices = largest_products(rows.requires_grad_(with_gradient), bank, 20)
    assert values.requires_grad == with_gradient
    torch.testing.assert_close(values.detach().sort(dim=1).values, whole)
    torch.testing.assert_close((rows @ bank.T).gather(1, indices), values)


def test_an_index_is_never_that_of_another_bank() -> None:
    pytest.importorskip("faiss")
    head = Head(torch.eye(4))
    z = Batch(torch.randn(20, 4))
    detector = KNN(3, index="flat")
    for seed in range(5):
        bank = torch.randn(200, 4, generator=torch.Generator().manual_seed(seed))
        detector.fit(Batch(bank), head)
        torch.testing.assert_close(detector.score(z), KNN(3).fit(Batch(bank), head).score(z))
        with pytest.raises(ValueError, match="NaN or infinity"):
            detector.fit(Batch(torch.full((200, 4), math.nan)), head)


@pytest.mark.parametrize("index", ["flat", "ivf", "hnsw"])
def test_faiss_indices_find_the_neighbours(index: str) -> None:
    pytest.importorskip("faiss")
    generator = torch.Generator().manual_seed(0)
    batch = Batch(torch.randn(3000, 8, generator=generator))
    head = Head(torch.randn(3, 8))
    z = Batch(torch.randn(100, 8, generator=generator))
    exact = KNN(10).fit(batch, head)
    other = KNN(10, index=index).fit(batch, head)
    assert exact.recall(z) == 1
    assert other.recall(z) > 0.5
    if index == "flat":
        assert other.recall(z) > 0.999
        torch.testing.assert_close(other.score(z), exact.score(z), rtol=1e-5, atol=1e-6)
    # What is missed is nearer than what is found.
    assert (other.score(z) <= exact.score(z) + 1e-5).all()
    assert torch.equal(copy.deepcopy(other).score(z), other.score(z))
    # Threads decide the graph that hnsw builds.
    if index != "hnsw":
        assert torch.equal(pickle.loads(pickle.dumps(other)).score(z), other.score(z))


def test_an_index_is_rebuilt_for_another_bank() -> None:
    pytest.importorskip("faiss")
    batch, head = training_data(dtype=torch.float32)
    detector = KNN(2, index="flat").fit(batch, head)
    detector.score(Batch(queries(torch.float32)))
    detector.fit(Batch(-batch.features), head)
    expected = KNN(2).fit(Batch(-batch.features), head).score(Batch(queries(torch.float32)))
    torch.testing.assert_close(
        detector.score(Batch(queries(torch.float32))), expected, rtol=1e-5, atol=1e-6
    )


def test_an_index_that_finds_too_few_is_completed_by_the_exact_search() -> None:
    pytest.importorskip("faiss")
    batch, head = training_data(count=400, dtype=torch.float32)
    z = Batch(queries(torch.float32))
    scores = KNN(399, index="ivf").fit(batch, head).score(z)
    torch.testing.assert_close(scores, KNN(399).fit(batch, head).score(z), rtol=1e-5, atol=1e-6)


def test_without_faiss_the_exact_search_stands_in_and_others_name_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    batch, head = training_data(dtype=torch.float32)
    z = Batch(queries(torch.float32))
    assert torch.equal(
        KNN(5, index="flat").fit(batch, head).score(z), KNN(5).fit(batch, head).score(z)
    )
    with pytest.raises(ImportError, match=r"pip install 'fdbd\[knn\]'"):
        KNN(5, index="ivf").fit(batch, head).score(z)


def test_guides_have_the_energy_of_the_logits_that_were_given_and_shaped() -> None:
    batch, head = training_data()
    logits = head(batch.features)
    given = NNGuide(4).fit(batch._replace(logits=3 * logits), head)
    scaled = NNGuide(4).fit(batch, Head(3 * head.weight, 3 * head.bias))
    torch.testing.assert_close(given.bank, scaled.bank)
    shaping = LTS(70)
    shaped = Shaped(shaping, NNGuide(4)).fit(batch, head)
    of_shaped = NNGuide(4).fit(shaping.shape(batch._replace(logits=logits)), head)
    assert torch.equal(shaped.detector.bank, of_shaped.bank)
    assert not torch.allclose(shaped.detector.bank, NNGuide(4).fit(batch, head).bank)


def test_alpha_keeps_about_that_share() -> None:
    batch = Batch(torch.randn(5000, WIDTH))
    head = Head(torch.eye(CLASSES, WIDTH))
    for detector in (KNN(1, alpha=0.1), NNGuide(1, alpha=0.1)):
        assert 400 < len(detector.fit(batch, head).bank) < 600
    assert 400 < CSI(alpha=0.1).fit(batch, head).bank.shape[1] < 600


def test_more_neighbours_than_samples_is_an_error() -> None:
    batch, head = training_data()
    with pytest.raises(ValueError, match="k is 201, but only 200 training samples were kept"):
        KNN(201).fit(batch, head)
    with pytest.raises(
        ValueError, match=r"k is 50, but only \d training samples were kept \(alpha=0.01\)"
    ):
        NNGuide(50, alpha=0.01).fit(batch, head)
    assert torch.isfinite(KNN(200).fit(batch, head).score(Batch(queries()))).all()


def test_views_may_be_arrays_or_half_precision() -> None:
    batch, head = training_data(dtype=torch.float32)
    detector = CSI().fit(batch._replace(views=views_of(batch.features)), head)
    z = queries(torch.float32)
    expected = detector.score(Batch(z, views=views_of(z)))
    assert torch.equal(detector.score(Batch(z.numpy(), views=views_of(z).numpy())), expected)
    torch.testing.assert_close(
        detector.score(Batch(z, views=views_of(z).half())), expected, rtol=1e-2, atol=1e-2
    )


def test_views_that_do_not_fit_are_named() -> None:
    batch, head = training_data()
    views = views_of(batch.features)
    detector = CSI().fit(batch._replace(views=views), head)
    with pytest.raises(ValueError, match=r"views have shape \(1, 40, 6\), expected \(3, 40, 6\)"):
        detector.score(Batch(queries()))
    with pytest.raises(ValueError, match=r"views have shape \(3, 200, 6\), expected \(V, 7, 6\)"):
        CSI().fit(Batch(batch.features[:7], views=views), head)
    with pytest.raises(ValueError, match="differ in their number of views"):
        CSI().fit([batch, batch._replace(views=views)], head)


@pytest.mark.parametrize(
    ("detector", "options", "message"),
    [
        (KNN, {"k": 0}, "k is 0"),
        (KNN, {"k": 2.5}, "k is 2.5"),
        (KNN, {"alpha": 0.0}, "alpha is 0.0"),
        (KNN, {"index": "tree"}, "index is 'tree'"),
        (NNGuide, {"k": True}, "k is True"),
        (CSI, {"alpha": 1.5}, "alpha is 1.5"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    detector: type, options: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        detector(**options)


def test_a_feature_without_direction_is_nobodys_neighbour() -> None:
    bank = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 2.0]])
    detector = KNN(1).fit(Batch(bank), Head(torch.eye(2)))
    assert len(detector.bank) == 2
    query = torch.tensor([[0.3, -((1 - 0.3**2) ** 0.5)], [0.0, 0.0]])
    torch.testing.assert_close(
        detector.score(Batch(query)), -torch.tensor([(2 - 2 * 0.3) ** 0.5, 1.0])
    )
    with pytest.raises(ValueError, match="only 2 training samples were kept"):
        KNN(3).fit(Batch(bank), Head(torch.eye(2)))
