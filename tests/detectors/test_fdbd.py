"""fDBD against a loop-by-loop float64 definition and a peer, and everything odd that a batch may
hold."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdbd import FDBD, Batch, Deviation, Head
from fdbd.detectors import NotFittedError

NORMALIZERS = ["deviation", "norm", None]


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def random_head(classes=6, width=9, seed=0, dtype=torch.float32):
    return Head(
        random(classes, width, seed=seed, dtype=dtype), random(classes, seed=seed + 1, dtype=dtype)
    )


def fitted(detector=None, classes=6, width=9, dtype=torch.float32, seed=0):
    head = random_head(classes, width, seed, dtype)
    training = random(50, width, seed=seed + 2, dtype=dtype) + 0.3
    if detector is None:
        detector = FDBD()
    return detector.fit(Batch(training), head)


def defined(z, weight, bias, mean, normalizer, nearest=None):
    """The score of one sample from the paper's formulas, in Python floats."""
    classes = range(len(weight))
    logits = []
    for c in classes:
        logits.append(sum(w * x for w, x in zip(weight[c], z)) + bias[c])
    k = max(classes, key=lambda c: logits[c])
    distances = []
    for c in classes:
        norm = math.sqrt(sum((a - b) ** 2 for a, b in zip(weight[k], weight[c])))
        if norm > 0:
            distances.append((logits[k] - logits[c]) / norm)
    distances = sorted(distances)[:nearest]
    size = 1.0
    if normalizer == "deviation":
        size = math.dist(z, mean)
    elif normalizer == "norm":
        size = math.hypot(*z)
    return sum(distances) / len(distances) / size


def reference(detector, training, features, head):
    mean = [math.fsum(column) / len(training) for column in training.double().T.tolist()]
    weight = head.weight.double().tolist()
    bias = head.bias.double().tolist()
    return torch.tensor(
        [
            defined(z, weight, bias, mean, detector.normalizer, detector.nearest)
            for z in features.double().tolist()
        ],
        dtype=torch.float64,
    )


@given(
    classes=st.integers(2, 9),
    width=st.integers(1, 12),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    normalizer=st.sampled_from(NORMALIZERS),
    nearest=st.sampled_from([None, 1, 2, 5, 100]),
    logits_given=st.booleans(),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=120, deadline=None)
def test_scores_are_those_of_the_definition(
    classes, width, dtype, normalizer, nearest, logits_given, seed
):
    head = random_head(classes, width, seed, dtype)
    training = random(30, width, seed=seed + 2, dtype=dtype)
    features = random(8, width, seed=seed + 3, dtype=dtype)
    detector = FDBD(normalizer, nearest).fit(Batch(training), head)
    logits = head(features) if logits_given else None
    scores = detector.score(Batch(features, logits))
    expected = reference(detector, training, features, head)
    assert scores.dtype == dtype
    # An average of distances may be much smaller than the terms of its logits: compare on the scale
    # of those terms.
    scale = features.double().norm(dim=1) + 1
    if normalizer is not None:
        scale = scale / 0.3
    tolerance = 3e-5 if dtype == torch.float32 else 1e-12
    assert ((scores - expected).abs() <= tolerance * scale).all()


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_float32_scores_of_a_realistic_head_are_right_to_one_in_a_million(normalizer):
    head = Head(random(100, 512) / 22, random(100, seed=1) / 10)
    training = random(400, 512, seed=2).relu()
    features = random(300, 512, seed=3).relu() + head.weight[torch.arange(300) % 100] * 3
    exact = FDBD(normalizer).fit(Batch(training), head).score(Batch(features))
    single = FDBD(normalizer).fit(
        Batch(training.float()), Head(head.weight.float(), head.bias.float())
    )
    assert ((single.score(Batch(features.float())) - exact) / exact).abs().max() < 2e-6


@pytest.mark.parametrize(("classes", "width"), [(2, 3), (10, 64), (50, 20)])
def test_scores_agree_with_pytorch_ood(classes, width):
    peer_class = pytest.importorskip("pytorch_ood").detector.fDBD
    head = random_head(classes, width)
    linear = torch.nn.Linear(width, classes)
    with torch.no_grad():
        linear.weight.copy_(head.weight)
        linear.bias.copy_(head.bias)
    training = random(200, width, seed=5, dtype=torch.float32)
    features = random(300, width, seed=6, dtype=torch.float32)
    peer = peer_class(torch.nn.Identity(), linear).fit_features(training)
    scores = FDBD().fit(Batch(training), head).score(Batch(features))
    # Theirs rises with strangeness, ours falls; both are float32.
    torch.testing.assert_close(scores, -peer.predict_features(features), rtol=1e-5, atol=1e-5)


# Fitting


def test_float32_training_data_are_averaged_in_float64():
    training = (random(100_000, 2, seed=3) + 1000).float()
    detector = FDBD().fit([Batch(part) for part in training.split(333)], random_head(3, 2))
    assert torch.equal(detector.center, training.double().mean(dim=0).float())


def test_float64_data_or_head_make_a_float64_detector():
    head = random_head()
    training = random(20, 9)
    assert FDBD().fit(Batch(training), head).center.dtype == torch.float64
    assert FDBD().fit(Batch(training.float()), head).center.dtype == torch.float32
    assert FDBD().fit(Batch(training.half()), head).center.dtype == torch.float32
    assert (
        FDBD().fit(Batch(training.float()), random_head(dtype=torch.float64)).center.dtype
        == torch.float64
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalizer": "l2"}, "'l2', expected 'deviation', 'norm' or None"),
        ({"nearest": 0}, "nearest is 0, expected a number of distances"),
        ({"nearest": 2.5}, "nearest is 2.5"),
        ({"nearest": True}, "nearest is True"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FDBD(**options)


def test_scoring_before_fitting_says_what_to_do():
    with pytest.raises(NotFittedError, match=r"FDBD is not fitted: call fit\(batches, head\)"):
        FDBD().score(Batch(torch.zeros(1, 3)))


# Edge cases


def test_classes_of_equal_weights_have_no_boundary_between_them():
    head = random_head(dtype=torch.float64)
    # Equal rows, equal biases.
    head.weight[4] = head.weight[1]
    head.bias[4] = head.bias[1]
    # Equal rows, different biases.
    head.weight[5] = head.weight[2]
    training = random(40, 9, seed=3)
    features = random(200, 9, seed=4)
    for nearest in (None, 3):
        detector = FDBD(nearest=nearest).fit(Batch(training), head)
        torch.testing.assert_close(
            detector.score(Batch(features)),
            reference(detector, training, features, head),
            rtol=1e-9,
            atol=1e-12,
        )


def test_fewer_than_two_distinct_classes_are_an_error():
    with pytest.raises(ValueError, match="fewer than two distinct classes"):
        FDBD().fit(Batch(random(5, 3)), Head(torch.ones(4, 3), torch.arange(4.0)))


def test_a_binary_head_of_one_row_is_scored_as_two_classes():
    row = random(1, 9)
    training = random(30, 9, seed=1)
    features = random(20, 9, seed=2)
    one = FDBD().fit(Batch(training), Head(row, torch.ones(1))).score(Batch(features))
    two = FDBD().fit(
        Batch(training), Head(torch.cat([-row / 2, row / 2]), torch.tensor([-0.5, 0.5]))
    )
    torch.testing.assert_close(one, two.score(Batch(features)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("nearest", [None, 2])
def test_the_training_mean_itself_has_a_finite_score(dtype, nearest):
    detector = fitted(FDBD(nearest=nearest), dtype=dtype)
    score = detector.score(Batch(detector.center[None]))
    assert torch.isfinite(score).all()
    # As far inside as can be.
    assert score > 1e3


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("nearest", [None, 2])
@pytest.mark.parametrize("huge", [1e16, 1e25, 3e38])
def test_features_too_large_for_float32_score_as_in_float64(normalizer, nearest, huge):
    detector = fitted(FDBD(normalizer, nearest))
    exact = copy.deepcopy(detector).double()
    features = random(6, 9, seed=8, dtype=torch.float32)
    features[2] *= huge / features[2].abs().max()
    features[4, 3] = -huge
    scores = detector.score(Batch(features))
    expected = exact.score(Batch(features.double())).clamp(max=torch.finfo(torch.float32).max)
    assert torch.isfinite(scores).all()
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-5)


def test_float64_features_beyond_float32_are_scored_by_a_float32_detector():
    detector = fitted()
    features = random(3, 9, seed=8)
    features[1] *= 1e60
    scores = detector.score(Batch(features))
    expected = copy.deepcopy(detector).double().score(Batch(features))
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_detector_moved_to_half_precision_keeps_what_it_learnt(dtype):
    detector = fitted()
    features = random(10, 9, seed=8, dtype=torch.float32)
    expected = detector.score(Batch(features))
    assert torch.equal(detector.to(dtype).score(Batch(features)), expected)


def test_wrong_shapes_are_named_on_both_sides():
    detector = fitted()
    with pytest.raises(
        ValueError, match=r"features have shape \(2, 8\), expected \(N, 9\): the head's input"
    ):
        detector.score(Batch(torch.zeros(2, 8)))
    with pytest.raises(ValueError, match=r"features have shape \(9,\), expected \(N, 9\)"):
        detector.score(Batch(torch.zeros(9)))
    with pytest.raises(
        ValueError, match=r"logits have shape \(2, 7\), expected \(N, 6\): the head's classes"
    ):
        detector.score(Batch(torch.zeros(2, 9), torch.zeros(2, 7)))
    with pytest.raises(ValueError, match="2 rows of features but 3 rows of logits"):
        detector.score(Batch(torch.zeros(2, 9), torch.zeros(3, 6)))
    with pytest.raises(TypeError, match="features are complex"):
        detector.score(Batch(torch.zeros(2, 9, dtype=torch.complex64)))


def test_integers_arrays_and_strided_tensors_are_scored_like_floats():
    detector = fitted()
    whole = torch.randint(-5, 5, (12, 9), generator=torch.Generator().manual_seed(0))
    expected = detector.score(Batch(whole.float()))
    strided = torch.zeros(9, 24)
    strided[:, ::2] = whole.T.float()
    for features in (
        whole,
        whole.to(torch.int8),
        whole.numpy(),
        whole.float().numpy(),
        strided[:, ::2].T,
    ):
        torch.testing.assert_close(detector.score(Batch(features)), expected)
    logits = detector.head(whole.float())
    strided_logits = logits.T.contiguous().T
    torch.testing.assert_close(detector.score(Batch(whole.float(), strided_logits)), expected)


def test_eight_threads_score_at_once_without_disturbing_each_other():
    detector = fitted(width=64, classes=20)
    batches = [Batch(random(3000, 64, seed=i, dtype=torch.float32)) for i in range(8)]
    for i, batch in enumerate(batches):
        batch.features[i] = math.nan
    expected = [detector.score(batch) for batch in batches]
    with ThreadPoolExecutor(8) as pool:
        for i, scores in zip(list(range(8)) * 8, pool.map(detector.score, batches * 8)):
            assert torch.equal(scores, expected[i])
            assert scores[i] == -math.inf


# Compiling, exporting, keeping


class Scorer(torch.nn.Module):
    def __init__(self, detector):
        super().__init__()
        self.detector = detector

    def forward(self, features):
        return self.detector(Batch(features))


@pytest.mark.parametrize("nearest", [None, 2])
def test_compiled_and_exported_detectors_give_the_same_scores(nearest):
    detector = fitted(FDBD(nearest=nearest))
    features = random(5, 9, dtype=torch.float32)
    features[1, 1] = math.nan
    expected = detector.score(Batch(features))
    torch._dynamo.reset()
    compiled = torch.compile(detector, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(Batch(features)), expected)
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(
        Scorer(detector), (features,), dynamic_shapes={"features": {0: rows}}
    )
    torch.testing.assert_close(program.module()(features), expected)
    torch.testing.assert_close(program.module()(features[2:]), expected[2:])


def test_the_deviation_is_the_distance_from_the_mean():
    training = random(40, 9, seed=1)
    features = random(10, 9, seed=2)
    scores = (
        Deviation().fit(Batch(training), random_head(dtype=torch.float64)).score(Batch(features))
    )
    mean = training.numpy().mean(axis=0)
    expected = [math.sqrt(sum((x - m) ** 2 for x, m in zip(z, mean))) for z in features.numpy()]
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-12)
