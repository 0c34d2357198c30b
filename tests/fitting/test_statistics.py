"""Statistics against direct float64 formulas: any split of the data, any order of the shards, the
same result."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdbd import Batch
from fdbd.fitting.statistics import (
    Bank,
    ClassMeans,
    ClassMoments,
    Count,
    Histogram,
    Mean,
    Moments,
    NonFiniteRow,
    Statistic,
    Sum,
    Transformed,
    check_finite,
    required_labels,
    row_hashes,
)

CLASSES, WIDTH = 4, 6


def data(rows=500, offset=0.0, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    features = (torch.randn(rows, WIDTH, generator=g, dtype=torch.float64) * 2 + offset).to(dtype)
    return Batch(features, None, torch.randint(CLASSES, (rows,), generator=g))


def pieces(batch, cuts):
    bounds = [
        0,
        *sorted(min(cut, batch.features.shape[0]) for cut in cuts),
        batch.features.shape[0],
    ]
    return [Batch(batch.features[a:b], None, batch.labels[a:b]) for a, b in pairwise(bounds)]


def over(make, batches):
    statistic = make()
    for batch in batches:
        statistic.update(batch)
    return statistic


def merged(make, shards):
    """One statistic per shard, merged in the order given."""
    total = make()
    for shard in shards:
        total.merge(over(make, [shard]))
    return total


cuts = st.lists(st.integers(0, 500), max_size=6)
orders = st.randoms(use_true_random=False)


def first_two(batch):
    return batch.features[:, :2]


def by_label(batch):
    return batch.features, batch.labels


def by_first_column(rows):
    return rows[rows[:, 0].argsort()]


KINDS = {
    "count": (Count, lambda s: torch.tensor(float(s.count))),
    "mean": (lambda: Mean(WIDTH), lambda s: s.mean()),
    "moments": (lambda: Moments(WIDTH), lambda s: torch.cat([s.mean()[None], s.covariance()])),
    "class moments": (
        lambda: ClassMoments(CLASSES, WIDTH),
        lambda s: torch.cat(
            [s.means(), s.within_class_covariance(), s.counts[:, None].expand(-1, WIDTH)]
        ),
    ),
    "class means": (lambda: ClassMeans(CLASSES, WIDTH, by_label), lambda s: s.means()),
    "sum": (lambda: Sum(first_two), lambda s: s.sum()),
    "histogram": (Histogram, lambda s: s.counts.double()),
    # Its samples come in no particular order.
    "bank": (Bank, lambda s: by_first_column(s.samples())),
    "bank of a share": (lambda: Bank(0.3), lambda s: by_first_column(s.samples())),
    "transformed": (
        lambda: Transformed(
            Mean(WIDTH), lambda batch: batch._replace(features=batch.features.clamp_max(1))
        ),
        lambda s: s.statistic.mean(),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@given(cuts=cuts, order=orders)
@settings(max_examples=15, deadline=None)
def test_any_split_and_any_order_of_shards_equal_one_pass(kind, cuts, order):
    make, value = KINDS[kind]
    batch = data()
    whole = value(over(make, [batch]))
    split = pieces(batch, cuts)
    torch.testing.assert_close(value(over(make, split)), whole, rtol=1e-12, atol=1e-12)
    order.shuffle(split)
    torch.testing.assert_close(value(merged(make, split)), whole, rtol=1e-12, atol=1e-12)
    assert isinstance(make(), Statistic)


def test_mean_is_the_average_of_every_column():
    batch = data()
    columns = batch.features.numpy().T
    expected = [math.fsum(column) / len(column) for column in columns]
    np.testing.assert_allclose(
        over(lambda: Mean(WIDTH), pieces(batch, [7, 300])).mean().numpy(), expected, rtol=1e-13
    )


def test_float32_data_are_summed_in_float64():
    batch = data(20_000, offset=1e4, dtype=torch.float32)
    exact = batch.features.double().mean(dim=0)
    torch.testing.assert_close(over(lambda: Mean(WIDTH), [batch]).mean(), exact, rtol=1e-14, atol=0)


def test_an_offset_that_dwarfs_the_spread_does_not_cancel():
    spread = data().features
    shifted = Batch(spread + 1e7)
    moments = merged(lambda: Moments(WIDTH), [Batch(part) for part in shifted.features.split(100)])
    # The sum of squares would lose 14 digits.
    expected = np.cov((shifted.features - 1e7).numpy().T, bias=True)
    np.testing.assert_allclose(moments.covariance().numpy(), expected, rtol=1e-9, atol=1e-9)


def test_the_second_moment_about_an_origin_is_that_of_the_differences():
    batch = data()
    origin = torch.arange(WIDTH).double()
    moved = batch.features - origin
    torch.testing.assert_close(
        over(lambda: Moments(WIDTH), [batch]).second_moment(origin),
        moved.T @ moved / len(moved),
        rtol=1e-12,
        atol=1e-12,
    )


def test_class_moments_are_those_of_each_class():
    batch = data(offset=3.0)
    moments = over(lambda: ClassMoments(CLASSES + 1, WIDTH), pieces(batch, [100, 101, 350]))
    within = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    for c in range(CLASSES):
        rows = batch.features[batch.labels == c]
        assert moments.counts[c] == len(rows)
        torch.testing.assert_close(moments.means()[c], rows.mean(dim=0))
        within += (rows - rows.mean(dim=0)).T @ (rows - rows.mean(dim=0))
    # A class without samples.
    assert moments.means()[CLASSES].isnan().all()
    torch.testing.assert_close(
        moments.within_class_covariance(), within / len(batch.features), rtol=1e-11, atol=1e-11
    )


def test_labels_are_asked_for_if_they_are_missing():
    with pytest.raises(ValueError, match="give labels in Batch"):
        required_labels(Batch(torch.zeros(2, 2)))


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("shape", ["normal", "relu", "heavy", "negative"])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.9, 0.99, 1.0])
def test_quantiles_are_right_to_a_thousandth(scale, shape, fraction):
    g = torch.Generator().manual_seed(1)
    values = torch.randn(20_000, 5, generator=g)
    values = {
        "normal": values,
        "relu": values.relu(),
        "heavy": values**5,
        "negative": -values.abs(),
    }[shape] * scale
    histogram = over(Histogram, [Batch(part) for part in values.split(3000)])
    expected = np.quantile(values.double().numpy(), fraction)
    assert histogram.quantile(fraction) == pytest.approx(expected, rel=1e-3, abs=1e-6 * scale)


def test_a_histogram_counts_what_it_is_told_to_take_from_a_batch():
    histogram = over(lambda: Histogram(lambda batch: batch.features[:, 0]), [data()])
    assert histogram.counts.sum() == 500
    assert histogram.quantile(1) == pytest.approx(data().features[:, 0].max().item(), rel=1e-3)


@pytest.mark.parametrize("alpha", [0.01, 0.25, 0.5])
def test_a_bank_keeps_about_its_share(alpha):
    batch = data(20_000)
    kept = len(over(lambda: Bank(alpha), [batch]).samples())
    assert abs(kept - alpha * 20_000) < 5 * math.sqrt(alpha * (1 - alpha) * 20_000)


def test_a_full_bank_keeps_every_row():
    batch = data()
    rows = over(Bank, pieces(batch, [50])).samples()
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, batch.features.tolist()))


def test_a_bank_of_other_numbers_comes_as_float32_and_of_other_widths_not_at_all():
    rows = torch.arange(12).reshape(4, 3) % 5
    for dtype in (torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool):
        bank = over(
            lambda dtype=dtype: Bank(value=lambda batch: batch.features.to(dtype)), [Batch(rows)]
        )
        assert bank.samples().dtype == torch.float32
        assert sorted(bank.samples().tolist()) == sorted(rows.to(dtype).float().tolist())
    mixed = over(Bank, [Batch(torch.ones(2, 3)), Batch(torch.ones(2, 4))])
    with pytest.raises(ValueError, match="rows to keep have 3 and 4 numbers"):
        mixed.samples()


def test_a_bank_does_not_hold_on_to_the_callers_memory():
    batch = data()
    bank = over(Bank, [batch])
    before = bank.samples().clone()
    batch.features.zero_()
    assert torch.equal(bank.samples(), before)


def test_hashes_depend_on_the_row_alone_and_spread_evenly():
    rows = data(5000, dtype=torch.float32).features
    hashes = row_hashes(rows)
    assert torch.equal(row_hashes(rows.flip(0)), hashes.flip(0))
    assert torch.equal(torch.cat([row_hashes(part) for part in rows.split(17)]), hashes)
    assert len(hashes.unique()) == 5000
    counts = torch.histc(hashes.double(), 16, 0, 2**62)
    assert (counts - 5000 / 16).abs().max() < 5 * math.sqrt(5000 / 16)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_row_is_found_and_counted_from_zero(bad):
    features = data(50).features
    features[31, 2] = bad
    features[40, 0] = bad
    with pytest.raises(NonFiniteRow) as caught:
        check_finite(features, "features")
    assert caught.value.row == 31
    with pytest.raises(NonFiniteRow):
        Mean(WIDTH).update(Batch(features))


def test_finite_numbers_whose_sum_overflows_are_finite():
    check_finite(torch.full((4, 3), 1e308, dtype=torch.float64), "features")
    check_finite(torch.full((4, 3), 3e38), "features")


@pytest.mark.parametrize(
    "ask",
    [lambda: Histogram().quantile(0.5), lambda: Bank().samples(), lambda: Sum(first_two).sum()],
    ids=["histogram", "bank", "sum"],
)
def test_empty_statistics_say_so(ask):
    with pytest.raises(ValueError, match="the training data are empty"):
        ask()


def test_merging_an_empty_shard_changes_nothing():
    for make, value in KINDS.values():
        statistic = over(make, [data(50)])
        before = value(statistic).clone()
        statistic.merge(make())
        torch.testing.assert_close(value(statistic), before, rtol=0, atol=0)
