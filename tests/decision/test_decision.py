"""Label, score, p-value and verdict in one call of the kernel, against the same one after the other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fdbd
from fdbd import FDBD, Batch, Guard, Head
from fdbd.decision.threshold import Threshold
from fdbd.detectors.base import Detector


def fitted(dtype: torch.dtype = torch.float32, classes: int = 5, normalizer: str | None = "deviation") -> FDBD:
    torch.manual_seed(0)
    head = Head(torch.randn(classes, 7, dtype=dtype), torch.randn(classes, dtype=dtype))
    return FDBD(normalizer).fit(Batch(torch.randn(60, 7, dtype=dtype)), head)


def batch_of(detector: Detector, rows: int, seed: int = 1) -> Batch:
    features = torch.randn(rows, 7, generator=torch.Generator().manual_seed(seed), dtype=detector.head_weight.dtype)
    return Batch(features, features @ detector.head_weight.T + detector.head_bias)


def guard_of(detector: Detector, threshold: Threshold) -> Guard:
    guard = Guard(detector.head, detector)
    guard.threshold = threshold
    return guard


@given(
    rows=st.integers(0, 30),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    classes=st.sampled_from([2, 5, 200]),
    normalizer=st.sampled_from(["deviation", "norm", None]),
    calibration=st.integers(1, 90),
    rounded=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=100, deadline=None)
def test_the_kernel_decides_as_the_stages_do(rows, dtype, classes, normalizer, calibration, rounded, seed) -> None:
    detector = fitted(dtype, classes, normalizer)
    batch = batch_of(detector, rows, seed)
    known = detector.score(batch_of(detector, calibration, seed + rounded))  # of the same rows: ties
    threshold = Threshold.quantile(known.round(decimals=1) if rounded else known, 0.8)
    labels, scores, p_values, is_ood = detector.decide_at_once(batch, threshold)
    assert torch.equal(labels, batch.logits.argmax(dim=1))
    assert torch.equal(scores, detector.score(batch))
    assert torch.equal(p_values, threshold.p_values(scores))
    assert torch.equal(is_ood, threshold.is_ood(scores))
    for part in (labels, scores, p_values, is_ood):
        assert part.shape == (rows,)


def test_many_rows_are_decided_by_a_team() -> None:
    detector = fitted()
    batch = batch_of(detector, 30_000)
    threshold = Threshold.conformal(detector.score(batch_of(detector, 500, 2)), 0.1)
    decided = detector.decide_at_once(batch, threshold)
    alone = [
        detector.decide_at_once(Batch(*(part[i : i + 1] for part in batch[:2])), threshold)
        for i in range(0, 30_000, 999)
    ]
    for together, single in zip(decided, zip(*alone)):
        assert torch.equal(together[::999], torch.cat(single))


def test_equal_logits_are_of_the_first_class() -> None:
    detector = fitted()
    batch = Batch(torch.randn(3, 7), torch.tensor([[0.0, 2, 2, 2, 1], [-0.0, 0, 0, 0, 0], [3, 1, 3, 3, 3]]))
    labels = detector.decide_at_once(batch, Threshold.quantile(torch.randn(9)))[0]
    assert labels.tolist() == [1, 0, 0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("part", ["features", "logits"])
def test_a_row_that_the_kernel_does_not_trust_is_decided_in_stages(value: float, part: str) -> None:
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


def test_what_the_kernel_cannot_look_at_is_left_to_the_stages() -> None:
    detector, batch = fitted(), batch_of(fitted(), 4)
    known = detector.score(batch_of(detector, 50, 2))
    one, by_class = Threshold.quantile(known), Threshold.quantile(known, labels=torch.arange(50) % 5, per_class=True)
    left = {
        "a threshold by class": (detector, batch, by_class),
        "calibration scores of another dtype": (detector, batch, Threshold.quantile(known.double())),
        "features alone": (detector, Batch(batch.features), one),
        "half precision": (detector, Batch(batch.features.half(), batch.logits), one),
        "another width": (detector, Batch(batch.features[:, :6], batch.logits), one),
        "other rows": (detector, Batch(batch.features[:3], batch.logits), one),
        "one sample without a batch": (detector, Batch(batch.features[0], batch.logits[0]), one),
        "no fit": (FDBD(), batch, one),
        "the nearest alone": (FDBD(nearest=2).fit(batch, detector.head), batch, one),
        "another detector": (fdbd.create("energy").fit(batch, detector.head), batch, one),
    }
    for what, (asked, given_batch, threshold) in left.items():
        assert asked.decide_at_once(given_batch, threshold) is None, what
    assert detector.decide_at_once(batch, one) is not None


def test_strided_and_negated_memory_is_read_right() -> None:
    detector = fitted()
    batch = batch_of(detector, 6)
    threshold = Threshold.quantile(detector.score(batch_of(detector, 50, 2)))
    expected = guard_of(detector, threshold)(batch)
    imaginary = torch.complex(torch.zeros_like(batch.features), -batch.features).conj().imag
    assert imaginary.is_neg()
    strided = torch.stack([batch.features, batch.features], dim=2)[..., 0]
    for features in (imaginary, strided):
        for ours, theirs in zip(guard_of(detector, threshold)(Batch(features, batch.logits)), expected):
            torch.testing.assert_close(ours, theirs)


def test_a_guard_takes_the_road_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    guard = Guard(model).fit(torch.randn(60, 4)).calibrate(torch.randn(60, 4))
    images = torch.randn(5, 4)
    expected = guard(images)
    monkeypatch.setattr(FDBD, "score", None)
    monkeypatch.setattr(Threshold, "decide", None)
    for ours, theirs in zip(guard(images), expected):
        assert torch.equal(ours, theirs)
    monkeypatch.undo()
    monkeypatch.setattr(FDBD, "decide_at_once", lambda *_: None)
    for ours, theirs in zip(guard(images), expected):
        assert torch.equal(ours, theirs)
    with torch.enable_grad():
        assert not any(part.requires_grad for part in guard(images))


def test_perturbed_images_are_scored_apart_from_their_labels() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    guard = Guard(model, perturb=fdbd.InputPerturbation(0.2)).fit(torch.randn(60, 4)).calibrate(torch.randn(60, 4))
    images = torch.randn(9, 4)
    decision = guard(images)
    assert torch.equal(decision.logits, model(images))
    assert not torch.equal(decision.scores, Guard(model, guard.detector).score(images))
    torch.testing.assert_close(decision.scores, guard.score(images))


def test_a_subclass_is_asked_for_its_own_score() -> None:
    class Flipped(FDBD):
        def score(self, batch: Batch) -> torch.Tensor:
            return -super().score(batch)

    plain = fitted()
    batch = batch_of(plain, 20)
    flipped = Flipped().fit(batch_of(plain, 60, 2), plain.head)
    guard = guard_of(flipped, Threshold.quantile(flipped.score(batch_of(plain, 60, 3))))
    assert torch.equal(guard(batch).scores, guard.score(batch))
    assert (guard(batch).scores < 0).any()


@pytest.mark.parametrize("part", ["offsets", "center", "floor"])
def test_a_folded_head_of_other_shapes_never_reaches_the_kernel(part: str) -> None:
    detector = fitted()
    batch, threshold = batch_of(detector, 4), Threshold.quantile(torch.randn(9))
    detector.load_state_dict({**detector.state_dict(), part: torch.zeros(3)})
    assert detector.decide_at_once(batch, threshold) is None
    with pytest.raises(ValueError, match="offsets, center and floor have shapes"):
        guard_of(detector, threshold)(batch)


def test_steps_of_another_length_never_reach_the_kernel() -> None:
    detector = fitted()
    threshold = Threshold.quantile(torch.randn(9))
    threshold.steps = threshold.steps[:4]
    assert detector.decide_at_once(batch_of(detector, 4), threshold) is None
