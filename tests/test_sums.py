"""Sums by kernels, softmax's and those of training statistics, against loops and torch in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fdbd
from fdbd import Batch, Head, kernels, linalg
from fdbd.detectors.exponentials import SoftmaxDetector, softmax_sums
from fdbd.kernels import blas
from fdbd.kernels.counting import multilinear
from fdbd.kernels.moments import add_by_class, products
from fdbd.kernels.selection import Largest
from fdbd.statistics import Bank, Moments

DTYPES = [torch.float32, torch.float64]
for one in DTYPES:
    kernels.warm_up(one)
SOFTMAX = ["msp", "maxlogit", "energy", "entropy", "tempscale"]


def random(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


# ── softmax ────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    rows=st.integers(0, 20),
    classes=st.sampled_from([1, 2, 3, 10, 31, 32, 33, 100, 1000]),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4, 1e30]),
    temperature=st.sampled_from([0.02, 1.0, 1000.0]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=200, deadline=None)
def test_softmax_sums_are_those_of_exact_exponentials(rows, classes, dtype, spread, temperature, seed):
    logits = random(rows, classes, seed=seed, scale=spread, dtype=dtype)
    found, is_clean = kernels.softmax_sums(logits, temperature)
    exact = logits.double()
    gaps = (exact - exact.amax(dim=1, keepdim=True)) / temperature
    powers = gaps.exp()
    assert is_clean
    assert torch.equal(found[0], logits.amax(dim=1))
    # Rounding the exponent s to a float changes e^s by |s|·eps: no more than a few times that, summed, is lost.
    eps = 8 * torch.finfo(dtype).eps
    lost = (powers * (1 - gaps)).sum(dim=1) * eps
    floor = 1e-35 if dtype == torch.float32 else 1e-300  # of exponentials that would underflow
    assert ((found[1] - powers.sum(dim=1)).abs() <= lost + classes * floor).all()
    assert ((found[2] - (powers * gaps).sum(dim=1)).abs() <= (powers * (1 - gaps) ** 2).sum(dim=1) * eps + 1e-30).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("classes", [1, 9, 15, 16, 17, 32, 100])
def test_one_bad_logit_spoils_its_row_and_no_other(classes, bad, dtype):
    clean = random(7, classes, dtype=dtype)
    expected, _ = kernels.softmax_sums(clean, 1.0)
    for column in {0, classes // 2, classes - 1}:
        logits = clean.clone()
        logits[3, column] = bad
        for largest_alone in (False, True):
            found, is_clean = kernels.softmax_sums(logits, 1.0, largest_alone)
            assert not is_clean
            rows = [0, 1, 2, 4, 5, 6]
            for part, right in zip(found, [expected[0]] * 3 if largest_alone else expected):
                assert part[3].isnan()
                assert torch.equal(part[rows], right[rows])


def test_large_inputs_are_shared_by_threads_without_changing_a_digit():
    logits = random(3001, 100, dtype=torch.float32)
    together, _ = kernels.softmax_sums(logits, 1.0)
    apart = zip(*(kernels.softmax_sums(part, 1.0)[0] for part in logits.split(100)))
    strided, _ = kernels.softmax_sums(logits.t().contiguous().t(), 1.0)
    for one, parts, other in zip(together, apart, strided):
        assert torch.equal(one, torch.cat(parts))
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", SOFTMAX)
@pytest.mark.parametrize("classes", [2, 10, 100])
def test_the_kernel_and_torch_give_the_same_scores(name, classes, monkeypatch):
    head = Head(random(classes, 6, dtype=torch.float32))
    train = Batch(random(50, 6, seed=1, dtype=torch.float32), None, torch.arange(50) % classes)
    detector = fdbd.create(name).fit(train, head)
    assert isinstance(detector, SoftmaxDetector)
    logits = random(40, classes, seed=2, scale=4, dtype=torch.float32)
    logits[5, 1] = math.nan
    logits[6, 0] = math.inf
    batch = Batch(random(40, 6, dtype=torch.float32), logits)
    by_kernel = detector.score(batch)
    with_gradient = detector.score(batch._replace(logits=logits.clone().requires_grad_()))
    torch.testing.assert_close(by_kernel, with_gradient.detach(), rtol=1e-5, atol=1e-6)
    assert by_kernel[5] == by_kernel[6] == -math.inf
    monkeypatch.setattr(kernels, "softmax_sums", lambda *_: None)
    torch.testing.assert_close(detector.score(batch), by_kernel, rtol=1e-5, atol=1e-6)
    assert detector.score(Batch(torch.zeros(0, 6), torch.zeros(0, classes))).shape == (0,)


def test_torchs_sums_are_those_of_the_kernel():
    logits = random(30, 40, scale=5)
    found, _ = kernels.softmax_sums(logits, 3.0)
    for one, other in zip(softmax_sums(logits, 3.0), found):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


# ── statistics ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 11])
def test_products_about_a_pivot_equal_a_loop(rows, dtype):
    values, pivot = random(rows, 3, dtype=dtype), random(3, seed=1)
    total, squares = products(values, pivot, elements=12)
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for row in values.double():
        expected += torch.outer(row - pivot, row - pivot)
    torch.testing.assert_close(squares, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(total, (values.double() - pivot).sum(dim=0), rtol=1e-12, atol=1e-12)


def test_moments_keep_their_digits_where_the_mean_is_huge_and_an_outlier_comes_first():
    around = random(500, 4) + 1e7
    for rows in (around, torch.cat([torch.zeros(1, 4, dtype=torch.float64), around])):
        moments = Moments(4)
        for part in rows.split(37):
            moments.update(Batch(part))
        exact = np.cov(rows.numpy().astype(np.longdouble).T.astype(np.float64), bias=True)
        np.testing.assert_allclose(moments.covariance().numpy(), exact, rtol=1e-7, atol=1e-7 * exact.max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_by_class_equal_a_loop(dtype):
    values, classes = random(20, 3, dtype=dtype), torch.arange(20) % 4
    totals = torch.ones(5, 3, dtype=torch.float64)
    add_by_class(totals, classes, values)
    for c in range(5):
        torch.testing.assert_close(totals[c], 1 + values[classes == c].double().sum(dim=0), rtol=1e-12, atol=1e-12)


def test_hashes_are_sums_modulo_two_to_the_64():
    bits = torch.randint(-(2**31), 2**31 - 1, (9, 5), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    keys = torch.randint(-(2**62), 2**62, (5,), generator=torch.Generator().manual_seed(1))
    for row, found in zip(bits.tolist(), multilinear(bits, keys).tolist()):
        assert (sum(b * k for b, k in zip(row, keys.tolist())) - found) % 2**64 == 0


def test_a_bank_borrows_a_batch_that_stays_and_copies_one_that_may_change():
    rows = random(10, 3)
    kept, borrowed = Bank(), Bank()
    borrowed.may_borrow = True
    for bank in (kept, borrowed):
        bank.update(Batch(rows))
    assert borrowed.rows[0].data_ptr() == rows.data_ptr()
    before = rows.clone()
    rows += 1
    assert torch.equal(kept.rows[0], before)

    def loader():
        shared = torch.zeros(10, 3)
        for seed in range(2):
            shared.copy_(random(10, 3, seed=seed))
            yield Batch(shared)

    apart = [Batch(random(10, 3, seed=seed, dtype=torch.float32)) for seed in range(2)]
    head = Head(torch.eye(3))
    query = Batch(random(5, 3, seed=5, dtype=torch.float32))
    one, other = (fdbd.KNN(3).fit(data, head).score(query) for data in (loader(), apart))
    assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 50, 1000, 10_000])
@pytest.mark.parametrize(("width", "k"), [(1, 1), (64, 64), (647, 40), (5000, 1), (5003, 7), (5003, 300)])
def test_the_largest_of_rows_are_torchs(width, k, block, dtype):
    values = random(9, width, dtype=dtype)
    values[3] = values[3].round()  # ties
    values[4] = 0
    values[5, 0] = math.nan
    values[6] = torch.arange(width)  # each is a new largest
    values[7, :] = -math.inf
    largest = Largest(9, k, dtype)
    for start in range(0, width, block):
        largest.add(values[:, start : start + block].contiguous(), start)
    found, columns = largest.result()
    assert torch.equal(values.gather(1, columns)[:5], found[:5])
    rows = [0, 1, 2, 3, 4, 6, 7, 8]
    assert all(len(set(row.tolist())) == k for row in columns[rows])
    expected = values[rows].topk(k, dim=1).values
    assert torch.equal(found[rows].sort(dim=1, descending=True).values, expected)


@pytest.mark.parametrize("by_numpy", [False, True])
def test_neighbours_are_the_same_whichever_library_multiplies(by_numpy, monkeypatch):
    monkeypatch.setattr(blas, "numpy_is_faster", lambda: by_numpy)
    rows, points = random(6, 5), random(3000, 5, seed=1)
    values, columns = linalg.largest_products(rows, points, 4)
    exact = (rows @ points.T).topk(4, dim=1)
    torch.testing.assert_close(values.sort(dim=1, descending=True).values, exact.values)
    assert torch.equal(columns.sort(dim=1).values, exact.indices.sort(dim=1).values)


@pytest.mark.parametrize("by_numpy", [False, True])
def test_either_library_multiplies(by_numpy, monkeypatch):
    monkeypatch.setattr(blas, "numpy_is_faster", lambda: by_numpy)
    rows, points = random(5, 3, dtype=torch.float32), random(7, 3, seed=1, dtype=torch.float32)
    out = torch.empty(5, 7)
    torch.testing.assert_close(blas.product(rows, points, out), rows @ points.T)
    torch.testing.assert_close(out, rows @ points.T)


# ── logits ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    rows=st.integers(0, 20),
    width=st.integers(1, 70),
    classes=st.sampled_from([1, 2, 3, 4, 5, 10, 16, 17, 40]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=100, deadline=None)
def test_a_heads_product_is_the_matrix_product(rows, width, classes, dtype, seed):
    features, weight = random(rows, width, seed=seed, dtype=dtype), random(classes, width, seed=seed + 1, dtype=dtype)
    bias = random(classes, seed=seed + 2, dtype=dtype)
    expected = features.double() @ weight.double().T + bias.double()
    size = features.double().abs() @ weight.double().abs().T + bias.double().abs()
    found = kernels.linear(features, weight, bias)
    assert found.dtype == dtype
    assert ((found - expected).abs() <= 4 * torch.finfo(dtype).eps * size).all()


def test_a_heads_product_has_gradients_and_refuses_other_widths():
    features, weight, bias = random(3, 4), random(2, 4, seed=1).requires_grad_(), random(2, seed=2)
    kernels.linear(features, weight, bias).sum().backward()
    torch.testing.assert_close(weight.grad, features.sum(dim=0).expand(2, 4))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        kernels.linear(random(3, 5), weight.detach(), bias)
    with pytest.raises(RuntimeError, match="size"):
        kernels.linear(features, weight.detach(), random(3))


@pytest.mark.parametrize("shape", [(50, 1000), (500, 17), (700, 3), (70, 3000)])
@pytest.mark.parametrize("largest_alone", [False, True])
def test_a_bad_logit_is_found_wherever_it_is(shape, largest_alone):
    clean = random(*shape, dtype=torch.float32)
    expected, is_clean = kernels.softmax_sums(clean, 1.0, largest_alone)
    assert is_clean
    for row in {0, 1, shape[0] // 2, shape[0] - 1}:
        logits = clean.clone()
        logits[row, shape[1] // 2] = math.nan
        found, is_clean = kernels.softmax_sums(logits, 1.0, largest_alone)
        assert not is_clean
        others = torch.arange(shape[0]) != row
        for part, right in zip(found, expected):
            assert part[row].isnan()
            assert torch.equal(part[others], right[others])
