"""MDS, RMDS and SSD against their formulas in float64, pytorch-ood and scikit-learn."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from fdbd.core.batch import Batch, Head
from fdbd.core.linear_algebra import whitener
from fdbd.detectors import ssd as ssd_module
from fdbd.detectors.mds import MDS
from fdbd.detectors.rmds import RMDS
from fdbd.detectors.ssd import SSD

CLASSES, WIDTH = 4, 6
OPTIONS = [MDS(), RMDS(), SSD(), SSD(shrinkage=1.0), SSD(3, iterations=2), SSD(1)]


def training_data(
    seed: int = 0, count: int = 200, dtype: torch.dtype = torch.float64
) -> tuple[Batch, Head]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    mix = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    means = 2 * torch.randn(CLASSES, WIDTH, generator=generator, dtype=torch.float64)
    features = (
        means[labels]
        + torch.randn(count, WIDTH, generator=generator, dtype=torch.float64) @ mix
        + 3
    )
    head = Head(torch.randn(CLASSES, WIDTH, generator=generator, dtype=torch.float64).to(dtype))
    return Batch(features.to(dtype), None, labels), head


def queries(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (
        5 * torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    ).to(dtype)


def class_statistics(
    features: np.ndarray, labels: np.ndarray
) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """Class means and the covariance within classes, by loops."""
    means = {int(c): features[labels == c].mean(axis=0) for c in np.unique(labels)}
    scatter = np.zeros((features.shape[1], features.shape[1]))
    for z, y in zip(features, labels):
        scatter += np.outer(z - means[int(y)], z - means[int(y)])
    return means, scatter / len(features)


def mds_by_definition(batch: Batch, z: np.ndarray) -> np.ndarray:
    means, covariance = class_statistics(batch.features.double().numpy(), batch.labels.numpy())
    precision = np.linalg.pinv(covariance, rcond=1e-12, hermitian=True)
    return np.array([-min((x - m) @ precision @ (x - m) for m in means.values()) for x in z])


def rmds_by_definition(batch: Batch, z: np.ndarray) -> np.ndarray:
    features = batch.features.double().numpy()
    mean = features.mean(axis=0)
    background = np.linalg.inv(np.cov(features.T, bias=True))
    relative = [(x - mean) @ background @ (x - mean) for x in z]
    return mds_by_definition(batch, z) + np.array(relative)


def ssd_by_definition(
    features: np.ndarray, clusters: np.ndarray, z: np.ndarray, shrinkage: float = 0.0
) -> np.ndarray:
    features = features / np.linalg.norm(features, axis=1, keepdims=True)
    _, shared = class_statistics(features, clusters)
    scores = []
    for x in z / np.linalg.norm(z, axis=1, keepdims=True):
        distances = []
        for c in np.unique(clusters):
            rows = features[clusters == c]
            own = np.cov(rows.T, bias=True)
            precision = np.linalg.inv((1 - shrinkage) * own + shrinkage * shared)
            distances.append((x - rows.mean(axis=0)) @ precision @ (x - rows.mean(axis=0)))
        scores.append(-min(distances))
    return np.array(scores)


def test_mds_is_the_distance_to_the_nearest_class_mean_under_the_shared_covariance() -> None:
    batch, head = training_data()
    scores = MDS().fit(batch, head).score(Batch(queries()))
    np.testing.assert_allclose(
        scores.numpy(), mds_by_definition(batch, queries().numpy()), rtol=1e-9
    )


def test_rmds_is_the_class_distance_less_the_distance_to_all_data() -> None:
    batch, head = training_data()
    scores = RMDS().fit(batch, head).score(Batch(queries()))
    np.testing.assert_allclose(
        scores.numpy(), rmds_by_definition(batch, queries().numpy()), rtol=1e-9
    )


def test_rmds_with_more_classes_than_features_is_the_same_formula() -> None:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(600) % 20
    features = torch.randn(20, 5, generator=generator).double()[labels] + torch.randn(
        600, 5, generator=generator
    )
    batch = Batch(features, None, labels)
    z = torch.randn(30, 5, generator=generator).double() * 4
    scores = RMDS().fit(batch, Head(torch.randn(20, 5))).score(Batch(z))
    np.testing.assert_allclose(scores.numpy(), rmds_by_definition(batch, z.numpy()), rtol=1e-9)


@pytest.mark.parametrize("shrinkage", [None, 0.0, 0.3, 1.0])
def test_ssd_by_class_is_the_distance_of_normalised_features_under_each_covariance(
    shrinkage: float | None,
) -> None:
    batch, head = training_data()
    detector = SSD(shrinkage=shrinkage).fit(batch, head)
    expected = ssd_by_definition(
        batch.features.numpy(), batch.labels.numpy(), queries().numpy(), shrinkage or 0.0
    )
    np.testing.assert_allclose(detector.score(Batch(queries())).numpy(), expected, rtol=1e-7)
    assert detector.covariance == ("shared" if shrinkage == 1 else "own")
    assert f"covariance='{detector.covariance}'" in repr(detector)


def test_ssd_with_one_cluster_needs_no_labels() -> None:
    batch, head = training_data()
    scores = SSD(1).fit(batch._replace(labels=None), head).score(Batch(queries()))
    expected = ssd_by_definition(batch.features.numpy(), np.zeros(200), queries().numpy())
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-7)


def test_ssd_finds_clusters_that_are_there() -> None:
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(900) % 3
    features = 10 * torch.eye(WIDTH, dtype=torch.float64)[labels] + torch.randn(
        900, WIDTH, generator=generator
    )
    batch = Batch(features, None, labels)
    head = Head(torch.eye(3, WIDTH))
    by_class = SSD().fit(batch, head)
    by_means = SSD(3).fit(batch._replace(labels=None), head)
    z = Batch(queries())
    torch.testing.assert_close(by_means.score(z), by_class.score(z), rtol=1e-9, atol=0)


def test_ssd_shares_the_covariance_if_the_table_would_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, head = training_data()
    monkeypatch.setattr(ssd_module, "LARGEST_TABLE", CLASSES * WIDTH**2 - 1)
    detector = SSD().fit(batch, head)
    assert detector.covariance == "shared"
    assert detector.whitener.shape == (WIDTH, WIDTH)
    expected = ssd_by_definition(
        batch.features.numpy(), batch.labels.numpy(), queries().numpy(), 1.0
    )
    np.testing.assert_allclose(detector.score(Batch(queries())).numpy(), expected, rtol=1e-7)


def test_ssd_shrinks_all_covariances_when_one_cluster_has_too_few_samples() -> None:
    batch, head = training_data()
    few = torch.cat([(batch.labels != 0).nonzero()[:, 0], (batch.labels == 0).nonzero()[:1, 0]])
    batch = Batch(batch.features[few], None, batch.labels[few])
    detector = SSD().fit(batch, head)
    counts = torch.bincount(batch.labels)
    torch.testing.assert_close(detector.shrinkages, WIDTH / (WIDTH + counts.double()))
    assert torch.isfinite(detector.score(Batch(queries()))).all()


def test_scores_agree_with_pytorch_ood() -> None:
    peer = pytest.importorskip("pytorch_ood.detector")
    batch, head = training_data(dtype=torch.float32, count=500)
    z = queries(torch.float32)
    # Theirs is the distance under the scatter (not divided by N), halved for MDS, and an outlier
    # score.
    theirs = peer.Mahalanobis(None).fit_features(batch.features, batch.labels).predict_features(z)
    torch.testing.assert_close(
        MDS().fit(batch, head).score(Batch(z)), -2 * 500 * theirs, rtol=1e-3, atol=0
    )
    theirs = peer.RMD(None).fit_features(batch.features, batch.labels).predict_features(z)
    torch.testing.assert_close(
        RMDS().fit(batch, head).score(Batch(z)), -500 * theirs, rtol=1e-3, atol=1e-2
    )


def test_a_singular_covariance_gives_the_pseudo_inverse() -> None:
    batch, head = training_data()
    features = batch.features.clone()
    # A constant feature, and one that depends on others.
    features[:, 2] = 7.0
    features[:, 3] = features[:, 0] - 2 * features[:, 1]
    flat = batch._replace(features=features)
    scores = MDS().fit(flat, head).score(Batch(queries()))
    np.testing.assert_allclose(
        scores.numpy(), mds_by_definition(flat, queries().numpy()), rtol=1e-6
    )
    assert torch.isfinite(RMDS().fit(flat, head).score(Batch(queries()))).all()
    assert torch.isfinite(SSD().fit(flat, head).score(Batch(queries()))).all()


def test_the_whitener_agrees_with_scikit_learn_if_the_covariance_is_singular() -> None:
    from sklearn.covariance import EmpiricalCovariance

    rows = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fitted = EmpiricalCovariance().fit(rows.numpy())
    w = whitener(torch.from_numpy(fitted.covariance_))
    np.testing.assert_allclose((w.T @ w).numpy(), fitted.precision_, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("detector", OPTIONS, ids=repr)
def test_more_features_than_samples_and_empty_classes_are_defined(detector: MDS) -> None:
    generator = torch.Generator().manual_seed(5)
    batch = Batch(torch.randn(30, 64, generator=generator), None, torch.arange(30) % 5)
    fitted = copy.deepcopy(detector).fit(batch, Head(torch.randn(1000, 64, generator=generator)))
    scores = fitted.score(Batch(torch.randn(7, 64, generator=generator)))
    assert torch.isfinite(scores).all()
    assert all(buffer.isfinite().all() for buffer in fitted.buffers())


def test_features_that_do_not_vary_within_classes_are_an_error() -> None:
    for features in (
        torch.eye(3),
        torch.randn(3, 8, generator=torch.Generator().manual_seed(0)) * 100,
    ):
        batch = Batch(features, None, torch.arange(3))
        head = Head(torch.eye(3, features.shape[1]))
        for detector in (MDS(), RMDS()):
            with pytest.raises(ValueError, match="do not vary within their classes"):
                detector.fit(batch, head)


def test_the_score_has_a_gradient_towards_the_nearest_class() -> None:
    batch, head = training_data()
    detector = MDS().fit(batch, head)
    z = queries().requires_grad_()
    (gradient,) = torch.autograd.grad(detector.score(Batch(z)).sum(), z)
    assert (
        detector.score(Batch(z.detach() + 1e-4 * gradient.sign()))
        > detector.score(Batch(z.detach()))
    ).all()


# ── several layers
# ─────────────────────────────────────────────────────────────────────────────────────────────────


def layered(count: int, seed: int, noise: float = 0.0) -> Batch:
    """Three parts; what perturbs a sample shows in the middle one alone."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    features, early, middle = (
        torch.eye(CLASSES, width)[labels] * 5 + torch.randn(count, width, generator=generator)
        for width in (6, 5, 8)
    )
    return Batch(features, None, labels, {"early": early, "middle": middle + noise})


def test_each_layer_has_its_own_gaussians() -> None:
    head = Head(torch.eye(CLASSES, 6))
    batch = layered(400, 0)
    detector = MDS(layers=("early", "middle")).fit(batch, head)
    z = layered(20, 1)
    expected = []
    for part, rows in (
        ("features", z.features),
        ("early", z.layers["early"]),
        ("middle", z.layers["middle"]),
    ):
        trained = batch.features if part == "features" else batch.layers[part]
        alone = batch._replace(features=trained)
        of_training = mds_by_definition(alone, trained.double().numpy())
        of_queries = mds_by_definition(alone, rows.double().numpy())
        expected.append((of_queries - of_training.mean()) / of_training.std())
    np.testing.assert_allclose(
        detector.standardised(z).numpy(), np.stack(expected, axis=1), rtol=2e-3, atol=2e-3
    )
    np.testing.assert_allclose(
        detector.score(z).numpy(), np.mean(expected, axis=0), rtol=2e-3, atol=2e-3
    )


def test_the_regression_weighs_the_layer_that_gives_perturbed_samples_away() -> None:
    from sklearn.linear_model import LogisticRegression

    head = Head(torch.eye(CLASSES, 6))
    clean = layered(400, 1)
    perturbed = layered(400, 2, noise=1.0)
    both = clean._replace(adversarial=perturbed._replace(labels=None))
    detector = MDS(layers=["early", "middle"]).fit(
        [both.rows(slice(a, a + 90)) for a in range(0, 400, 90)], head
    )
    x = (
        torch.cat([detector.standardised(detector._prepare(part)) for part in (clean, perturbed)])
        .double()
        .numpy()
    )
    y = np.repeat([1, 0], 400)
    reference = LogisticRegression(tol=1e-10, max_iter=1000).fit(x, y)
    np.testing.assert_allclose(detector.weights.numpy(), reference.coef_[0], rtol=1e-3, atol=1e-4)
    assert detector.weights.abs().argmax() == 2
    odds = reference.decision_function(x[:400])
    np.testing.assert_allclose(detector.score(clean).numpy(), odds, rtol=1e-2, atol=1e-2)
    assert (
        detector.score(layered(200, 5)).mean()
        > 0
        > detector.score(layered(200, 6, noise=1.0)).mean()
    )


def test_a_non_finite_layer_fails_closed_whatever_the_sign_of_its_weight() -> None:
    detector = MDS(["early", "middle"]).fit(layered(400, 0), Head(torch.eye(CLASSES, 6)))
    detector.set_buffers(weights=torch.tensor([1.0, -1.0, -1.0]))
    batch = layered(4, 1)
    batch.layers["early"][0, 0] = torch.inf
    batch.layers["middle"][1, 0] = torch.nan
    batch.layers["middle"][2] *= 1e30
    scores = detector.score(batch)
    assert scores[:2].tolist() == [-torch.inf, -torch.inf]
    assert torch.isfinite(scores[2:]).all()


def test_missing_and_misshapen_layers_are_named() -> None:
    head = Head(torch.eye(CLASSES, 6))
    batch = layered(40, 0)
    with pytest.raises(ValueError, match="lacks the layers \\['late'\\]"):
        MDS(["late"]).fit(batch, head)
    detector = MDS(["early"]).fit(batch, head)
    with pytest.raises(ValueError, match="lacks the layers \\['early'\\]"):
        detector.score(Batch(batch.features))
    with pytest.raises(
        ValueError, match="features of layer 'early' have shape \\(40, 3\\), expected \\(N, 5\\)"
    ):
        detector.score(batch._replace(layers={"early": batch.features[:, :3]}))
    broken = layered(40, 0)
    broken.layers["early"][3, 0] = torch.nan
    with pytest.raises(ValueError, match="batch 0, row 3: its layer 'early'"):
        MDS(["early"]).fit(broken, head)


# ── options and export
# ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clusters": 0}, "clusters is 0"),
        ({"clusters": "k"}, "clusters is 'k'"),
        ({"shrinkage": 2.0}, "shrinkage is 2.0"),
        ({"iterations": 0}, "iterations is 0"),
    ],
)
def test_options_of_ssd_that_make_no_sense_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SSD(**options)


def test_more_clusters_than_samples_is_an_error() -> None:
    batch, head = training_data(count=20)
    with pytest.raises(ValueError, match="30 clusters asked for"):
        SSD(30).fit(batch, head)


def test_mds_and_ssd_by_class_ask_for_labels() -> None:
    batch, head = training_data()
    for detector in (MDS(), RMDS(), SSD()):
        with pytest.raises(ValueError, match="needs labels"):
            detector.fit(batch._replace(labels=None), head)


@pytest.mark.parametrize("name", ["mds", "rmds", "ssd"])
def test_classes_that_are_many_deviations_apart_keep_their_digits(name: str) -> None:
    torch.manual_seed(0)
    labels = torch.arange(400) % 2
    center = torch.tensor([[1.0, 0.0, 0.2], [-1.0, 0.0, 0.2]])[labels]
    features = center + torch.randn(400, 3) * torch.tensor([1e-4, 1e-2, 1e-2])
    head = Head(torch.randn(2, 3))
    make = {"mds": MDS, "rmds": RMDS, "ssd": lambda: SSD(shrinkage=1)}[name]
    single = make().fit(Batch(features, None, labels), head)
    double = make().fit(Batch(features.double(), None, labels), head)
    torch.testing.assert_close(
        single.score(Batch(features)).double(),
        double.score(Batch(features.double())),
        rtol=0.02,
        atol=0.02,
    )
