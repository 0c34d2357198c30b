"""The scores of a few rows in numpy are those of the definition, or none at all."""

import copy
import pickle

import pytest
import torch

from fdbd import FDBD, Batch, Head, kernels
from fdbd.kernels.dispatch import plain_score


def problem(rows, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    normals = torch.randn(7, 20, generator=generator, dtype=dtype)
    offsets = torch.randn(7, generator=generator, dtype=dtype)
    center = torch.randn(20, generator=generator, dtype=dtype)
    floor = torch.tensor(1e-6, dtype=dtype)
    features = torch.randn(rows, 20, generator=generator, dtype=dtype)
    logits = torch.randn(rows, 7, generator=generator, dtype=dtype)
    return features, logits, (normals, offsets, center, floor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("divide", [True, False])
def test_few_rows_score_as_defined(rows, dtype, divide):
    features, logits, folded = problem(rows, dtype)
    expected = plain_score(features, logits.argmax(dim=1), folded, divide)
    scores = kernels.FewRows().score(features, logits, folded, divide)
    assert scores.dtype is dtype
    torch.testing.assert_close(scores, expected)


def test_a_row_at_the_center_is_divided_by_the_floor():
    _, logits, folded = problem(1)
    center = folded[2]
    scores = kernels.FewRows().score(center[None], logits, folded, True)
    expected = plain_score(center[None], logits.argmax(dim=1), folded, True)
    torch.testing.assert_close(scores, expected)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_rows_that_cannot_be_trusted_are_left_to_the_checks_without_a_warning(rows, part, bad):
    given = problem(rows)
    given[part][-1, 3] = bad
    assert kernels.FewRows().score(*given, True) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", ["features", "logits"])
def test_a_detector_closes_on_one_row_with_a_number_that_is_not_finite(part, bad):
    torch.manual_seed(0)
    head = Head(torch.randn(7, 20))
    detector = FDBD().fit(Batch(torch.randn(50, 20)), head)
    features = torch.randn(1, 20)
    logits = head(features)
    {"features": features, "logits": logits}[part][0, 2] = bad
    assert detector.score(Batch(features, logits)).tolist() == [-float("inf")]


def test_changes_of_the_heads_numbers_are_seen():
    features, logits, folded = problem(1)
    few = kernels.FewRows()
    first = few.score(features, logits, folded, True)
    for tensor in folded[:3]:
        tensor.mul_(3)
    expected = plain_score(features, logits.argmax(dim=1), folded, True)
    assert not torch.equal(first, expected)
    torch.testing.assert_close(few.score(features, logits, folded, True), expected)
    for tensor in folded:
        tensor.share_memory_()
    folded[2].add_(1)
    expected = plain_score(features, logits.argmax(dim=1), folded, True)
    torch.testing.assert_close(few.score(features, logits, folded, True), expected)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_of_a_detector_score_with_numbers_of_their_own(again):
    torch.manual_seed(0)
    detector = FDBD().fit(Batch(torch.randn(50, 4)), Head(torch.randn(3, 4)))
    batch = Batch(torch.randn(1, 4), torch.randn(1, 3))
    before = detector.score(batch)
    other = again(detector)
    other.offsets += 1
    assert torch.equal(detector.score(batch), before)
    assert not torch.equal(other.score(batch), before)


def test_shapes_dtypes_and_gradients_that_numpy_cannot_take_are_left_to_torch():
    features, logits, folded = problem(2)
    few = kernels.FewRows()
    assert few.score(features[:, :-1], logits, folded, True) is None
    assert few.score(features, logits[:1], folded, True) is None
    assert few.score(features.double(), logits.double(), folded, True) is None
    assert few.score(features.clone().requires_grad_(), logits, folded, True) is None
    assert few.score(features[:0], logits[:0], folded, True) is None
    assert few.score(features.to("meta"), logits, folded, True) is None


def test_a_subclass_with_a_formula_of_its_own_is_asked_for_one_row_too():
    class Negated(FDBD):
        def formula(self, batch):
            return -super().formula(batch)

    torch.manual_seed(0)
    data = Batch(torch.randn(50, 4))
    head = Head(torch.randn(3, 4))
    row = Batch(torch.randn(1, 4), torch.randn(1, 3))
    assert torch.equal(Negated().fit(data, head).score(row), -FDBD().fit(data, head).score(row))
