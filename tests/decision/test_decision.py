"""Decisions of a guard on features: rows that cannot be trusted, strided memory, subclasses,
perturbed images."""

import numpy as np
import pytest
import torch

import fdbd
from fdbd import FDBD, Batch, Guard, Head
from fdbd.decision.answers import Decision, discovery_cutoff
from fdbd.decision.threshold import Threshold
from fdbd.detectors import Detector


def fitted() -> FDBD:
    torch.manual_seed(0)
    head = Head(torch.randn(5, 7), torch.randn(5))
    return FDBD().fit(Batch(torch.randn(60, 7)), head)


def batch_of(detector: Detector, rows: int, seed: int = 1) -> Batch:
    features = torch.randn(
        rows, 7, generator=torch.Generator().manual_seed(seed), dtype=detector.head.weight.dtype
    )
    return Batch(features, detector.head(features))


def guard_of(detector: Detector, threshold: Threshold) -> Guard:
    guard = Guard(detector.head, detector)
    guard.threshold = threshold
    return guard


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("part", ["features", "logits"])
def test_a_row_with_a_bad_number_is_ood_and_touches_no_other(value: float, part: str) -> None:
    detector = fitted()
    batch = batch_of(detector, 6)
    getattr(batch, part)[2, 3] = value
    threshold = Threshold.quantile(detector.score(batch_of(detector, 50, 2)))
    decision = guard_of(detector, threshold)(batch)
    assert torch.equal(decision.scores, detector.score(batch))
    assert torch.equal(decision.p_values, threshold.p_values(decision.scores))
    assert torch.equal(decision.is_ood, threshold.is_ood(decision.scores))
    if abs(value) != 1e30:
        assert decision.scores[2] == -torch.inf
        assert decision.is_ood[2]
    assert torch.isfinite(decision.scores[[0, 1, 3, 4, 5]]).all()


def test_strided_and_negated_memory_is_read_right() -> None:
    detector = fitted()
    batch = batch_of(detector, 6)
    threshold = Threshold.quantile(detector.score(batch_of(detector, 50, 2)))
    expected = guard_of(detector, threshold)(batch)
    imaginary = torch.complex(torch.zeros_like(batch.features), -batch.features).conj().imag
    assert imaginary.is_neg()
    strided = torch.stack([batch.features, batch.features], dim=2)[..., 0]
    for features in (imaginary, strided):
        for ours, theirs in zip(
            guard_of(detector, threshold)(Batch(features, batch.logits)), expected
        ):
            torch.testing.assert_close(ours, theirs)


def test_perturbed_images_are_scored_apart_from_their_labels() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    guard = (
        Guard(model, perturb=fdbd.InputPerturbation(0.2))
        .fit(torch.randn(60, 4))
        .calibrate(torch.randn(60, 4))
    )
    images = torch.randn(9, 4)
    decision = guard(images)
    assert torch.equal(decision.logits, model(images))
    assert not torch.equal(decision.scores, Guard(model, guard.detector).score(images))
    torch.testing.assert_close(decision.scores, guard.score(images))


def test_a_subclass_is_asked_for_its_own_score() -> None:
    class Flipped(FDBD):
        def formula(self, batch: Batch) -> torch.Tensor:
            return -super().formula(batch)

    plain = fitted()
    batch = batch_of(plain, 20)
    flipped = Flipped().fit(batch_of(plain, 60, 2), plain.head)
    guard = guard_of(flipped, Threshold.quantile(flipped.score(batch_of(plain, 60, 3))))
    assert torch.equal(guard(batch).scores, guard.score(batch))
    assert (guard(batch).scores < 0).any()


@pytest.mark.parametrize("part", ["offsets", "center", "floor"])
def test_a_folded_head_whose_shapes_disagree_is_refused(part: str) -> None:
    detector = fitted()
    with pytest.raises(ValueError, match=f"{part} of FDBD has shape"):
        detector.load_state_dict({**detector.state_dict(), part: torch.zeros(3)})


def decided(p_values: torch.Tensor) -> Decision:
    count = len(p_values)
    return Decision(
        torch.zeros(count, 2),
        torch.zeros(count).long(),
        torch.zeros(count),
        p_values,
        p_values < 0.05,
    )


@pytest.mark.parametrize("q", [0.05, 0.1, 0.3])
def test_discoveries_are_those_of_the_definition(q: float) -> None:
    p_values = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 3
    ordered = p_values.sort().values
    ranks = torch.arange(1, 201, dtype=torch.float64)
    largest = max(rank for rank, p in enumerate(ordered.tolist(), 1) if p <= q * rank / 200)
    found = decided(p_values).discoveries(q)
    assert found.sum() == largest
    assert torch.equal(found, p_values <= ordered[largest - 1])
    values, counts = np.unique(p_values.numpy(), return_counts=True)
    assert discovery_cutoff(values, counts, q) == ordered[largest - 1]
    assert (ordered > q * ranks / 200).any()


def test_the_false_discovery_rate_is_kept_on_exchangeable_data() -> None:
    """A share of 0.8 of the samples is in-distribution; 400 draws of calibration and test data."""
    generator = torch.Generator().manual_seed(1)
    q = 0.2
    wrong = []
    power = []
    for _ in range(400):
        threshold = Threshold.conformal(torch.randn(500, generator=generator), alpha=0.1)
        scores = torch.randn(100, generator=generator)
        scores[80:] -= 3.5
        p_values, is_ood = threshold.decide(scores, None)
        named = Decision(
            torch.zeros(100, 2), torch.zeros(100).long(), scores, p_values, is_ood
        ).discoveries(q)
        wrong.append(named[:80].sum().item() / max(1, named.sum().item()))
        power.append(named[80:].double().mean().item())
    error = np.std(wrong) / len(wrong) ** 0.5
    # Bates et al. 2023: at most q times the share of in-distribution.
    assert np.mean(wrong) - 3 * error <= 0.8 * q
    assert np.mean(power) > 0.5, "the procedure finds something"


def test_nothing_is_discovered_among_nothing_and_a_rate_is_a_fraction() -> None:
    assert decided(torch.zeros(0)).discoveries(0.1).shape == (0,)
    assert discovery_cutoff(np.zeros(0), np.zeros(0, np.int64), 0.1) == -1
    with pytest.raises(ValueError, match=r"false discovery rate is 1\.5"):
        decided(torch.zeros(3)).discoveries(1.5)
