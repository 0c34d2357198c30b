"""Distances to decision boundaries against float64 definitions, and exact projections against
optimality conditions."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog, nnls

from fdbd import Head, geometry


def random_head(classes, width, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return Head(
        torch.randn(classes, width, generator=g, dtype=dtype),
        torch.randn(classes, generator=g, dtype=dtype),
    )


def random_features(rows, width, seed=1, dtype=torch.float64):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def boundary_distance(z, weight, bias, k, c):
    """Equation of Theorem 3.2, entry by entry."""
    numerator = bias[k] - bias[c]
    square = 0.0
    for j in range(len(z)):
        numerator += (weight[k][j] - weight[c][j]) * z[j]
        square += (weight[k][j] - weight[c][j]) ** 2
    return numerator / math.sqrt(square) if square else math.inf


def prediction(z, weight, bias):
    logits = [sum(w * x for w, x in zip(row, z)) + b for row, b in zip(weight, bias)]
    return max(range(len(logits)), key=lambda c: (logits[c], -c))


def average_distance(z, weight, bias, k):
    distances = [
        boundary_distance(z, weight, bias, k, c)
        for c in range(len(weight))
        if weight[c] != weight[k]
    ]
    return sum(distances) / len(distances)


heads = st.builds(random_head, st.integers(2, 7), st.integers(1, 6), st.integers(0, 10**6))


# Norms and closed-form distances


@given(heads)
@settings(max_examples=40, deadline=None)
def test_pairwise_norms_are_those_of_the_differences(head):
    norms = geometry.pairwise_norms(head)
    weight = head.weight.tolist()
    for k, c in itertools.product(range(head.num_classes), repeat=2):
        expected = math.sqrt(sum((a - b) ** 2 for a, b in zip(weight[k], weight[c])))
        assert norms[k, c].item() == pytest.approx(expected, rel=1e-11, abs=0)


def test_weights_too_large_for_float64_are_refused():
    head = Head(torch.tensor([[1e200, 0.0], [-1e200, 1.0]], dtype=torch.float64))
    with np.errstate(all="ignore"), pytest.raises(ValueError, match=r"reach 1e\+200, too large"):
        geometry.fold(head)


def test_norms_of_equal_rows_are_exactly_zero_and_of_almost_equal_rows_accurate():
    weight = random_head(6, 50).weight + 1e4
    weight[3] = weight[1]
    weight[4] = weight[2]
    weight[4, 7] += 1e-7
    norms = geometry.pairwise_norms(Head(weight))
    assert norms[1, 3] == norms[3, 1] == 0
    assert norms.diagonal().abs().max() == 0
    torch.testing.assert_close(norms[2, 4], (weight[2] - weight[4]).norm(), rtol=1e-12, atol=0)


@given(heads, st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_distances_follow_the_theorem(head, seed):
    features = random_features(5, head.num_features, seed)
    distances = geometry.distances(features, head)
    tabled = geometry.distances(features, head, norms=geometry.pairwise_norms(head))
    weight = head.weight.tolist()
    bias = head.bias.tolist()
    for i, z in enumerate(features.tolist()):
        k = prediction(z, weight, bias)
        for c in range(head.num_classes):
            if c == k:
                assert distances[i, c].isnan()
                assert tabled[i, c].isnan()
            else:
                expected = boundary_distance(z, weight, bias, k, c)
                assert distances[i, c].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
                assert tabled[i, c].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
                assert distances[i, c] >= 0


def test_no_boundary_lies_between_classes_of_equal_weights():
    head = Head(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([1.0, 0.0, 0.0]))
    distances = geometry.distances(torch.tensor([[2.0, 0.0]]), head)
    assert distances[0, 0].isnan()
    assert distances[0, 1] == torch.inf
    assert torch.isfinite(distances[0, 2])
    value, index = geometry.nearest_boundary(distances)
    assert index.item() == 2
    assert value.item() == pytest.approx(3 / math.sqrt(2))


def test_the_mean_of_the_nearest_counts_only_boundaries_that_exist():
    distances = torch.tensor([[math.nan, 4.0, 1.0, math.inf], [3.0, math.nan, 5.0, 1.0]])
    assert geometry.mean_of_nearest(distances, 1).tolist() == [1, 1]
    assert geometry.mean_of_nearest(distances, 2).tolist() == [2.5, 2]
    assert geometry.mean_of_nearest(distances, 3).tolist() == [2.5, 3]
    assert geometry.mean_of_nearest(distances, 99).tolist() == [2.5, 3]


def test_an_empty_batch_has_no_distances():
    head = random_head(3, 2)
    assert geometry.distances(torch.zeros(0, 2, dtype=torch.float64), head).shape == (0, 3)
    assert geometry.exact_distances(torch.zeros(0, 2), head).shape == (0, 3)


# The folded head


@given(heads, st.sampled_from(["deviation", "norm", None]), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_the_folded_score_is_the_average_over_all_boundaries(head, normalizer, seed):
    features = random_features(6, head.num_features, seed)
    mean = random_features(1, head.num_features, seed + 1)[0]
    predicted = head(features).argmax(dim=1)
    scores = geometry.Folded(head, mean, normalizer).score(features, predicted)
    by_logits = geometry.Folded(head, mean, normalizer).score(features, logits=head(features))
    torch.testing.assert_close(by_logits, scores, rtol=1e-12, atol=1e-14)
    weight = head.weight.tolist()
    bias = head.bias.tolist()
    for z, k, score in zip(features.tolist(), predicted.tolist(), scores.tolist()):
        center = {"deviation": mean.tolist(), "norm": [0.0] * len(z), None: None}[normalizer]
        size = 1.0 if center is None else math.sqrt(sum((a - b) ** 2 for a, b in zip(z, center)))
        assert score == pytest.approx(
            average_distance(z, weight, bias, k) / size, rel=1e-9, abs=1e-12
        )


@pytest.mark.parametrize("block_bytes", [1, 200, 1000])
def test_folding_in_blocks_of_any_size_gives_the_same(monkeypatch, block_bytes):
    head = random_head(23, 7)
    normals, gammas = geometry.fold(head)
    norms = geometry.pairwise_norms(head)
    monkeypatch.setattr(geometry, "_BLOCK_BYTES", block_bytes)
    torch.testing.assert_close(geometry.fold(head)[0], normals, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(geometry.fold(head)[1], gammas, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(geometry.pairwise_norms(head), norms, rtol=1e-13, atol=1e-14)


def test_pairs_of_equal_weights_leave_sum_and_count_whatever_their_biases():
    head = random_head(5, 4)
    head.weight[3] = head.weight[1]
    head.bias[3] = head.bias[1] - 0.5
    head.weight[4] = head.weight[1]
    head.bias[4] = head.bias[1]
    features = random_features(200, 4)
    predicted = head(features).argmax(dim=1)
    assert 1 in predicted
    scores = geometry.Folded(head, torch.zeros(4)).score(features, predicted)
    weight = head.weight.tolist()
    bias = head.bias.tolist()
    for z, k, score in zip(features.tolist(), predicted.tolist(), scores.tolist()):
        expected = average_distance(z, weight, bias, k) / math.sqrt(sum(x * x for x in z))
        assert score == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("scale", [1.0, 1e5])
def test_a_head_of_equal_rows_has_no_boundary_and_says_so(scale):
    row = random_features(1, 30)[0] * scale
    with pytest.raises(
        ValueError, match=r"fewer than two distinct classes \(4 rows of weights, all equal\)"
    ):
        geometry.Folded(Head(row.expand(4, 30), torch.arange(4.0)), row)


def test_the_score_at_the_training_mean_is_finite():
    for dtype in (torch.float32, torch.float64):
        head = random_head(5, 8, dtype=dtype)
        mean = random_features(1, 8, dtype=dtype)
        folded = geometry.Folded(head, mean[0])
        score = folded.score(mean, head(mean).argmax(dim=1))
        assert torch.isfinite(score).all()
        expected = torch.finfo(dtype).eps * max(1.0, mean.norm().item())
        assert folded.floor.item() == pytest.approx(expected, rel=1e-6)


def test_float32_scores_are_right_to_float32_far_from_the_origin():
    # The naive form computes differences of large logits; the folded one subtracts the mean first.
    head = random_head(50, 256, dtype=torch.float32)
    mean = random_features(1, 256, 3, torch.float32)[0] * 100
    features = mean + random_features(400, 256, 4, torch.float32)
    exact_head = Head(head.weight.double(), head.bias.double())
    predicted = exact_head(features.double()).argmax(dim=1)
    exact = geometry.Folded(exact_head, mean.double()).score(features.double(), predicted)
    scores = geometry.Folded(head, mean).score(features, predicted)
    assert ((scores - exact) / exact).abs().max() < 2e-5
    assert ((scores - exact).abs() / exact.abs().mean()).max() < 2e-6


def test_bad_arguments_are_named():
    head = random_head(3, 4)
    with pytest.raises(ValueError, match="'l2', expected 'deviation', 'norm' or None"):
        geometry.Folded(head, torch.zeros(4), "l2")
    with pytest.raises(ValueError, match="needs the mean of the training features"):
        geometry.Folded(head)
    with pytest.raises(ValueError, match=r"mean has shape \(5,\), expected \(4,\)"):
        geometry.Folded(head, torch.zeros(5))
    folded = geometry.Folded(head, torch.zeros(4))
    with pytest.raises(ValueError, match=r"features have shape \(2, 5\), expected \(2, 4\)"):
        folded.score(torch.zeros(2, 5, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(IndexError):
        folded.score(torch.zeros(2, 4, dtype=torch.float64), torch.tensor([0, 3]))


# The exact projection


def enumerated_distance(z, weight, bias, c):
    """The smallest ‖y‖ for which class c wins at z + y; infinity if there is none. Class c wins if
    rows @ y ≥ needs. Of these constraints, every set is tried as the one that holds with
    equality."""
    others = [j for j in range(len(weight)) if j != c]
    rows = weight[c] - weight[others]
    needs = (weight[others] - weight[c]) @ z + bias[others] - bias[c]
    best = math.inf
    for size in range(len(others) + 1):
        for subset in itertools.combinations(range(len(others)), size):
            active = list(subset)
            step = np.zeros_like(z)
            if active:
                # The smallest step with rows[active] @ step = needs[active].
                step = np.linalg.pinv(rows[active]) @ needs[active]
            if (rows @ step >= needs - 1e-9 * (1 + np.abs(needs))).all():
                best = min(best, float(np.linalg.norm(step)))
    return best


@given(st.integers(2, 6), st.integers(1, 5), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_exact_distances_are_those_of_the_best_active_set(classes, width, seed):
    head = random_head(classes, width, seed)
    features = random_features(3, width, seed + 1)
    exact = geometry.exact_distances(features, head)
    closed = geometry.distances(features, head)
    weight = head.weight.numpy()
    bias = head.bias.numpy()
    for i, k in enumerate(head(features).argmax(dim=1).tolist()):
        for c in range(classes):
            if c == k:
                assert exact[i, c].isnan()
                continue
            expected = enumerated_distance(features[i].numpy(), weight, bias, c)
            assert exact[i, c].item() == pytest.approx(expected, rel=1e-7, abs=1e-9)
            assert exact[i, c] >= closed[i, c]
    value, index = geometry.nearest_boundary(closed)
    torch.testing.assert_close(exact.gather(1, index[:, None])[:, 0], value, rtol=1e-9, atol=1e-12)


def optimal_step(rows, needs):
    """(step, multipliers) of: minimise |y|²/2 subject to rows @ y ≥ needs, by the dual problem of
    Lawson and Hanson."""
    width = rows.shape[1]
    dual, _ = nnls(np.vstack([rows.T, needs]), np.eye(width + 1)[width])
    residual = np.vstack([rows.T, needs]) @ dual - np.eye(width + 1)[width]
    return -residual[:width] / residual[width], -dual / residual[width]


@pytest.mark.parametrize("seed", range(4))
def test_exact_distances_meet_the_conditions_of_optimality(seed):
    head = random_head(9, 6, seed)
    z = random_features(1, 6, seed + 50)
    exact = geometry.exact_distances(z, head)[0]
    weight = head.weight.numpy()
    bias = head.bias.numpy()
    point = z[0].numpy()
    k = int(head(z).argmax())
    for c in set(range(9)) - {k}:
        others = [j for j in range(9) if j != c]
        rows = weight[c] - weight[others]
        needs = (weight[others] - weight[c]) @ point + bias[others] - bias[c]
        # Feasibility first: a class that is never predicted has no solution.
        if linprog(np.zeros(6), A_ub=-rows, b_ub=-needs, bounds=(None, None)).status == 2:
            assert exact[c] == math.inf
            continue
        # However the step was found, these four conditions prove that it is the shortest (Karush,
        # Kuhn and Tucker).
        step, multipliers = optimal_step(rows, needs)
        slack = rows @ step - needs
        scale = np.abs(needs).max()
        assert (slack >= -1e-9 * scale).all()
        assert (multipliers >= 0).all()
        np.testing.assert_allclose(rows.T @ multipliers, step, atol=1e-9 * scale)
        assert multipliers @ np.abs(slack) <= 1e-9 * scale * multipliers.sum()
        assert exact[c].item() == pytest.approx(np.linalg.norm(step), rel=1e-8)


def test_a_class_that_is_never_predicted_is_infinitely_far():
    head = random_head(6, 4, 3)
    head.weight[5] = (head.weight[0] + head.weight[1]) / 2
    # Its logit lies 1 below the mean of two others, everywhere.
    head.bias[5] = (head.bias[0] + head.bias[1]) / 2 - 1
    features = random_features(30, 4)
    exact = geometry.exact_distances(features, head)
    closed = geometry.distances(features, head)
    assert (exact[:, 5] == math.inf).all()
    assert torch.isfinite(closed[:, 5]).all()
    others = exact[:, :5]
    assert torch.isfinite(others[~others.isnan()]).all()


def test_duplicated_classes_share_a_region_or_have_none():
    head = random_head(5, 4, 8)
    features = random_features(60, 4)
    alone = geometry.exact_distances(features, Head(head.weight[:4], head.bias[:4]))
    # A twin: the same region.
    head.weight[4] = head.weight[2]
    head.bias[4] = head.bias[2]
    both = geometry.exact_distances(features, head)
    predicted = head(features).argmax(dim=1)
    # Rounding may let either of the two win.
    rows = (predicted != 2) & (predicted != 4)
    torch.testing.assert_close(both[rows, 4], both[rows, 2])
    torch.testing.assert_close(both[rows, :4], alone[rows], equal_nan=True)
    between_twins = both[~rows][:, [2, 4]]
    # No boundary to one's own twin.
    assert (between_twins.isnan() | between_twins.isinf()).all()
    # Always just below its twin: never predicted.
    head.bias[4] -= 1e-3
    assert (geometry.exact_distances(features, head)[:, 4] == math.inf).all()


@given(st.integers(0, 10**6), st.sampled_from([1e-6, 1e-2, 1e4]), st.sampled_from([1e-3, 1.0, 1e3]))
@settings(max_examples=25, deadline=None)
def test_exact_distances_do_not_depend_on_the_units_of_the_logits(seed, scale, shift):
    head = random_head(6, 5, seed)
    features = random_features(4, 5, seed + 1)
    exact = geometry.exact_distances(features, head)
    assume(not (exact > 1e5).logical_and(exact < math.inf).any())
    # Added to every row: no difference changes.
    common = random_features(1, 5, seed + 2)[0] * shift
    moved = Head((head.weight + common) * scale, head.bias * scale)
    torch.testing.assert_close(
        geometry.exact_distances(features, moved), exact, rtol=1e-6, atol=1e-8, equal_nan=True
    )


def test_a_sample_on_a_boundary_is_at_distance_zero_of_it():
    head = Head(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]), torch.zeros(3))
    exact = geometry.exact_distances(torch.tensor([[1.0, 1.0]]), head)
    assert exact[0, 1] == 0
    assert exact[0, 2].item() == pytest.approx(math.sqrt(2))


def test_exact_distances_take_float32_features_and_many_classes():
    head = random_head(40, 12, dtype=torch.float32)
    features = random_features(20, 12, dtype=torch.float32)
    exact = geometry.exact_distances(features, head)
    closed = geometry.distances(features.double(), Head(head.weight.double(), head.bias.double()))
    assert exact.dtype == torch.float64
    finite = ~closed.isnan()
    assert (exact[finite] >= closed[finite]).all()
    moved = exact[finite] / closed[finite]
    assert moved.min() == 1
    # The closed form is a bound, not the distance.
    assert moved.max() > 1.01


def test_squared_distances_are_those_of_the_differences():
    rows = random_features(7, 5)
    points = random_features(4, 5, 2)
    expected = (rows[:, None] - points).square().sum(dim=2)
    torch.testing.assert_close(geometry.squared_distances(rows, points), expected)
    torch.testing.assert_close(
        geometry.squared_distances(rows, points, points.square().sum(dim=1)), expected
    )
    assert (geometry.squared_distances(rows, rows).diagonal() >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_half_precision_and_integers_are_scored_in_the_heads_dtype(dtype):
    head = Head(torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), torch.randn(5))
    features = (3 * torch.randn(9, 7, generator=torch.Generator().manual_seed(1))).to(dtype)
    folded = geometry.Folded(head, torch.zeros(7))
    logits = head(features)
    expected = folded.score(features.float(), head(features.float()).argmax(dim=1))
    # A few rows with logits are added up in another order than rows with predicted classes.
    by_class = folded.score(features, head(features.float()).argmax(dim=1))
    by_logits = folded.score(features, logits=head(features.float()))
    assert by_class.dtype == by_logits.dtype == expected.dtype
    torch.testing.assert_close(by_class, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(by_logits, expected, rtol=1e-5, atol=1e-6)
    if dtype == torch.int64:
        assert torch.equal(logits, head(features.float()))
