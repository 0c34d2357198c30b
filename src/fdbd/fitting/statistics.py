"""Mergeable sums over training data: what a detector learns from, the same for any split of the
data and any order of the shards. Everything is summed in float64 on the CPU. Only `Bank` keeps
samples."""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Self

from fdbd import kernels
from fdbd.core.batch import Batch, Head, required_labels
from fdbd.core.linear_algebra import whitener

ROWS_AT_A_TIME = 2048
"""Rows converted to float64 at once: bounds the memory of an update, and stays in the cache."""
LOGITS_AT_A_TIME = 1 << 22
"""Logits computed for a fit at once: 16 MB."""

S = TypeVar("S", bound="Statistic")


@runtime_checkable
class Statistic(Protocol):
    """A summary of training data that is updated by a batch and merged with another of its kind.
    One whose attribute `finds_non_finite` is true calls `check_finite` on the features itself; for
    others the driver does.

    >>> isinstance(Mean(2), Statistic)
    True
    """

    def update(self, batch: Batch) -> None: ...

    def merge(self, other: Self) -> None: ...


class Additive:
    """A statistic that merges by adding up the attributes named in `sums`: numbers, tensors or
    lists."""

    sums: ClassVar[tuple[str, ...]] = ("count",)

    def merge(self, other: Self) -> None:
        for name in self.sums:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class NonFiniteRow(ValueError):
    """Row number `row` of `what`, a part of a batch, holds NaN or infinity; the driver completes
    the message."""

    def __init__(self, row: int, what: str) -> None:
        super().__init__(f"row {row} of {what} is not finite")
        self.row = row
        self.what = what


def check_finite(values: Tensor, what: str) -> Tensor:
    """Raise NonFiniteRow for the first row of (N, …) values with a NaN or an infinity; otherwise
    return the sums over rows, float64 on the CPU, which show that none has. One read of the
    values."""
    sums = kernels.column_sums(values.detach().flatten(1)).cpu()
    if not math.isfinite(sums.sum().item()):
        is_bad = ~torch.isfinite(values).flatten(1).all(dim=1)
        # A float64 sum may overflow although every entry is finite.
        if is_bad.any():
            raise NonFiniteRow(int(is_bad.nonzero()[0]), what)
    return sums


def in_float64(values: Tensor, rows: int = ROWS_AT_A_TIME) -> Iterator[Tensor]:
    """(N, …) values in pieces of at most `rows` rows, as float64 on the CPU."""
    for piece in values.detach().split(rows):
        # In this order: not every device has float64.
        yield piece.cpu().to(torch.float64)


class Count(Additive):
    """The number of samples.

    >>> count = Count()
    >>> count.update(Batch(torch.rand(5, 2)))
    >>> count.count
    5
    """

    # It reads no features.
    finds_non_finite = True

    def __init__(self) -> None:
        self.count = 0

    def update(self, batch: Batch) -> None:
        self.count += batch.features.shape[0]


class Mean(Additive):
    """Mean of the features, (P,).

    >>> mean = Mean(2)
    >>> mean.update(Batch(torch.tensor([[1.0, 2.0], [3.0, 4.0]])))
    >>> mean.mean()
    tensor([2., 3.], dtype=torch.float64)
    """

    finds_non_finite = True
    sums = ("count", "total")

    def __init__(self, num_features: int) -> None:
        self.count = 0
        self.total = torch.zeros(num_features, dtype=torch.float64)

    def update(self, batch: Batch) -> None:
        self.total += check_finite(batch.features, "its features")
        self.count += batch.features.shape[0]

    def mean(self) -> Tensor:
        """(P,) float64."""
        return self.total / max(self.count, 1)


def products(rows: Tensor, pivot: Tensor) -> Tensor:
    """Σ(z − pivot)(z − pivot)ᵀ (P, P) over rows z (N, P), in float64. It is symmetric: only blocks
    on and below the diagonal are multiplied, which saves seven sixteenths."""
    width = rows.shape[1]
    squares = torch.zeros(width, width, dtype=torch.float64)
    edges = [width * i // 8 for i in range(9)]
    # More rows at once would leave the cache.
    for piece in in_float64(rows, 512):
        # Contiguous columns are a tenth faster.
        centred = (piece - pivot).T.contiguous()
        for start, stop in pairwise(edges):
            squares[start:stop, :stop].addmm_(centred[start:stop], centred[:stop].T)
    return squares.tril() + squares.tril(-1).T


def features_by_label(batch: Batch) -> tuple[Tensor, Tensor]:
    """Features (N, P) and labels (N,)."""
    return batch.features, required_labels(batch)


class ClassMeans(Additive):
    """Count (C,) and sum (C, D) by class of one vector per sample; `value` maps a Batch to the
    vectors (N, D) and the classes (N,), by default features and labels.

    >>> means = ClassMeans(2, 1)
    >>> means.update(Batch(torch.tensor([[1.0], [3.0], [7.0]]), None, torch.tensor([0, 0, 1])))
    >>> means.means().tolist()
    [[2.0], [7.0]]
    """

    sums = ("counts", "totals")

    def __init__(
        self,
        num_classes: int,
        width: int,
        value: Callable[[Batch], tuple[Tensor, Tensor]] = features_by_label,
    ) -> None:
        self.value = value
        self.counts = torch.zeros(num_classes, dtype=torch.float64)
        self.totals = torch.zeros(num_classes, width, dtype=torch.float64)

    def update(self, batch: Batch) -> None:
        values, classes = self.value(batch)
        classes = classes.cpu()
        self.counts += torch.bincount(classes, minlength=len(self.counts))
        for classes_of_piece, piece in zip(classes.split(ROWS_AT_A_TIME), in_float64(values)):
            self.totals.index_add_(0, classes_of_piece, piece)

    def means(self) -> Tensor:
        """(C, D) float64; a class without samples has NaN."""
        return self.totals / self.counts[:, None]


class Moments:
    """Count, mean (P,) and scatter Σ(z − mean)(z − mean)ᵀ (P, P) of the features.

    Products are taken about a mean of earlier rows, and batches combined by the pairwise update of
    Chan, Golub and LeVeque (1983): nothing cancels when the mean is large against the spread.

    >>> moments = Moments(2)
    >>> moments.update(Batch(torch.tensor([[0.0, 0.0], [2.0, 4.0]])))
    >>> moments.mean(), moments.covariance()
    (tensor([1., 2.], dtype=torch.float64), tensor([[1., 2.],
            [2., 4.]], dtype=torch.float64))
    """

    finds_non_finite = True

    def __init__(self, num_features: int) -> None:
        self.count = 0
        self.average = torch.zeros(num_features, dtype=torch.float64)
        self.scatter = torch.zeros(num_features, num_features, dtype=torch.float64)

    def update(self, batch: Batch) -> None:
        rows = batch.features
        count = rows.shape[0]
        if not count:
            return
        pivot = self.average
        if not self.count:
            # Any point near the rows will do.
            first_rows = next(in_float64(rows[:256]))
            pivot = first_rows.mean(dim=0)
        average = check_finite(rows, "its features") / count
        offset = average - pivot
        scatter = products(rows, pivot).addr_(offset, offset, alpha=-count)
        self._combine(count, average, scatter)

    def merge(self, other: Self) -> None:
        if other.count:
            self._combine(other.count, other.average, other.scatter)

    def _combine(self, count: int, average: Tensor, scatter: Tensor) -> None:
        """Add the moments of other rows about their own mean."""
        total = self.count + count
        delta = average - self.average
        self.scatter += scatter
        self.scatter.addr_(delta, delta, alpha=self.count * count / total)
        self.average = self.average + delta * (count / total)
        self.count = total

    def mean(self) -> Tensor:
        """(P,) float64."""
        return self.average

    def covariance(self) -> Tensor:
        """(P, P) float64, divided by the count."""
        return self.scatter / max(self.count, 1)

    def second_moment(self, origin: Tensor) -> Tensor:
        """(P, P) mean of (z − origin)(z − origin)ᵀ."""
        shift = self.average - origin
        return self.covariance() + torch.outer(shift, shift)


class ClassMoments(Moments, ClassMeans):
    """Moments of all features, and the count and mean of each class: (C,) and (C, P).

    >>> moments = ClassMoments(2, 1)
    >>> moments.update(Batch(torch.tensor([[0.0], [2.0], [7.0]]), None, torch.tensor([0, 0, 1])))
    >>> moments.means(), moments.counts
    (tensor([[1.],
            [7.]], dtype=torch.float64), tensor([2., 1.], dtype=torch.float64))
    """

    def __init__(self, num_classes: int, num_features: int) -> None:
        Moments.__init__(self, num_features)
        ClassMeans.__init__(self, num_classes, num_features)

    def update(self, batch: Batch) -> None:
        Moments.update(self, batch)
        ClassMeans.update(self, batch)

    def merge(self, other: Self) -> None:
        Moments.merge(self, other)
        ClassMeans.merge(self, other)

    def whitened(self) -> tuple[Tensor, Tensor]:
        """The whitening matrix (P, P) of the covariance within classes; and the means (M, P) of the
        classes with samples, less the mean of all samples, whitened by it."""
        whitening = whitener(self.within_class_covariance(), self.covariance().trace())
        offsets = self.means()[self.counts > 0] - self.average
        return whitening, offsets @ whitening.T

    def within_class_covariance(self) -> Tensor:
        """(P, P) covariance about the class means, shared by all classes, divided by the count."""
        seen = self.counts > 0
        between = self.means()[seen] - self.average
        scatter = self.scatter - between.T @ (between * self.counts[seen, None])
        return scatter / max(self.count, 1)


class Sum(Additive):
    """Sum over samples of some vector of each, in float64; `value` maps a Batch to (N, …).

    >>> largest = Sum(lambda batch: batch.features.amax(dim=1))
    >>> largest.update(Batch(torch.tensor([[1.0, 2.0], [5.0, 3.0]])))
    >>> largest.sum().item()
    7.0
    """

    sums = ("count", "total")

    def __init__(self, value: Callable[[Batch], Tensor]) -> None:
        self.value = value
        self.count = 0
        self.total: Any = 0.0

    def update(self, batch: Batch) -> None:
        # In pieces, since a sample's vector may be much longer than its features.
        for start in range(0, batch.features.shape[0], ROWS_AT_A_TIME):
            values = self.value(batch.rows(slice(start, start + ROWS_AT_A_TIME)))
            for piece in in_float64(values):
                self.count += piece.shape[0]
                self.total = self.total + piece.sum(dim=0)

    def sum(self) -> Tensor:
        """Float64, the shape of one sample's vector."""
        _require(self.count)
        total: Tensor = self.total
        return total


def _require(count: int) -> None:
    if not count:
        raise ValueError("there are no samples: the training data are empty")


_DROPPED_BITS = 12
"""The lower bits of a float32, which bins ignore. The sign, 8 exponent bits and 11 mantissa bits
are kept: 2^20 bins of a relative width of 2^-11."""
_NUM_BINS = 1 << (32 - _DROPPED_BITS)
_HALF = 1 << 31
"""Half the number of float32 bit patterns: as many have each sign."""


def ordered_bits(values: Tensor) -> NDArray[np.int32]:
    """The float32 bit patterns of values as integers that ascend with the value: those of negative
    numbers mirrored."""
    bits: NDArray[np.int32] = (
        values.detach().to("cpu", torch.float32).contiguous().view(torch.int32).numpy()
    )
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def values_of_bits(ordered: Tensor) -> Tensor:
    """Float64 values of float32 bit patterns (int64) in the order of `ordered_bits`, but numbered
    from 0 instead of from −2^31."""
    # The lower half are the negative numbers, whose patterns are mirrored.
    bits = torch.where(ordered >= _HALF, ordered - _HALF, -1 - ordered)
    return bits.to(torch.int32).view(torch.float32).to(torch.float64)


def float_bins(values: Tensor) -> Tensor:
    """The bin (int64) of each value among the 2^20 that all of float32 is divided into; bins ascend
    with the value."""
    # The patterns are signed; bins count from 0.
    bins = (ordered_bits(values) >> _DROPPED_BITS) + _NUM_BINS // 2
    return torch.from_numpy(bins.astype(np.int64))


@cache
def lower_ends_of_bins() -> Tensor:
    """(2^20,) the smallest value of each of the bins of `float_bins`, float64; NaN and infinity for
    those at either end."""
    bins = torch.arange(_NUM_BINS, dtype=torch.int64)
    return values_of_bits(bins << _DROPPED_BITS)


class Histogram(Additive):
    """Quantiles of all values that `value` takes from a batch (default: its features), without
    keeping them.

    Bins are the upper 20 bits of the float32 bit pattern, about a million, so a quantile is right
    to a relative 5e-4 at any scale, and merging is adding counts.

    >>> histogram = Histogram()
    >>> histogram.update(Batch(torch.arange(1.0, 1001.0)[:, None]))
    >>> abs(histogram.quantile(0.9) / 900.1 - 1) < 1e-3
    True
    """

    sums = ("counts",)

    def __init__(self, value: Callable[[Batch], Tensor] | None = None) -> None:
        self.value = value
        self.counts = torch.zeros(_NUM_BINS, dtype=torch.int64)

    def update(self, batch: Batch) -> None:
        values = batch.features if self.value is None else self.value(batch)
        for piece in values.detach().reshape(-1).split(1 << 21):
            self.counts += torch.bincount(float_bins(piece), minlength=len(self.counts))

    def quantile(self, fraction: float) -> float:
        """The value below which this fraction of all values lies, between 0 and 1."""
        return float(self.quantiles([fraction])[0])

    def quantiles(self, fractions: Sequence[float]) -> Tensor:
        """Several at once, float64: numpy's definition (linear between order statistics), the order
        statistics taken at the middle of their bin."""
        cumulative = self.counts.cumsum(0)
        total = int(cumulative[-1])
        _require(total)
        position = torch.tensor(fractions, dtype=torch.float64) * (total - 1)
        rank_below = position.floor()
        rank_above = (rank_below + 1).clamp_max(total - 1)
        ranks = torch.stack([rank_below, rank_above]).to(torch.int64)
        bins = torch.searchsorted(cumulative, ranks, right=True)
        lower, upper = _middles_of_bins(bins)
        return torch.lerp(lower, upper, position.frac())


def _middles_of_bins(bins: Tensor) -> Tensor:
    """Float64, the shape of `bins`: the middle of each of these bins of `float_bins`; 0 for those
    next to it, which exact zeros dominate in any network with a ReLU."""
    first = values_of_bits(bins << _DROPPED_BITS)
    last = values_of_bits(((bins + 1) << _DROPPED_BITS) - 1)
    is_next_to_zero = (first == 0) | (last == 0)
    return torch.where(is_next_to_zero, 0, (first + last) / 2)


class Bank(Additive):
    """The samples themselves, or an `alpha` share of them, in no particular order: for the
    nearest-neighbour family.

    A sample is kept when a hash of its features falls below alpha, so neither the split of the data
    nor the order of the shards decides which are. About alpha·N rows are kept.

    Args:
        alpha: fraction of the samples to keep, in (0, 1].
        value: what to keep of a batch, (N, D), in memory of its own; default a copy of the
            features.

    >>> bank = Bank(alpha=0.5)
    >>> bank.update(Batch(torch.arange(2000.0)[:, None]))
    >>> 900 < len(bank.samples()) < 1100
    True
    """

    sums = ("rows",)

    def __init__(self, alpha: float = 1.0, value: Callable[[Batch], Tensor] | None = None) -> None:
        self.alpha = alpha
        self.value = value
        self.rows: list[Tensor] = []

    def update(self, batch: Batch) -> None:
        if self.alpha < 1:
            batch = batch.rows(row_hashes(batch.features) < int(self.alpha * 2**62))
        # A copy, since a loader may use its memory again.
        rows = batch.features.clone() if self.value is None else self.value(batch)
        self.rows.append(rows.detach().cpu())

    def samples(self, dtype: torch.dtype | None = None) -> Tensor:
        """(M, D) kept rows; None: in their own dtype, float32 at least."""
        _require(len(self.rows))
        widths = sorted({rows.shape[1] for rows in self.rows})
        if len(widths) > 1:
            shown = " and ".join(str(width) for width in widths)
            raise ValueError(
                f"the rows to keep have {shown} numbers, expected as many in every batch"
            )
        if len(self.rows) > 1:
            self.rows = [torch.cat(self.rows)]
        return self.rows[0].to(dtype or torch.promote_types(self.rows[0].dtype, torch.float32))


def row_hashes(rows: Tensor) -> Tensor:
    """(N,) integers in [0, 2^62), spread evenly, that depend on the float32 bits of each row (N, P)
    alone."""
    bits = rows.detach().to("cpu", torch.float32).contiguous().view(torch.int32)
    # One random key per column, always the same. Odd, since a product with an odd number loses no
    # bit modulo 2^64.
    generator = torch.Generator("cpu").manual_seed(0x5F3759DF)
    keys = torch.randint(-(2**62), 2**62, (bits.shape[1],), generator=generator, device="cpu") | 1
    # Σ_j bits[i, j]·keys[j] modulo 2^64; numpy multiplies integers faster than torch.
    mixed = torch.from_numpy(np.einsum("ij,j->i", bits.numpy(), keys.numpy()))
    # The finaliser of splitmix64; its constants are written as negative numbers, as torch has no
    # unsigned ones.
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
    return (mixed ^ (mixed >> 31)) & (2**62 - 1)


class Transformed(Generic[S]):
    """A statistic of transformed batches: each batch passes through `transform` first, at most
    `rows` of it at once.

    >>> doubled = Transformed(Mean(1), lambda batch: Batch(2 * batch.features))
    >>> doubled.update(Batch(torch.tensor([[1.0], [2.0]])))
    >>> doubled.statistic.mean().item()
    3.0
    """

    def __init__(
        self, statistic: S, transform: Callable[[Batch], Batch], rows: int | None = None
    ) -> None:
        self.statistic = statistic
        self.transform = transform
        self.rows = rows

    def update(self, batch: Batch) -> None:
        size = self.rows or max(len(batch.features), 1)
        for start in range(0, len(batch.features), size):
            piece = batch.rows(slice(start, start + size))
            try:
                self.statistic.update(self.transform(piece))
            except NonFiniteRow as error:
                raise NonFiniteRow(start + error.row, error.what) from None

    def merge(self, other: Self) -> None:
        self.statistic.merge(other.statistic)


def with_logits(statistic: S, head: Head) -> Generator[Any, Any, S]:
    """A pass for a statistic that reads logits, which a batch without them gets from the head; as a
    part of `passes`: ``m = yield from with_logits(…, head)``."""
    rows = max(1024, LOGITS_AT_A_TIME // max(head.num_classes, head.num_features))
    summed: Transformed[S] = yield Transformed(statistic, partial(_with_logits, head), rows)
    return summed.statistic


def _with_logits(head: Head, batch: Batch) -> Batch:
    logits = head(batch.features) if batch.logits is None else batch.logits
    check_finite(logits, "its logits")
    return batch._replace(logits=logits)


class Together:
    """Several statistics of the same data."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self.parts = list(parts)

    @property
    def finds_non_finite(self) -> bool:
        return all(getattr(part, "finds_non_finite", False) for part in self.parts)

    def update(self, batch: Batch) -> None:
        for part in self.parts:
            part.update(batch)

    def merge(self, other: Self) -> None:
        for mine, theirs in zip(self.parts, other.parts):
            mine.merge(theirs)


class Range:
    """The smallest and the largest of all values that `value` takes from a batch (default: its
    features), and the number of samples.

    >>> span = Range()
    >>> span.update(Batch(torch.tensor([[1.0, 5.0], [3.0, 2.0]])))
    >>> span.low, span.high, span.count
    (1.0, 5.0, 2)
    """

    def __init__(self, value: Callable[[Batch], Tensor] | None = None) -> None:
        self.value = value
        self.low = math.inf
        self.high = -math.inf
        self.count = 0

    def update(self, batch: Batch) -> None:
        if not batch.features.shape[0]:
            return
        values = batch.features if self.value is None else self.value(batch)
        self.low = min(self.low, values.min().item())
        self.high = max(self.high, values.max().item())
        self.count += batch.features.shape[0]

    def merge(self, other: Self) -> None:
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)
        self.count += other.count
