"""Sums by kernels, softmax's and those of training statistics, against loops and torch in float64."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info

import fdbd
from fdbd import Batch, Head, kernels
from fdbd.core import linear_algebra as linalg
from fdbd.detectors.exponentials import SoftmaxDetector, softmax_sums
from fdbd.fitting.statistics import Bank, Moments
from fdbd.kernels import blas, moments
from fdbd.kernels.counting import multilinear
from fdbd.kernels.moments import add_by_class, products
from fdbd.kernels.placing import place_rows
from fdbd.kernels.selection import Largest

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
    for row, found in zip(bits.tolist(), multilinear(bits, keys)[0].tolist()):
        assert (sum(b * k for b, k in zip(row, keys.tolist())) - found) % 2**64 == 0


@pytest.mark.parametrize("row", [0, 7, 49])
@pytest.mark.parametrize(
    ("value", "is_finite"),
    [(math.nan, False), (-math.nan, False), (math.inf, False), (-math.inf, False), (3.4e38, True), (-1e-45, True)],
)
def test_hashing_tells_whether_all_numbers_are_finite(row, value, is_finite):
    rows = random(50, 37, dtype=torch.float32)
    rows[row, 35] = value
    assert multilinear(rows.view(torch.int32), torch.arange(37) + 1)[1] is is_finite


@pytest.mark.parametrize("kind", [fdbd.KNN, fdbd.NNGuide])
def test_a_bank_names_the_row_that_is_not_finite_and_takes_large_ones(kind):
    rows = random(30, 3)
    rows[:, 0] += 1e39  # more than float32 holds, but these are float64
    detector = kind(3).fit(Batch(rows), Head(torch.eye(3, dtype=torch.float64)))
    assert torch.isfinite(detector.bank).all()
    rows[21, 1] = math.inf
    with pytest.raises(ValueError, match="batch 1, row 1: its features hold NaN or infinity"):
        kind(3).fit([Batch(rows[:20]), Batch(rows[20:])], Head(torch.eye(3, dtype=torch.float64)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (37, 5), (3000, 100)])
def test_rows_are_placed_and_divided_as_torch_divides(shape, dtype):
    rows = random(shape[1], shape[0], dtype=dtype).T  # not contiguous
    divisors = random(shape[0], seed=1, dtype=dtype)
    places = torch.randperm(shape[0] + 5, generator=torch.Generator().manual_seed(0))[: shape[0]]
    out = torch.full((shape[0] + 5, shape[1]), 7.0, dtype=dtype)
    expected = out.clone()
    expected[places] = rows / divisors[:, None]
    place_rows(out, places, rows, divisors)
    assert torch.equal(out, expected)


# ── products by several threads ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def library():
    """numpy's OpenBLAS, set to two threads."""
    found = blas._openblas()
    if found is None:
        pytest.skip("numpy multiplies with another library than OpenBLAS")
    before = found.threads()
    found._set(2)
    yield found
    found._set(before)


def numpys_threads() -> list[int]:
    """As scikit-learn's own tool sees them."""
    libraries = [library for library in threadpool_info() if "numpy" in library["filepath"]]
    return [library["num_threads"] for library in libraries if library["internal_api"] == "openblas"]


def test_numpys_own_library_is_the_one_that_is_limited(library):
    if not numpys_threads():
        pytest.skip("numpy comes without a library of its own")
    assert numpys_threads() == [2]
    with library.one_thread_each():
        assert numpys_threads() == [1]
    assert numpys_threads() == [2]


def test_shared_products_cover_all_rows_and_leave_the_library_as_it_was(two_threads, library):
    seen, limits = torch.zeros(1001, dtype=torch.int64), []

    def work(start: int, stop: int) -> None:
        seen[start:stop] += 1
        limits.append(library.threads())

    blas.share_products(1001, work)
    assert (seen == 1).all()
    assert limits == [1, 1]
    assert library.threads() == 2
    blas.share_products(127, work)  # too few to share
    assert limits == [1, 1, 2]


def test_the_last_user_in_any_thread_gives_the_threads_back(library):
    first, second = threading.Event(), threading.Event()
    limits = []

    def come_late_and_leave_last() -> None:
        first.wait(10)
        with library.one_thread_each():
            second.set()
            main_left.wait(10)
            limits.append(library.threads())

    main_left = threading.Event()
    other = threading.Thread(target=come_late_and_leave_last)
    other.start()
    with library.one_thread_each():
        first.set()
        assert second.wait(10)
    main_left.set()
    other.join(10)
    assert limits == [1]
    assert library.threads() == 2


def test_a_number_of_threads_that_somebody_set_meanwhile_stays(library):
    with library.one_thread_each():
        library._set(2)
    library._set(1)
    with library.one_thread_each():
        pass
    assert library.threads() == 1


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_one_thread_waits_for_the_others(failing, two_threads, library):
    done = []

    def work(start: int, stop: int) -> None:
        if (start > 0) == failing:
            raise KeyError(start)
        time.sleep(0.2)
        done.append(library.threads())

    with pytest.raises(KeyError):
        blas.share_products(1001, work)
    assert done == [1]
    assert library.threads() == 2


def test_a_thread_that_outlives_the_main_one_still_fits(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(
        "import threading, time, torch, fdbd\n"
        "torch.set_num_threads(2)\n"
        "def late():\n"
        "    time.sleep(1)\n"
        "    batch = fdbd.Batch(torch.randn(2000, 8), None, torch.arange(2000) % 2)\n"
        "    print(fdbd.MDS().fit(batch, fdbd.Head(torch.randn(2, 8))).score(batch).shape)\n"
        "threading.Thread(target=late).start()\n"
    )
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert "torch.Size([2000])" in run.stdout, run.stderr


def test_infinite_features_give_no_warning_of_numpys(two_threads, monkeypatch):
    monkeypatch.setattr(blas, "numpy_is_faster", lambda: True)
    monkeypatch.setattr(linalg, "_ELEMENTS", 100)
    rows, basis = random(401, 6), random(6, 3, seed=1)
    rows[3, 0], basis[0, 0] = math.inf, 0
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        norms = linalg.of_products(rows, basis, torch.zeros(3, dtype=torch.float64), "norm")
    assert norms[3].isnan()
    assert torch.isfinite(norms).sum() == 400


def test_products_of_wide_features_are_left_to_the_library(two_threads, monkeypatch):
    calls = []
    share = moments.share_products
    monkeypatch.setattr(
        moments, "share_products", lambda rows, work, least: (calls.append(least), share(rows, work, least))
    )
    rows = random(500, 40)
    products(rows, rows[0])
    monkeypatch.setattr(moments, "_ELEMENTS_OF_ALL", 2 * 40**2 - 1)
    products(rows, rows[0])
    assert calls == [20, 501]


def test_products_hardly_depend_on_the_number_of_threads(two_threads):
    rows, pivot = random(3001, 40, dtype=torch.float32), random(40, seed=1)
    total, squares = products(rows, pivot, elements=4000)
    again = products(rows, pivot, elements=4000)
    assert torch.equal(again[0], total)
    assert torch.equal(again[1], squares)
    torch.set_num_threads(1)
    alone = products(rows, pivot, elements=4000)
    torch.testing.assert_close(alone[0], total, rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(alone[1], squares, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("by_numpy", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_projections_are_those_of_a_loop(dtype, by_numpy, two_threads, monkeypatch):
    monkeypatch.setattr(blas, "numpy_is_faster", lambda: by_numpy)
    monkeypatch.setattr(linalg, "_ELEMENTS", 100)  # blocks of 64 rows
    rows, basis, shift = random(401, 6, dtype=dtype), random(6, 3, seed=1, dtype=dtype), random(3, seed=2, dtype=dtype)
    rows[17, 2] = math.nan
    found = linalg.of_products(rows, basis, shift, "norm")
    expected = [math.hypot(*(row @ basis.double() + shift.double()).tolist()) for row in rows.double()]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=dtype), equal_nan=True)
    assert found.dtype == dtype
    assert linalg.of_products(rows.requires_grad_(), basis, shift, "norm").requires_grad


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
@pytest.mark.parametrize("count", [6, 333])
def test_neighbours_are_the_same_whichever_library_multiplies(count, by_numpy, two_threads, monkeypatch):
    monkeypatch.setattr(blas, "numpy_is_faster", lambda: by_numpy)
    rows, points = random(count, 5), random(3000, 5, seed=1)
    values, columns = linalg.largest_products(rows, points, 4)
    exact = (rows @ points.T).topk(4, dim=1)
    torch.testing.assert_close(values.sort(dim=1, descending=True).values, exact.values)
    assert torch.equal(columns.sort(dim=1).values, exact.indices.sort(dim=1).values)


@pytest.mark.parametrize("by_numpy", [False, True])
def test_either_library_multiplies(by_numpy):
    rows, points = random(5, 3, dtype=torch.float32), random(7, 3, seed=1, dtype=torch.float32)
    out = torch.empty(5, 7)
    torch.testing.assert_close(blas.product(rows, points, out, by_numpy), rows @ points.T)
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
