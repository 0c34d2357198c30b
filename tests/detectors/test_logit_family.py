"""Detectors that read the logits alone, against loops over their papers' formulas and against
pytorch-ood."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from fdbd import Batch, Head
from fdbd.detectors import GEN, Entropy, KLMatching, MaxLogit, TemperatureScaling
from fdbd.detectors.softmax import logsumexp

HEAD = Head(torch.eye(3, dtype=torch.float64))


def softmax(logits: list[float]) -> list[float]:
    largest = max(logits)
    weights = [math.exp(v - largest) for v in logits]
    return [w / sum(weights) for w in weights]


def scores(detector: Any, logits: Tensor) -> Tensor:
    """Scores of given logits, whatever head they came from."""
    head = Head(torch.eye(logits.shape[1], dtype=logits.dtype))
    return detector.fit(Batch(logits, logits), head).score(Batch(logits, logits))


def close(found: Tensor, expected: list[float], rtol: float = 1e-12, atol: float = 1e-12) -> None:
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=found.dtype), rtol=rtol, atol=atol
    )


@pytest.fixture
def logits() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    spread = torch.tensor([0.1, 1.0, 5.0, 20.0]).repeat(8)[:, None]
    return torch.randn(32, 7, generator=generator, dtype=torch.float64) * spread


# MaxLogit


def test_maxlogit_is_the_largest_logit(logits: Tensor) -> None:
    close(scores(MaxLogit(), logits), [max(row) for row in logits.tolist()], 0, 0)


def test_maxlogit_equals_pytorch_ood(logits: Tensor) -> None:
    peer = pytest.importorskip("pytorch_ood.detector").MaxLogit(None)
    torch.testing.assert_close(
        scores(MaxLogit(), logits), -peer.predict_logits(logits), rtol=0, atol=0
    )


# Entropy


def test_entropy_is_the_sum_of_p_log_p(logits: Tensor) -> None:
    expected = []
    for row in logits.tolist():
        expected.append(sum(p * math.log(p) for p in softmax(row) if p > 0))
    close(scores(Entropy(), logits), expected)


def test_entropy_lies_between_that_of_chance_and_zero() -> None:
    found = scores(Entropy(), torch.tensor([[0.0, 0.0, 0.0, 0.0], [500.0, 0.0, 0.0, 0.0]]))
    close(found, [-math.log(4), 0.0], 1e-6, 1e-30)


def test_entropy_equals_pytorch_ood(logits: Tensor) -> None:
    # pytorch-ood raises probabilities below 1e-7 to it, which adds up to 1.7e-6 for each class.
    peer = pytest.importorskip("pytorch_ood.detector").Entropy(None)
    torch.testing.assert_close(
        scores(Entropy(), logits), -peer.predict_logits(logits), rtol=0, atol=7 * 1.7e-6
    )


def test_entropy_still_orders_predictions_that_pytorch_ood_takes_for_equally_certain() -> None:
    found = scores(Entropy(), torch.tensor([[20.0, 0.0], [30.0, 0.0], [40.0, 0.0]]))
    assert found[0] < found[1] < found[2] < 0


# GEN


def gen(row: list[float], gamma: float, top: int) -> float:
    largest = sorted(row, reverse=True)[0]
    weights = sorted((math.exp(v - largest) for v in row), reverse=True)
    total = math.fsum(weights)
    value = 0.0
    for index, weight in enumerate(weights[:top]):
        others = math.fsum(weights[:index] + weights[index + 1 :])
        value += (weight / total) ** gamma * (others / total) ** gamma
    return -value


@pytest.mark.parametrize("gamma", [0.1, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("top", [1, 3, 6, 7, 100])
def test_gen_is_the_sum_over_the_largest_probabilities(
    logits: Tensor, gamma: float, top: int
) -> None:
    close(scores(GEN(gamma, top), logits), [gen(row, gamma, top) for row in logits.tolist()])


@pytest.mark.parametrize("top", [2, 100])
def test_gen_in_float32_resolves_predictions_that_round_to_certain(top: int) -> None:
    logits = torch.tensor(
        [[40.0, 0.0, 0.0], [20.0, 0.0, -3.0], [80.0, 79.0, 0.0], [3.0, 3.0, 3.0], [5.0, 5.0, 1.0]]
    )
    close(scores(GEN(top=top), logits), [gen(row, 0.1, top) for row in logits.tolist()], 1e-5, 1e-7)


@pytest.mark.parametrize("top", [2, 100])
@pytest.mark.parametrize("gap", [90.0, 200.0, 700.0])
def test_gen_in_float32_ranks_what_is_far_beyond_certain(top: int, gap: float) -> None:
    logits = torch.tensor(
        [
            [gap, 0.0, 0.0, -gap],
            [gap, 1.0, 0.0, -5.0],
            [gap, gap, 0.0, 0.0],
            [gap, -1.0, -1.0, -1.0],
        ]
    )
    close(scores(GEN(top=top), logits), [gen(row, 0.1, top) for row in logits.tolist()], 1e-4, 0)


def test_gen_selects_the_same_classes_with_and_without_gradients(logits: Tensor) -> None:
    detector = GEN(top=3).fit(Batch(logits, logits), Head(torch.eye(7, dtype=torch.float64)))
    torch.testing.assert_close(
        detector.score(Batch(logits, logits.clone().requires_grad_())).detach(),
        detector.score(Batch(logits, logits)),
    )


@pytest.mark.parametrize("top", [3, 100])
def test_gen_equals_pytorch_ood_but_for_its_mean(top: int) -> None:
    # pytorch-ood averages where the paper sums, and clips probabilities at 1e-7, hence the moderate
    # logits.
    logits = 2 * torch.randn(50, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    peer = pytest.importorskip("pytorch_ood.detector").GEN(None, M=top)
    torch.testing.assert_close(
        scores(GEN(top=top), logits), -peer.predict_logits(logits) * min(top, 7), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize(
    "options", [{"gamma": 0}, {"gamma": float("nan")}, {"top": 0}, {"top": 2.5}, {"top": True}]
)
def test_gen_refuses_what_is_no_exponent_or_number(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} is"):
        GEN(**options)


# KL matching


def klm(training: list[list[float]], query: list[float]) -> float:
    sums: dict[int, tuple[int, list[float]]] = {}
    for row in training:
        p = softmax(row)
        k = p.index(max(p))
        count, total = sums.get(k, (0, [0.0] * len(p)))
        sums[k] = (count + 1, [a + b for a, b in zip(total, p)])
    p = softmax(query)
    best = math.inf
    for count, total in sums.values():
        best = min(best, sum(a * math.log(a / (b / count)) for a, b in zip(p, total) if a > 0))
    return -best


def test_klm_is_the_divergence_from_the_nearest_template(logits: Tensor) -> None:
    training = 2 * torch.randn(
        60, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    detector = KLMatching().fit(Batch(training, training), Head(torch.eye(7, dtype=torch.float64)))
    expected = [klm(training.tolist(), row) for row in logits.tolist()]
    close(detector.score(Batch(logits, logits)), expected, 1e-10, 1e-10)


def test_klm_leaves_out_classes_that_nothing_is_predicted_as(logits: Tensor) -> None:
    training = torch.randn(60, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    training[:, [2, 5]] -= 30
    detector = KLMatching().fit(Batch(training, training), Head(torch.eye(7, dtype=torch.float64)))
    assert detector.log_templates.shape == (5, 7)
    expected = [klm(training.tolist(), row) for row in logits.tolist()]
    close(detector.score(Batch(logits, logits)), expected, 1e-10, 1e-10)


def test_klm_stays_finite_if_a_template_underflows() -> None:
    training = torch.tensor([[2000.0, 0.0, 0.0], [0.0, 2000.0, 0.0]], dtype=torch.float64)
    detector = KLMatching().fit(Batch(training, training), HEAD)
    query = torch.tensor([[0.0, 0.0, 2000.0]], dtype=torch.float64)
    found = detector.score(Batch(query, query))
    assert torch.isfinite(found).all()
    assert found < -700


def test_klm_equals_pytorch_ood(logits: Tensor) -> None:
    peer = pytest.importorskip("pytorch_ood.detector").KLMatching(None)
    training = 2 * torch.randn(
        60, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    detector = KLMatching().fit(Batch(training, training), Head(torch.eye(7, dtype=torch.float64)))
    expected = -peer.fit_logits(training).predict_logits(logits)
    torch.testing.assert_close(
        detector.score(Batch(logits, logits)), expected, rtol=1e-9, atol=1e-9
    )


# Temperature scaling


def nll(temperature: float, logits: Tensor, labels: Tensor) -> float:
    total = 0.0
    for row, label in zip(logits.tolist(), labels.tolist()):
        total -= math.log(softmax([v / temperature for v in row])[label])
    return total


def calibrated(scale: float, samples: int = 400) -> tuple[Tensor, Tensor]:
    """Logits and labels drawn from the softmax of the logits divided by `scale`."""
    generator = torch.Generator().manual_seed(4)
    logits = 2 * torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    labels = logits.softmax(dim=1).multinomial(1, generator=generator)[:, 0]
    return logits * scale, labels


@pytest.mark.parametrize("scale", [0.05, 0.3, 1.0, 1.4, 2.0, 7.0, 40.0])
def test_temperature_minimises_the_likelihood(scale: float) -> None:
    logits, labels = calibrated(scale)
    detector = TemperatureScaling().fit(
        Batch(logits, logits, labels), Head(torch.eye(5, dtype=torch.float64))
    )
    best = minimize_scalar(
        lambda u: nll(math.exp(u), logits, labels),
        bounds=(math.log(scale) - 1, math.log(scale) + 1),
        method="bounded",
        options={"xatol": 1e-9},
    )
    assert detector.temperature.item() == pytest.approx(math.exp(best.x), rel=1e-5)
    expected = [max(softmax(row)) for row in (logits / math.exp(best.x)).tolist()]
    close(detector.score(Batch(logits, logits)).exp(), expected, 1e-5, 0)


def test_temperature_stops_at_the_end_of_the_grid_if_every_sample_is_right() -> None:
    logits = 10 * torch.eye(5, dtype=torch.float64)
    head = Head(torch.eye(5, dtype=torch.float64))
    right = TemperatureScaling().fit(Batch(logits, logits, torch.arange(5)), head)
    wrong = TemperatureScaling().fit(Batch(logits, logits, (torch.arange(5) + 1) % 5), head)
    assert (right.temperature.item(), wrong.temperature.item()) == (1 / 64, 64)


def test_temperature_fits_better_than_that_of_pytorch_ood() -> None:
    # pytorch-ood takes 50 short steps of L-BFGS from T = 1 and stops on the way; at the same T the
    # scores are the same.
    ood = pytest.importorskip("pytorch_ood.detector")
    for scale in (0.4, 1.4, 4.0):
        logits, labels = calibrated(scale)
        peer = ood.TemperatureScaling(None).fit_logits(logits, labels)
        detector = TemperatureScaling().fit(
            Batch(logits, logits, labels), Head(torch.eye(5, dtype=torch.float64))
        )
        found = detector.temperature.item()
        theirs = peer.t.item()
        assert min(1, found) < theirs < max(1, found)
        assert nll(found, logits, labels) < nll(theirs, logits, labels)
        with torch.no_grad():
            peer.t.fill_(found)
            expected = -peer.predict_logits(logits)
        torch.testing.assert_close(
            detector.score(Batch(logits, logits)).exp(), expected, rtol=1e-6, atol=0
        )


def test_temperature_needs_labels() -> None:
    with pytest.raises(ValueError, match="TemperatureScaling needs labels"):
        TemperatureScaling().fit(Batch(torch.eye(3)), Head(torch.eye(3)))


# The sums that they share


@pytest.mark.parametrize("classes", [2, 10, 16, 17, 200])
@pytest.mark.parametrize("spread", [1.0, 30.0, 1000.0])
def test_logsumexp_is_that_of_torch_at_any_spread(classes: int, spread: float) -> None:
    logits = spread * torch.randn(20, classes, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(
        logsumexp(logits), logits.double().logsumexp(dim=1).float(), rtol=1e-6, atol=1e-6
    )
    assert torch.autograd.gradcheck(logsumexp, logits[:3, :17].double().requires_grad_())


def test_temperature_is_found_if_the_likelihood_is_not_cubic() -> None:
    logits = torch.cat([torch.tensor([[20.0, 0.0]]).repeat(50_000, 1), torch.tensor([[0.2, 0.0]])])
    labels = torch.cat([torch.zeros(50_000, dtype=torch.int64), torch.ones(1, dtype=torch.int64)])
    batch = Batch(torch.zeros(50_001, 2), logits, labels)
    detector = TemperatureScaling().fit(batch, Head(torch.eye(2)))

    def loss(b: float) -> float:
        return float(
            50_000 * torch.log1p(torch.exp(torch.tensor(-20.0 * b, dtype=torch.float64)))
        ) + float(torch.log1p(torch.exp(torch.tensor(0.2 * b, dtype=torch.float64))))

    best = minimize_scalar(loss, bounds=(0.1, 4), method="bounded", options={"xatol": 1e-9}).x
    assert float(detector.temperature) == pytest.approx(1 / best, rel=1e-3)
