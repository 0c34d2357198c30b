"""Thresholds against their definitions, at ties, boundaries and roundings; and through saving,
compiling, exporting."""

from __future__ import annotations

import copy
import io
import itertools
import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor, nn

from fdbd.core.ranks import count_to_accept, count_to_flag, samples_for
from fdbd.decision.threshold import Threshold

INF, NAN = math.inf, math.nan
unhurried = settings(deadline=None, max_examples=40, derandomize=True)

values = st.one_of(
    st.sampled_from([-1.5, -0.0, 0.0, 0.1, 0.5, 1.0]), st.floats(-100, 100, width=32)
)
calibrations = st.lists(values, min_size=1, max_size=60)
dtypes = st.sampled_from([torch.float32, torch.float64])
alphas = st.sampled_from([0.01, 0.05, 0.1, 0.25, 1 / 3, 0.5, 1 - 0.9, 0.95])
tprs = st.sampled_from([0.01, 0.5, 0.55, 2 / 3, 0.9, 0.95, 0.99, 1.0])


def p_by_counting(calibration: list[float], score: float) -> Fraction:
    """The p-value as an exact fraction; a score that is not finite has none of them at or below
    it."""
    return Fraction(1 + sum(c <= score < INF for c in calibration), len(calibration) + 1)


def probes(calibration: Tensor) -> Tensor:
    """The calibration scores, their neighbours in floating point, and what lies beyond."""
    up = torch.nextafter(calibration, torch.full_like(calibration, INF))
    down = torch.nextafter(calibration, torch.full_like(calibration, -INF))
    return torch.cat([calibration, up, down, calibration.new_tensor([-INF, INF, NAN, -1e30, 1e30])])


@unhurried
@given(calibrations, dtypes, tprs)
def test_quantile_is_the_largest_threshold_that_accepts_enough(
    calibration: list[float], dtype: torch.dtype, tpr: float
) -> None:
    scores = torch.tensor(calibration, dtype=dtype)
    threshold = Threshold.quantile(scores, tpr)
    assert (threshold.kind, threshold.target, threshold.count) == (
        "quantile",
        tpr,
        len(calibration),
    )
    assert threshold.value.dtype == dtype
    accepted = (~threshold.is_ood(scores)).double().mean()
    assert accepted >= tpr - 1e-12
    larger = scores[scores > threshold.value]
    if len(larger):
        assert (scores >= larger.min()).double().mean() < tpr


@unhurried
@given(calibrations, dtypes)
def test_p_values_and_standing_are_the_counted_ones(
    calibration: list[float], dtype: torch.dtype
) -> None:
    scores = torch.tensor(calibration, dtype=dtype)
    threshold = Threshold.quantile(scores)
    asked = probes(scores)
    counted = [float(p_by_counting(scores.tolist(), s)) for s in asked.tolist()]
    torch.testing.assert_close(threshold.p_values(asked), torch.tensor(counted, dtype=dtype))
    below = [sum(c < s < INF for c in scores.tolist()) / len(calibration) for s in asked.tolist()]
    torch.testing.assert_close(threshold.standing(asked), torch.tensor(below, dtype=dtype))


@unhurried
@given(calibrations, dtypes, dtypes, tprs, st.lists(st.floats(width=32), max_size=20))
def test_a_decision_is_the_p_value_and_the_answer(
    calibration: list[float],
    dtype: torch.dtype,
    asked: torch.dtype,
    tpr: float,
    others: list[float],
) -> None:
    threshold = Threshold.quantile(torch.tensor(calibration, dtype=dtype), tpr)
    scores = torch.tensor([*calibration, *others, math.nan, math.inf, -math.inf], dtype=asked)
    p_values, is_ood = threshold.decide(scores)
    assert torch.equal(p_values, threshold.p_values(scores))
    assert torch.equal(is_ood, threshold.is_ood(scores))


@given(calibrations, dtypes, dtypes, alphas)
def test_conformal_decision_is_p_at_most_alpha(
    calibration: list[float], dtype: torch.dtype, asked_dtype: torch.dtype, alpha: float
) -> None:
    assume(len(calibration) >= samples_for(alpha))
    scores = torch.tensor(calibration, dtype=dtype)
    threshold = Threshold.conformal(scores, alpha)
    asked = torch.cat([probes(scores).to(asked_dtype), probes(scores.to(asked_dtype))])
    decided = threshold.is_ood(asked)
    assert torch.equal(decided, threshold.p_values(asked) <= threshold.target)
    exact = [
        p_by_counting(scores.tolist(), s) <= Fraction(str(threshold.target)) for s in asked.tolist()
    ]
    if alpha != 1 / 3:
        assert decided.tolist() == exact


@pytest.mark.parametrize("fraction", [np.float32(0.5), torch.tensor(0.5), Fraction(1, 2)])
def test_a_target_is_a_number_of_any_kind(fraction: float) -> None:
    scores = torch.arange(1.0, 20.0)
    for made in (Threshold.quantile(scores, fraction), Threshold.conformal(scores, fraction)):
        assert made.value.tolist() == [10.0]
        assert type(made.target) is float


def test_a_decimal_alpha_keeps_its_meaning_at_every_sample_size() -> None:
    """p ≤ alpha in float32, in float64 and in exact arithmetic, at p = alpha itself and its
    neighbours."""
    for alpha, n in itertools.product(
        ["0.01", "0.05", "0.1", "0.15", "0.3", "0.7"], range(99, 400)
    ):
        rank = count_to_flag(n, float(alpha))
        assert Fraction(rank, n + 1) <= Fraction(alpha) < Fraction(rank + 1, n + 1)
        for dtype in (torch.float32, torch.float64):
            p = torch.tensor([rank, rank + 1], dtype=dtype) / (n + 1)
            assert (p <= float(alpha)).tolist() == [True, False]
    for tpr, n in itertools.product(["0.5", "0.55", "0.9", "0.95", "0.99"], range(1, 400)):
        accept = count_to_accept(n, float(tpr))
        assert Fraction(accept - 1, n) < Fraction(tpr) <= Fraction(accept, n)


@pytest.mark.parametrize(("n", "alpha"), [(3, 0.25), (3, 0.5), (4, 0.4), (4, 0.2)])
def test_false_alarms_are_at_most_alpha_by_enumeration(n: int, alpha: float) -> None:
    """Every order of n + 1 distinct scores is equally likely; the last one is the new sample."""
    alarms = [
        bool(
            Threshold.conformal(torch.tensor(order[:n], dtype=torch.float32), alpha).is_ood(
                torch.tensor(order[n:])
            )
        )
        for order in itertools.permutations(range(n + 1))
    ]
    assert np.mean(alarms) == math.floor(alpha * (n + 1) + 1e-9) / (n + 1)
    assert np.mean(alarms) <= alpha


def test_false_alarms_are_at_most_alpha_with_ties_and_by_class() -> None:
    generator = torch.Generator().manual_seed(0)
    alarms = []
    by_class = []
    for _ in range(100):
        scores = torch.randn(241, generator=generator).mul(2).round()
        threshold = Threshold.conformal(scores[:40], 0.1)
        alarms.append(threshold.is_ood(scores[40:]).float().mean())
        # Three classes, whose scores differ by one.
        labels = torch.arange(241) % 3
        scores = scores + labels
        threshold = Threshold.conformal(scores[:120], 0.1, labels[:120], per_class=True)
        by_class.append(threshold.is_ood(scores[120:], labels[120:]).float().mean())
    assert np.mean(alarms) <= 0.1
    assert np.mean(by_class) <= 0.1


@unhurried
@given(calibrations, st.randoms(use_true_random=False))
def test_the_order_of_the_calibration_scores_does_not_matter(
    calibration: list[float], random: object
) -> None:
    shuffled = calibration.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first = Threshold.quantile(calibration)
    second = Threshold.quantile(shuffled)
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values())
    )


@unhurried
@given(st.lists(st.tuples(values, st.integers(0, 3)), min_size=1, max_size=60), dtypes)
def test_by_class_each_class_is_a_threshold_of_its_own(
    pairs: list[tuple[float, int]], dtype: torch.dtype
) -> None:
    scores = torch.tensor([s for s, _ in pairs], dtype=dtype)
    labels = torch.tensor([c for _, c in pairs])
    assume(len(labels.unique()) == labels.max() + 1)
    threshold = Threshold.quantile(scores, 0.8, labels, per_class=True)
    asked = probes(scores)
    for c in range(int(labels.max()) + 1):
        alone = Threshold.quantile(scores[labels == c], 0.8)
        predicted = torch.full((len(asked),), c)
        assert torch.equal(threshold.is_ood(asked, predicted), alone.is_ood(asked))
        for method in ("p_values", "standing"):
            assert torch.equal(
                getattr(threshold, method)(asked, predicted), getattr(alone, method)(asked)
            )


def test_a_class_without_samples_takes_the_common_quantile_and_says_so() -> None:
    scores = torch.arange(40.0)
    labels = torch.tensor([0, 2] * 20)
    with pytest.warns(
        UserWarning, match="2 of 4 classes have no calibration samples .* first is class 1"
    ):
        threshold = Threshold.quantile(scores, 0.9, labels, per_class=True, num_classes=4)
    common = Threshold.quantile(scores, 0.9)
    asked = probes(scores)
    for c in (1, 3):
        predicted = torch.full((len(asked),), c)
        assert torch.equal(threshold.is_ood(asked, predicted), common.is_ood(asked))
        for method in ("p_values", "standing"):
            assert torch.equal(
                getattr(threshold, method)(asked, predicted), getattr(common, method)(asked)
            )


def test_scores_that_are_not_finite_are_always_ood() -> None:
    for threshold in (
        Threshold.quantile(torch.randn(50), 1.0),
        Threshold.conformal(torch.randn(50), 0.02),
    ):
        hopeless = torch.tensor([-INF, NAN, INF])
        assert threshold.is_ood(hopeless).all()
        assert threshold.decide(hopeless)[1].all()
        assert threshold.p_values(hopeless).tolist() == pytest.approx([1 / 51] * 3)
        assert threshold.standing(hopeless).tolist() == [0, 0, 0]
        assert not threshold.is_ood(torch.tensor([1e30]))
        assert threshold.p_values(torch.tensor([1e30])) == 1


@pytest.mark.parametrize("kind", ["tpr", "alpha"])
@pytest.mark.parametrize("count", [30, 400])
def test_the_acceptance_of_new_samples_is_what_many_draws_show(kind: str, count: int) -> None:
    """The share of uniform scores at or above a threshold is one minus the threshold."""
    draws = torch.rand(2000, count, generator=torch.Generator().manual_seed(0))
    make = Threshold.quantile if kind == "tpr" else Threshold.conformal
    target = 0.9 if kind == "tpr" else 0.1
    shares = 1 - torch.stack([make(draw, target).value for draw in draws]).flatten()
    mean, low, high = make(draws[0], target).acceptance()
    assert shares.mean().item() == pytest.approx(mean, abs=5 * float(shares.std()) / 2000**0.5)
    inside = ((shares >= low) & (shares <= high)).double().mean().item()
    assert inside == pytest.approx(0.95, abs=0.02)


def test_few_calibration_samples_draw_a_caution_with_what_they_can_promise() -> None:
    caution = Threshold.quantile(torch.arange(12.0), 0.95).caution
    assert caution is not None
    # The lowest of 12 scores: a share below it of Beta(1, 12), whose 97.5 % point is 1 −
    # 0.025^(1/12).
    assert caution.startswith("only 12 calibration samples: the target is 5 % false alarms")
    assert f"to {100 * (1 - 0.025 ** (1 / 12)):.2g} %" in caution
    assert Threshold.quantile(torch.arange(200.0), 0.95).caution is None
    by_class = Threshold.quantile(
        torch.arange(200.0), 0.95, labels=[0] * 195 + [1] * 5, per_class=True
    )
    assert "only 5 calibration samples for the rarest predicted class" in str(by_class.caution)


def test_a_float64_threshold_is_not_rounded_to_the_scores_dtype() -> None:
    threshold = Threshold.quantile(torch.tensor([0.1, 0.2], dtype=torch.float64), 1.0)
    assert float(torch.tensor(0.1)) > 0.1
    assert not threshold.is_ood(torch.tensor([0.1]))
    single = Threshold.quantile(torch.tensor([0.1, 0.2]), 1.0)
    assert single.is_ood(torch.tensor([0.1], dtype=torch.float64))
    assert single.p_values(torch.tensor([0.1], dtype=torch.float64)) == pytest.approx(1 / 3)
    assert single.is_ood(torch.tensor([0.05], dtype=torch.float16))


def test_casting_the_module_moves_but_does_not_round() -> None:
    scores = torch.randn(100)
    threshold = nn.Sequential(Threshold.quantile(scores)).half().double()[0]
    assert threshold.value.dtype == torch.float32
    assert torch.equal(threshold.value, Threshold.quantile(scores).value)
    assert nn.Sequential(threshold).to("meta")[0].value.device.type == "meta"


@pytest.mark.parametrize("count", [1, 2, 3, 1024, 20_000])
@pytest.mark.parametrize("heavy_ties", [False, True])
def test_the_search_in_two_steps_counts_as_the_binary_one(count: int, heavy_ties: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(count, generator=generator)
    if heavy_ties:
        scores = scores.mul(8).round()
    asked = torch.cat([probes(scores[:500]), torch.tensor([-3.4e38, 3.4e38])])
    alone = Threshold.quantile(scores)
    stepped = Threshold.quantile(scores, labels=[0] * count, per_class=True)
    for method in ("p_values", "standing"):
        assert torch.equal(
            getattr(stepped, method)(asked, torch.zeros(len(asked)).long()),
            getattr(alone, method)(asked),
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Threshold.conformal(torch.randn(18), 0.05),
            "there are 18 calibration samples, .* at least 19",
        ),
        (lambda: Threshold.conformal(torch.randn(98), 1 - 0.99), "alpha=0.01 takes at least 99"),
        (
            lambda: Threshold.conformal(
                torch.randn(40), 0.05, torch.tensor([0] * 30 + [1] * 10), per_class=True
            ),
            "class 1 has 10 calibration samples, alpha=0.05 takes at least 19",
        ),
        (
            lambda: Threshold.conformal(
                torch.randn(40), 0.05, [0] * 40, per_class=True, num_classes=2
            ),
            "class 1 has 0 calibration samples",
        ),
        (lambda: Threshold.conformal(torch.randn(40), 1.0), "alpha is 1.0"),
        (lambda: Threshold.conformal(torch.randn(40), 0.0), "alpha is 0.0"),
        (lambda: Threshold.quantile(torch.randn(40), 0.0), "tpr is 0.0"),
        (lambda: Threshold.quantile(torch.randn(40), 95), "tpr is 95"),
        (lambda: Threshold.quantile(torch.randn(40), NAN), "tpr is nan"),
        (lambda: Threshold.quantile(torch.empty(0)), "no calibration scores"),
        (lambda: Threshold.quantile(torch.randn(4, 1)), r"shape \(4, 1\)"),
        (
            lambda: Threshold.quantile(torch.tensor([1.0, NAN, -INF])),
            "2 of 3 calibration scores are not finite, the first is nan at index 1",
        ),
        (lambda: Threshold.quantile(torch.randn(4), per_class=True), "pass labels"),
        (
            lambda: Threshold.quantile(
                torch.randn(4), labels=torch.zeros(3, dtype=torch.long), per_class=True
            ),
            r"labels have shape \(3,\), scores \(4,\)",
        ),
        (
            lambda: Threshold.quantile(
                torch.randn(2), labels=[0, 5], per_class=True, num_classes=3
            ),
            "labels go from 0 to 5, expected from 0 to 2",
        ),
        (
            lambda: Threshold.quantile(torch.randn(2), labels=[-1, 0], per_class=True),
            "expected at least 0",
        ),
    ],
)
def test_bad_calibrations_are_explained(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_predicted_classes_are_asked_for_and_checked() -> None:
    with pytest.raises(TypeError, match=r"labels are torch\.float32"):
        Threshold.quantile(torch.randn(2), labels=torch.zeros(2), per_class=True)
    threshold = Threshold.quantile(torch.randn(4), labels=[0, 0, 1, 1], per_class=True)
    with pytest.raises(ValueError, match="pass predicted"):
        threshold.is_ood(torch.randn(2))
    with pytest.raises(ValueError, match=r"scores have shape \(2,\), predicted \(1,\)"):
        threshold.p_values(torch.randn(2), torch.tensor([0]))
    with pytest.raises(IndexError):
        threshold.is_ood(torch.randn(1), torch.tensor([2]))


def both_forms(n: int = 3000) -> list[Threshold]:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(n, generator=generator)
    labels = torch.arange(n) % 3
    return [
        Threshold.conformal(scores),
        Threshold.quantile(scores + labels, 0.9, labels, per_class=True),
    ]


@pytest.mark.parametrize("threshold", both_forms())
def test_saving_and_loading_gives_the_same_threshold(threshold: Threshold) -> None:
    config = json.loads(json.dumps(threshold.to_config()))
    loaded = Threshold.from_state(config, load(save(threshold.state_dict())))
    assert str(loaded) == str(threshold)
    assert set(threshold.state_dict()) == {"calibration", "offsets"}
    scores = torch.randn(50)
    predicted = torch.arange(50) % 3
    pickled = io.BytesIO()
    torch.save(threshold, pickled)
    pickled.seek(0)
    for twin in (loaded, copy.deepcopy(threshold), torch.load(pickled, weights_only=False)):
        for a, b in zip(twin(scores, predicted), threshold(scores, predicted)):
            assert torch.equal(a, b)


def test_loading_a_state_dict_renews_the_decision() -> None:
    old = Threshold.quantile(torch.arange(100.0))
    new = Threshold.quantile(torch.arange(100.0) + 1000)
    old.load_state_dict(new.state_dict())
    assert torch.equal(old.value, new.value)
    assert torch.equal(old.p_values(torch.tensor([1050.0])), new.p_values(torch.tensor([1050.0])))


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, {"calibration": torch.tensor([2.0, 1.0, 3.0])}, "not finite and sorted"),
        ({}, {"calibration": torch.tensor([1.0, NAN, 3.0])}, "not finite"),
        ({}, {"calibration": torch.tensor([1.0, 2.0, INF])}, "not finite"),
        ({}, {"calibration": torch.tensor([1, 2, 3])}, "dtypes torch.int64"),
        ({}, {"calibration": torch.ones(3, 1)}, r"shapes \(3, 1\)"),
        ({"count": 0}, {"calibration": torch.ones(0)}, r"shapes \(0,\)"),
        ({}, {"offsets": torch.tensor([0, 2])}, "offsets do not run from 0 to its 3"),
        ({}, {"offsets": torch.tensor([0, 5, 3])}, "offsets do not run"),
        (
            {"per_class": True, "num_classes": 2},
            {"offsets": torch.tensor([0, 5, 3])},
            "offsets do not run",
        ),
        (
            {"per_class": True, "num_classes": 2},
            {"offsets": torch.tensor([0, -1, 3])},
            "offsets do not run",
        ),
        ({"per_class": True}, {}, "holds 3 scores of 1 classes, expected 3 of None"),
        ({"count": 4}, {}, "holds 3 scores of None classes, expected 4"),
        ({"kind": "magic"}, {}, "kind='magic'"),
        ({"kind": ["quantile"]}, {}, "kind="),
        ({"target": "0.9"}, {}, "target='0.9'"),
        ({"target": NAN}, {}, "tpr is nan"),
        ({"target": 7.0}, {}, "tpr is 7.0"),
        ({"kind": "conformal", "target": 0.1}, {}, "takes at least 9"),
    ],
)
def test_a_corrupt_state_is_refused(
    config: dict[str, object], tensors: dict[str, Tensor], message: str
) -> None:
    good = Threshold.quantile(torch.tensor([1.0, 2.0, 3.0]), 0.9)
    with pytest.raises(ValueError, match=message):
        Threshold.from_state(good.to_config() | config, good.state_dict() | tensors)


def test_an_incomplete_state_is_refused() -> None:
    good = Threshold.quantile(torch.tensor([1.0, 2.0, 3.0]), 0.9)
    config = {name: value for name, value in good.to_config().items() if name != "kind"}
    with pytest.raises(ValueError, match="lacks kind, offsets"):
        Threshold.from_state(config, {"calibration": good.calibration})


def test_the_guarantee_is_a_sentence() -> None:
    conformal, by_class = both_forms()
    assert conformal.guarantee.startswith(
        "Flags at most 0.05 of in-distribution samples that are exchangeable"
    )
    assert (
        by_class.guarantee
        == "Accepts at least 0.9 of the 3000 calibration samples of each predicted class."
    )


class Scorer(nn.Module):
    """A module around a threshold, as a guard is."""

    def __init__(self, threshold: Threshold) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores, predicted = logits.max(dim=1)
        return scores, *self.threshold(scores, predicted)


def awkward_logits(n: int = 40) -> Tensor:
    logits = torch.randn(n, 3, generator=torch.Generator().manual_seed(1)) * 2
    logits[0] = -INF
    logits[1] = INF
    logits[2] = NAN
    return logits


@pytest.mark.parametrize("threshold", both_forms())
def test_compiling_in_one_graph_gives_the_same(threshold: Threshold) -> None:
    scorer = Scorer(threshold)
    logits = awkward_logits()
    compiled = torch.compile(scorer, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(scorer(logits), compiled(logits)):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("threshold", both_forms())
def test_compiling_to_native_code_gives_the_same(threshold: Threshold) -> None:
    scorer = Scorer(threshold)
    logits = awkward_logits()
    for ours, theirs in zip(scorer(logits), torch.compile(scorer, fullgraph=True)(logits)):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def check_against_eager(scorer: Scorer, logits: Tensor, exported: tuple[Tensor, ...]) -> None:
    scores, p_values, is_ood = scorer(logits)
    torch.testing.assert_close(exported[0], scores, equal_nan=True)
    torch.testing.assert_close(exported[1], p_values)
    assert torch.equal(exported[2], is_ood)
    if scorer.threshold.kind == "conformal":
        assert torch.equal(exported[1] <= scorer.threshold.target, is_ood)


@pytest.mark.parametrize("threshold", both_forms())
def test_torch_export_keeps_decisions_exact(threshold: Threshold) -> None:
    scorer = Scorer(threshold).eval()
    program = torch.export.export(
        scorer, (awkward_logits(8),), dynamic_shapes=({0: torch.export.Dim("batch")},)
    )
    assert "searchsorted" not in program.graph_module.code
    for n in (3, 40):
        check_against_eager(scorer, awkward_logits(n), program.module()(awkward_logits(n)))


def run_onnx(
    module: nn.Module, example: Tensor, inputs: list[Tensor], path: Path
) -> list[tuple[Tensor, ...]]:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    shapes = ({0: torch.export.Dim("batch")},)
    torch.onnx.export(
        module.eval(), (example,), path, dynamo=True, dynamic_shapes=shapes, verbose=False
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return [
        tuple(map(torch.from_numpy, session.run(None, {name: values.numpy()}))) for values in inputs
    ]


@pytest.mark.parametrize("threshold", both_forms())
def test_onnx_keeps_decisions_exact(threshold: Threshold, tmp_path: Path) -> None:
    scorer = Scorer(threshold)
    inputs = [torch.randn(1, 3), awkward_logits()[:2], torch.randn(200, 3) * 2]
    for logits, outputs in zip(
        inputs, run_onnx(scorer, torch.randn(8, 3), inputs, tmp_path / "threshold.onnx")
    ):
        check_against_eager(scorer, logits, outputs)


class Bare(nn.Module):
    """The threshold alone, without classes."""

    def __init__(self, threshold: Threshold) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return self.threshold(scores)


@pytest.mark.parametrize("count", [pytest.param(600, marks=pytest.mark.slow), 3000])
def test_onnx_fails_closed_and_agrees_at_ties(count: int, tmp_path: Path) -> None:
    threshold = both_forms(count)[0]
    inputs = [
        torch.tensor([-INF, NAN]),
        torch.cat([probes(threshold.calibration[:200]), probes(threshold.value)]),
    ]
    hopeless, close = run_onnx(Bare(threshold), torch.randn(8), inputs, tmp_path / "threshold.onnx")
    assert hopeless[1].all()
    assert hopeless[0].tolist() == pytest.approx([1 / (count + 1)] * 2)
    assert torch.equal(close[1], threshold.is_ood(inputs[1]))
    assert torch.equal(close[1], close[0] <= threshold.target)
    torch.testing.assert_close(close[0], threshold.p_values(inputs[1]), atol=1e-6, rtol=0)


def test_a_state_with_other_counts_is_refused_before_anything_is_made_of_it() -> None:
    threshold = Threshold.quantile(
        torch.arange(40.0), labels=torch.arange(40) // 20, per_class=True
    )
    state = dict(threshold.state_dict())
    state["offsets"] = torch.cat([torch.zeros(3_000_000, dtype=torch.int64), torch.tensor([40])])
    with pytest.raises(ValueError, match="40 scores of 3000000 classes, expected 40 of 2"):
        Threshold.from_state(threshold.to_config(), state)
