"""Detectors that know classes, weights or directions, against loops over their papers' formulas and
pytorch-ood."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import Tensor

from fdbd import Batch, Head
from fdbd.detectors import DICE, NCI, NECO, SHE, GradNorm, OpenMax
from fdbd.fitting.weibull import Tails, fit_weibull


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b))


def norm(a: list[float]) -> float:
    return math.sqrt(dot(a, a))


def logits_of(head: Head, z: list[float]) -> list[float]:
    return [dot(w, z) + b for w, b in zip(head.weight.tolist(), head.bias.tolist())]


def argmax(values: list[float]) -> int:
    return values.index(max(values))


def mean_of(rows: list[list[float]]) -> list[float]:
    return [math.fsum(column) / len(rows) for column in zip(*rows)]


def linear(head: Head) -> torch.nn.Linear:
    layer = torch.nn.Linear(head.num_features, head.num_classes, dtype=head.weight.dtype)
    layer.weight.data = head.weight.clone()
    layer.bias.data = head.bias.clone()
    return layer.requires_grad_(False)


def close(found: Tensor, expected: list[float], rtol: float = 1e-10, atol: float = 1e-10) -> None:
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=found.dtype), rtol=rtol, atol=atol
    )


# NCI


@pytest.mark.parametrize("alpha", [0.0, 0.02])
def test_nci_is_the_projection_on_the_predicted_weights_and_the_norm(
    problem: Any, alpha: float
) -> None:
    train, queries, head = problem()
    mean = mean_of(train.features.tolist())
    expected = []
    for z in queries.features.tolist():
        centred = [x - m for x, m in zip(z, mean)]
        w = head.weight.tolist()[argmax(logits_of(head, z))]
        expected.append(dot(w, centred) / norm(centred) + alpha * sum(abs(x) for x in z))
    close(NCI(alpha).fit(train, head).score(queries), expected)


@pytest.mark.parametrize("alpha", [0.0, 0.02])
def test_nci_equals_pytorch_ood(problem: Any, alpha: float) -> None:
    ood = pytest.importorskip("pytorch_ood.detector")
    train, queries, head = problem(dtype=torch.float32)
    peer = ood.NCI(None, linear(head), alpha).fit_features(train.features)
    expected = -peer.predict_features(queries.features)
    torch.testing.assert_close(
        NCI(alpha).fit(train, head).score(queries), expected, rtol=1e-5, atol=1e-5
    )


def test_nci_is_finite_at_the_training_mean(problem: Any) -> None:
    train, _, head = problem()
    detector = NCI().fit(train, head)
    assert torch.isfinite(detector.score(Batch(train.features.mean(dim=0, keepdim=True)))).all()


@pytest.mark.parametrize("alpha", [-1.0, float("inf"), float("nan")])
def test_nci_refuses_weights_that_are_none(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"alpha is .*, expected a weight of at least 0"):
        NCI(alpha)


# NECO


def neco(train: Tensor, z: Tensor, dimension: int, standardize: bool) -> list[float]:
    """Shares by a singular value decomposition of the training data themselves."""
    rows = train.numpy()
    mean = rows.mean(axis=0)
    deviation = rows.std(axis=0) if standardize else np.ones(rows.shape[1])
    _, _, directions = np.linalg.svd((rows - mean) / deviation, full_matrices=True)
    shares = []
    for row in z.numpy():
        standard = (row - mean) / deviation
        inside = math.sqrt(
            sum(float(direction @ standard) ** 2 for direction in directions[:dimension])
        )
        shares.append(inside / math.sqrt(float(standard @ standard)))
    return shares


@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize(("dimension", "used"), [(None, 5), (1, 1), (3, 3), (8, 8)])
def test_neco_is_the_share_in_the_principal_space_times_the_largest_logit(
    problem: Any, dimension: int | None, used: int, standardize: bool
) -> None:
    train, queries, head = problem()
    shares = neco(train.features, queries.features, used, standardize)
    detector = NECO(dimension, standardize).fit(train, head)
    largest = [max(logits_of(head, z)) for z in queries.features.tolist()]
    close(detector.score(queries), [share * v for share, v in zip(shares, largest)], 1e-8, 1e-8)
    close(
        NECO(dimension, standardize, times_logit=False).fit(train, head).score(queries),
        shares,
        1e-8,
        1e-8,
    )


def test_neco_ignores_the_scale_of_a_feature_but_not_without_standardizing(problem: Any) -> None:
    train, queries, head = problem()
    scale = torch.logspace(-3, 3, 8, dtype=torch.float64)
    scaled = Head(head.weight / scale, head.bias)
    for standardize in (True, False):
        first = NECO(3, standardize).fit(train, head).score(queries)
        second = (
            NECO(3, standardize)
            .fit(Batch(train.features * scale), scaled)
            .score(Batch(queries.features * scale))
        )
        assert torch.allclose(first, second, rtol=1e-6) is standardize


def test_neco_survives_constant_features(problem: Any) -> None:
    train, queries, head = problem()
    train.features[:, 2] = 0.1
    train.features[:, 4] = 0
    scores = NECO().fit(train, head).score(queries)
    assert torch.isfinite(scores).all()
    share = NECO(times_logit=False).fit(train, head)
    torch.testing.assert_close(share.center, train.features.mean(dim=0))
    assert share.score(Batch(share.center[None])) == 0


def test_neco_refuses_more_dimensions_than_features(problem: Any) -> None:
    train, _, head = problem()
    with pytest.raises(ValueError, match="dimension is 9, but features have only 8"):
        NECO(9).fit(train, head)
    with pytest.raises(ValueError, match="dimension is 0"):
        NECO(0)


# SHE


def test_she_is_the_product_with_the_mean_of_rightly_predicted_samples(problem: Any) -> None:
    train, queries, head = problem()
    stored: dict[int, list[list[float]]] = {}
    for z, label in zip(train.features.tolist(), train.labels.tolist()):
        if argmax(logits_of(head, z)) == label:
            stored.setdefault(label, []).append(z)
    assert len(stored) == 5
    assert sum(map(len, stored.values())) < 300
    expected = [
        dot(z, mean_of(stored[argmax(logits_of(head, z))])) for z in queries.features.tolist()
    ]
    close(SHE().fit(train, head).score(queries), expected)


def test_she_equals_pytorch_ood(problem: Any) -> None:
    ood = pytest.importorskip("pytorch_ood.detector")
    train, queries, head = problem()
    peer = ood.SHE(None, linear(head)).fit_features(train.features, train.labels)
    expected = -peer.predict_features(queries.features)
    torch.testing.assert_close(
        SHE().fit(train, head).score(queries), expected, rtol=1e-9, atol=1e-9
    )


def test_she_scores_zero_for_a_class_that_is_never_right(problem: Any) -> None:
    # pytorch-ood refuses such data.
    train, queries, head = problem()
    labels = torch.where(train.labels == 3, 4, train.labels)
    detector = SHE().fit(train._replace(labels=labels), head)
    predicted = head(queries.features).argmax(dim=1)
    assert (predicted == 3).any()
    assert torch.equal(detector.score(queries) == 0, predicted == 3)


@pytest.mark.parametrize("kind", [SHE, OpenMax])
def test_labels_that_no_prediction_agrees_with_are_refused(problem: Any, kind: Any) -> None:
    train, _, head = problem()
    labels = (head(train.features).argmax(dim=1) + 1) % 5
    with pytest.raises(ValueError, match="no training sample is predicted as its label"):
        kind().fit(train._replace(labels=labels), head)


# DICE


def percentile_of(values: list[float], percentile: float) -> float:
    """Between the two nearest values, by linear interpolation."""
    ordered = sorted(values)
    position = percentile / 100 * (len(ordered) - 1)
    lower = ordered[math.floor(position)]
    upper = ordered[math.ceil(position)]
    return lower + (upper - lower) * (position - math.floor(position))


@pytest.mark.parametrize("percentile", [10.0, 50.0, 90.0])
def test_dice_is_the_energy_of_the_largest_contributions(problem: Any, percentile: float) -> None:
    train, queries, head = problem()
    mean = mean_of(train.features.tolist())
    weights = head.weight.tolist()
    contributions = []
    for row in weights:
        contributions += [w * m for w, m in zip(row, mean)]
    threshold = percentile_of(contributions, percentile)
    sparse = []
    for row in weights:
        kept = []
        for w, m in zip(row, mean):
            kept.append(w if w * m > threshold else 0.0)
        sparse.append(kept)
    expected = []
    for z in queries.features.tolist():
        energies = [math.exp(dot(row, z) + b) for row, b in zip(sparse, head.bias.tolist())]
        expected.append(math.log(sum(energies)))
    close(DICE(percentile).fit(train, head).score(queries), expected)


def test_dice_without_a_percentile_is_the_energy(problem: Any) -> None:
    train, queries, head = problem()
    close(DICE(0).fit(train, head).score(queries), head(queries.features).logsumexp(dim=1).tolist())


@pytest.mark.parametrize("percentile", [30.0, 90.0])
def test_dice_equals_pytorch_ood(problem: Any, percentile: float) -> None:
    ood = pytest.importorskip("pytorch_ood.detector")
    train, queries, head = problem(dtype=torch.float32)
    peer = ood.DICE(None, head.weight, head.bias, percentile / 100).fit_features(
        train.features, train.labels
    )
    expected = -peer.predict_features(queries.features)
    torch.testing.assert_close(
        DICE(percentile).fit(train, head).score(queries), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("percentile", [-1, 100, float("nan")])
def test_dice_refuses_percentiles_outside_its_range(percentile: float) -> None:
    with pytest.raises(ValueError, match="percentile is"):
        DICE(percentile)


# GradNorm


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_gradnorm_is_the_norm_of_the_gradient_that_autograd_finds(
    problem: Any, temperature: float
) -> None:
    train, queries, head = problem()
    uniform = torch.full((5,), 1 / 5, dtype=torch.float64)
    expected = []
    for z in queries.features:
        weight = head.weight.clone().requires_grad_()
        logits = weight @ z + head.bias
        divergence = (uniform * (uniform.log() - (logits / temperature).log_softmax(dim=0))).sum()
        (gradient,) = torch.autograd.grad(divergence, weight)
        expected.append(gradient.abs().sum().item())
    close(GradNorm(temperature).fit(train, head).score(queries), expected)


def test_gradnorm_equals_pytorch_ood_on_the_weights_of_the_last_layer(problem: Any) -> None:
    ood = pytest.importorskip("pytorch_ood.detector")
    train, queries, head = problem()
    peer = ood.GradNorm(linear(head), param_filter=lambda name: name == "weight")
    expected = -peer.predict(queries.features)
    torch.testing.assert_close(
        GradNorm().fit(train, head).score(queries), expected, rtol=1e-9, atol=1e-9
    )


# OpenMax


def weibull(tail: list[float]) -> tuple[float, float]:
    """Shape and scale of the Weibull law of a tail moved to 10,000, as LibMR does, from the
    likelihood equation."""
    logs = [math.log((d - min(tail) + 1e4) / 1e4) for d in tail]
    average = math.fsum(logs) / len(logs)

    def slope(k: float) -> float:
        powers = [math.exp(k * (x - max(logs))) for x in logs]
        return math.fsum(p * x for p, x in zip(powers, logs)) / math.fsum(powers) - 1 / k - average

    k = optimize.brentq(slope, 1.0, 1e9, xtol=1e-9, rtol=1e-13)
    return k, 1e4 * math.exp(
        max(logs) + math.log(math.fsum(math.exp(k * (x - max(logs))) for x in logs) / len(logs)) / k
    )


def distance(a: list[float], b: list[float]) -> float:
    return norm([x - y for x, y in zip(a, b)])


def unknown_probability(
    training: list[tuple[list[float], int]], v: list[float], tail: int, alpha: int
) -> float:
    """The probability of the unknown class, after the authors' algorithms 1 and 2."""
    classes = len(v)
    omega = [0.0] * classes
    largest_first = sorted(range(classes), key=lambda c: -v[c])
    for rank, c in enumerate(largest_first[:alpha]):
        right = [row for row, label in training if label == c and argmax(row) == c]
        center = mean_of(right)
        distances = sorted(distance(row, center) for row in right)[-tail:]
        k, scale = weibull(distances)
        moved = distance(v, center) - min(distances) + 1e4
        omega[c] = (alpha - rank) / alpha * (1 - math.exp(-((moved / scale) ** k)))
    revised = [value * (1 - w) for value, w in zip(v, omega)]
    unknown = math.fsum(value * w for value, w in zip(v, omega))
    return math.exp(unknown) / math.fsum(math.exp(value) for value in [*revised, unknown])


@pytest.mark.parametrize(("tail", "alpha"), [(20, 5), (5, 2), (20, 1)])
def test_openmax_is_the_odds_against_the_unknown_class(problem: Any, tail: int, alpha: int) -> None:
    train, queries, head = problem()
    training = list(zip(head(train.features).tolist(), train.labels.tolist()))
    unknown = [
        unknown_probability(training, v, tail, alpha) for v in head(queries.features).tolist()
    ]
    assert max(unknown) - min(unknown) > 0.1
    detector = OpenMax(tail, alpha).fit(train, head)
    close(detector.score(queries), [math.log((1 - p) / p) for p in unknown], 1e-6, 1e-6)


def test_openmax_equals_pytorch_ood(problem: Any) -> None:
    # pytorch-ood differs in four ways: it models all samples of a class, not the rightly predicted
    # ones (so it is given only these); it stops its search for the Weibull law early, hence the
    # tolerance; it takes the distance from a class that no sample of the batch is predicted as for
    # 0 (here all are); 1 − P(unknown) rounds where odds do not.
    ood = pytest.importorskip("pytorch_ood.detector")
    train, queries, head = problem()
    logits = head(train.features)
    right = logits.argmax(dim=1) == train.labels
    assert len(head(queries.features).argmax(dim=1).unique()) == 5
    peer = ood.OpenMax(None, tailsize=20, alpha=10).fit_logits(logits[right], train.labels[right])
    unknown = peer.predict_logits(head(queries.features))
    found = OpenMax().fit(train, head).score(queries)
    torch.testing.assert_close((-found).sigmoid(), unknown, rtol=0, atol=2e-3)


def test_openmax_takes_every_distance_for_extreme_if_a_class_was_never_right(
    problem: Any,
) -> None:
    train, queries, head = problem()
    labels = torch.where(train.labels == 3, 4, train.labels)
    detector = OpenMax(alpha=1).fit(train._replace(labels=labels), head)
    logits = head(queries.features)
    rows = logits.argmax(dim=1) == 3
    largest = logits.amax(dim=1)
    revised = logits.scatter(1, logits.argmax(dim=1, keepdim=True), 0)
    expected = revised.logsumexp(dim=1) - largest
    assert rows.any()
    torch.testing.assert_close(detector.score(queries)[rows], expected[rows])


def test_openmax_models_a_single_sample_as_a_step(problem: Any) -> None:
    train, queries, head = problem()
    keep = (train.labels != 2).nonzero()[:, 0]
    right = ((head(train.features).argmax(dim=1) == 2) & (train.labels == 2)).nonzero()[:1, 0]
    rows = torch.cat([keep, right])
    detector = OpenMax().fit(Batch(train.features[rows], None, train.labels[rows]), head)
    assert torch.isfinite(detector.score(queries)).all()
    shape = detector.laws[2, 2]
    assert shape > 1e8


@pytest.mark.parametrize("options", [{"tail": 0}, {"alpha": 0}, {"alpha": 1.5}])
def test_openmax_refuses_numbers_below_one(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected a number of at least 1"):
        OpenMax(**options)


def test_weibull_laws_have_the_greatest_likelihood() -> None:
    generator = torch.Generator().manual_seed(0)
    tails = (
        torch.rand(6, 20, generator=generator, dtype=torch.float64).exp()
        * torch.logspace(-2, 2, 6)[:, None]
    )
    tails = tails.double().sort(dim=1, descending=True).values
    tails[1, 7:] = -torch.inf
    location, scale, shape = fit_weibull(tails)
    for c in range(6):
        tail = tails[c][torch.isfinite(tails[c])].numpy()
        moved = tail - tail.min() + 1e4

        def likelihood(k: float, s: float, x: Any = moved) -> float:
            return float(stats.weibull_min.logpdf(x, k, scale=s).sum())

        k = shape[c].item()
        s = scale[c].item()
        best = likelihood(k, s)
        # The likelihood is far steeper along the scale, by a factor of the order of the shape.
        for step in (-0.01, 0.01):
            assert likelihood(k * (1 + step), s) < best
            assert likelihood(k, s * (1 + 10 * step / k)) < best
        d = torch.linspace(0.5, 1.5, 7, dtype=torch.float64) * tail.max()
        found = 1 - torch.exp(-(shape[c] * torch.log1p((d - location[c]) / s)).exp())
        expected = stats.weibull_min.cdf(d.numpy() - tail.min() + 1e4, k, scale=s)
        torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-7, atol=1e-7)


def test_tails_keep_the_largest_of_each_class() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(200, generator=generator, dtype=torch.float64)
    classes = torch.randint(0, 4, (200,), generator=generator)
    classes[classes == 2] = 1
    tails = Tails(4, 7, lambda batch: (batch.features[:, 0], batch.labels))
    for start in range(0, 200, 33):
        rows = slice(start, start + 33)
        tails.update(Batch(numbers[rows, None], None, classes[rows]))
    for c in range(4):
        expected = sorted(numbers[classes == c].tolist(), reverse=True)[:7]
        assert tails.largest[c].tolist() == expected + [-math.inf] * (7 - len(expected))
