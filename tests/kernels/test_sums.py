"""Sums over training data and softmax's, against loops and torch in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fdbd
from fdbd import Batch, Head
from fdbd.core import linear_algebra
from fdbd.detectors.softmax import largest_probability, logsumexp
from fdbd.fitting.statistics import ClassMeans, Moments, products, row_hashes

DTYPES = [torch.float32, torch.float64]


def random(
    *shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


@given(
    rows=st.integers(0, 20),
    classes=st.sampled_from([1, 2, 3, 10, 31, 32, 33, 100, 1000]),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4, 1e30]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=100, deadline=None)
def test_logsumexp_and_the_largest_probability_are_those_of_exact_exponentials(
    rows, classes, dtype, spread, seed
):
    logits = random(rows, classes, seed=seed, scale=spread, dtype=dtype)
    exact = logits.double()
    rtol = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(
        logsumexp(logits).double(), exact.logsumexp(dim=1), rtol=rtol, atol=rtol
    )
    torch.testing.assert_close(
        largest_probability(logits).double(),
        exact.softmax(dim=1).amax(dim=1),
        rtol=rtol,
        atol=1e-30,
    )


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 11])
def test_products_about_a_pivot_equal_a_loop(rows, dtype):
    values = random(rows, 3, dtype=dtype)
    pivot = random(3, seed=1)
    squares = products(values, pivot)
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for row in values.double():
        expected += torch.outer(row - pivot, row - pivot)
    torch.testing.assert_close(squares, expected, rtol=1e-12, atol=1e-12)


def test_moments_keep_their_digits_where_the_mean_is_huge_and_an_outlier_comes_first():
    around = random(500, 4) + 1e7
    for rows in (around, torch.cat([torch.zeros(1, 4, dtype=torch.float64), around])):
        moments = Moments(4)
        for part in rows.split(37):
            moments.update(Batch(part))
        exact = np.cov(rows.numpy().astype(np.longdouble).T.astype(np.float64), bias=True)
        np.testing.assert_allclose(
            moments.covariance().numpy(), exact, rtol=1e-7, atol=1e-7 * exact.max()
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_by_class_equal_a_loop(dtype):
    values = random(20, 3, dtype=dtype)
    classes = torch.arange(20) % 4
    means = ClassMeans(5, 3)
    for rows in (slice(0, 7), slice(7, 20)):
        means.update(Batch(values[rows], None, classes[rows]))
    assert means.counts.tolist() == [5, 5, 5, 5, 0]
    for c in range(5):
        expected = values[classes == c].double().sum(dim=0)
        torch.testing.assert_close(means.totals[c], expected, rtol=1e-12, atol=1e-12)


def test_hashes_of_rows_depend_on_every_bit_of_them_and_on_nothing_else():
    rows = random(300, 5, dtype=torch.float32)
    hashes = row_hashes(rows)
    assert torch.equal(row_hashes(rows.flip(0)), hashes.flip(0))
    assert torch.equal(row_hashes(rows.double()), hashes)
    assert len(hashes.unique()) == 300
    assert ((hashes >= 0) & (hashes < 2**62)).all()
    changed = rows.clone()
    changed.view(torch.int32)[:, 3] ^= 1
    assert (row_hashes(changed) != hashes).all()
    assert abs((hashes < 2**61).float().mean() - 0.5) < 0.15


@pytest.mark.parametrize("kind", [fdbd.KNN, fdbd.NNGuide])
def test_a_bank_names_the_row_that_is_not_finite_and_takes_large_ones(kind):
    rows = random(30, 3)
    # More than float32 holds, but these are float64.
    rows[:, 0] += 1e39
    detector = kind(3).fit(Batch(rows), Head(torch.eye(3, dtype=torch.float64)))
    assert torch.isfinite(detector.bank).all()
    rows[21, 1] = math.inf
    with pytest.raises(ValueError, match="batch 1, row 1: its features hold NaN or infinity"):
        kind(3).fit([Batch(rows[:20]), Batch(rows[20:])], Head(torch.eye(3, dtype=torch.float64)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_projections_are_those_of_a_loop(dtype, monkeypatch):
    # Blocks of 64 rows.
    monkeypatch.setattr(linear_algebra, "_ELEMENTS", 100)
    rows = random(401, 6, dtype=dtype)
    basis = random(6, 3, seed=1, dtype=dtype)
    shift = random(3, seed=2, dtype=dtype)
    rows[17, 2] = math.nan

    def norms(some):
        return torch.linalg.vector_norm(torch.addmm(shift, some, basis), dim=1)

    found = linear_algebra.in_blocks(norms, rows, 3)
    expected = [
        math.hypot(*(row @ basis.double() + shift.double()).tolist()) for row in rows.double()
    ]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=dtype), equal_nan=True)
    assert found.dtype == dtype
    assert linear_algebra.in_blocks(norms, rows.requires_grad_(), 3).requires_grad


def test_a_bank_keeps_its_rows_when_a_loader_uses_its_memory_again():
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


def test_the_nearest_point_found_block_by_block_is_that_of_the_whole(monkeypatch):
    monkeypatch.setattr(linear_algebra, "_QUERIES", 100)
    monkeypatch.setattr(linear_algebra, "_POINTS", 700)
    rows = random(333, 5)
    points = random(3000, 5, seed=1)
    values, columns = linear_algebra.largest_products(rows, points, 1)
    exact = (rows @ points.T).topk(1, dim=1)
    torch.testing.assert_close(values.sort(dim=1, descending=True).values, exact.values)
    assert torch.equal(columns.sort(dim=1).values, exact.indices.sort(dim=1).values)
