"""VRA: low activations removed, high ones clipped, by each feature's own percentiles."""

from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fdbd.core.batch import Batch, Head
from fdbd.core.configuration import Needs, Paper, Passes, expect
from fdbd.detectors.shaping.base import Shaping, percent
from fdbd.fitting.sample_size import warn_of_few_for_percentile
from fdbd.fitting.statistics import Additive, ordered_bits, values_of_bits

_COARSE = 11
"""Leading bits of a float32 that the first pass counts by: sign, exponent, two of the mantissa."""
_FINE = 10
"""Bits after those that the second pass counts by."""


class VRA(Shaping):
    """Low activations removed, high ones clipped (Xu et al., 2023): 0 below α, z between, β above
    β. O(P) per sample.

    α and β are percentiles of each feature's own training activations, found in two passes to a
    relative 2⁻¹²; fitting keeps counts of O(P), no samples.

    Args:
        low: percent of a feature's activations below its α; 60 is the authors' for CIFAR.
        high: percent below its β; the authors take 90 for CIFAR-10 and 95 for CIFAR-100.

    >>> import fdbd
    >>> detector = fdbd.create("vra+energy").fit(
    ...     fdbd.Batch(torch.rand(200, 3)), fdbd.Head(torch.eye(3))
    ... )
    >>> high, higher = detector.score(fdbd.Batch(torch.tensor([[5.0, 5.0, 5.0], [9.0, 9.0, 9.0]])))
    >>> bool(high == higher)  # both are clipped
    True
    """

    name = "vra"
    paper = Paper(
        "VRA: Variational Rectified Activation for Out-of-distribution Detection",
        "Xu et al.",
        "NeurIPS",
        2023,
    )
    needs = Needs(passes=2)
    alpha: Annotated[Tensor, "P"]
    beta: Annotated[Tensor, "P"]

    def __init__(self, low: float = 60.0, high: float = 95.0) -> None:
        super().__init__()
        self.low = percent("low", expect("low", low, low <= high, f"at most high, which is {high}"))
        self.high = percent("high", high)

    def passes(self, head: Head) -> Passes:
        coarse = yield _FeatureBins(head.num_features)
        warn_of_few_for_percentile("vra", coarse.count, self.high)
        # As the authors do, each percentile lies between the two order statistics next to it.
        last = coarse.count - 1
        low_place = self.low / 100 * last
        high_place = self.high / 100 * last
        ranks = [*_neighbouring_ranks(low_place, last), *_neighbouring_ranks(high_place, last)]
        # The first pass finds the bin that holds each rank, the second divides that bin.
        cells = []
        ranks_in_cells = []
        for rank in ranks:
            cell, rank_in_cell = coarse.find(rank)
            cells.append(cell)
            ranks_in_cells.append(rank_in_cell)
        fine = yield _FeatureBins(head.num_features, torch.stack(cells))
        values = [fine.value(level, rank) for level, rank in enumerate(ranks_in_cells)]
        alpha = torch.lerp(values[0], values[1], low_place % 1)
        beta = torch.lerp(values[2], values[3], high_place % 1)
        if self.fit_dtype == torch.float64:
            # Bins are float32's: what was rounded up to alpha is not below.
            alpha = torch.nextafter(alpha.float(), torch.tensor(-torch.inf)).double()
        self.set_buffers(alpha=alpha, beta=beta)

    def forward(self, features: Tensor) -> Tensor:
        alpha = self.fitted("alpha").to(features.device)
        beta = self.fitted("beta").to(features.device)
        # 1 or 0 as floats, which multiply faster than booleans select.
        is_kept = torch.ge(features.detach(), alpha, out=torch.empty_like(features))
        return torch.minimum(features, beta).mul_(is_kept)


def _neighbouring_ranks(place: float, last: int) -> tuple[int, int]:
    """The ranks just below and above a place between 0 and the last rank."""
    below = int(place)
    return below, min(below + 1, last)


class _FeatureBins(Additive):
    """Histograms of each feature's values over the bits of their float32 pattern: two passes of
    them find L order statistics of every feature.

    The first pass (no `cells`) counts all values by their leading bits. The second counts, for each
    of the L levels, the values whose leading bits are `cells` (L, P), by the bits that follow.
    """

    sums = ("count", "counts")

    def __init__(self, num_features: int, cells: Tensor | None = None) -> None:
        self.cells = cells
        self.count = 0
        if cells is None:
            levels = 1
            bins = 1 << _COARSE
        else:
            levels = len(cells)
            bins = 1 << _FINE
        self.counts = torch.zeros(levels, num_features, bins, dtype=torch.int64)

    def update(self, batch: Batch) -> None:
        self.count += batch.features.shape[0]
        width, bins = self.counts.shape[1:]
        # Bins of all features are numbered in one sequence, feature by feature.
        first_bins = np.arange(width) * bins
        for piece in batch.features.split(4096):
            bits = ordered_bits(piece)
            # The patterns are signed; bins count from 0.
            leading = (bits >> (32 - _COARSE)) + (1 << (_COARSE - 1))
            if self.cells is None:
                self._count(0, (first_bins + leading).reshape(-1))
                continue
            following = (bits >> (32 - _COARSE - _FINE)) & (bins - 1)
            for level, cell in enumerate(self.cells.numpy()):
                self._count(level, (first_bins + following)[leading == cell])

    def _count(self, level: int, bins: NDArray[Any]) -> None:
        """Add one to each of these bins, numbered over all features, of a level."""
        shape = self.counts.shape[1:]
        counts = np.bincount(bins, minlength=shape.numel())
        self.counts[level] += torch.from_numpy(counts.reshape(shape))

    def find(self, rank: int | Tensor, level: int = 0) -> tuple[Tensor, Tensor]:
        """(P,) the bin that holds each feature's value of this rank, and its rank within the
        bin."""
        rank = torch.as_tensor(rank).expand(self.counts.shape[1]).contiguous()
        cumulative = self.counts[level].cumsum(dim=1)
        index = torch.searchsorted(cumulative, rank[:, None], right=True)
        before = torch.where(index > 0, cumulative.gather(1, (index - 1).clamp_min(0)), 0)
        return index[:, 0], rank - before[:, 0]

    def value(self, level: int, rank: Tensor) -> Tensor:
        """(P,) float64 value of this rank within the cells of a level: the least of its bin, so
        that what is equal to it is not below."""
        assert self.cells is not None
        fine, _ = self.find(rank, level)
        leading_bits = (self.cells[level] << _FINE) + fine
        values = values_of_bits(leading_bits << (32 - _COARSE - _FINE))
        return torch.where(values.abs() < torch.finfo(torch.float32).tiny, 0, values)
