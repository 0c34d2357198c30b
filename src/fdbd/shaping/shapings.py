"""Activation shaping: features (or logits) are clipped, pruned or scaled before a detector looks at them.

A shaping takes a Batch and gives a new one; `detectors.shaped.Shaped` puts it before any detector. Percentiles are in
percent, each with the meaning that its own paper gives it: of all training activations, of each feature's training
activations, or of the sample's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from fdbd.core.batch import Batch, Head
from fdbd.core.configuration import Configured, NotFittedError, Paper, Passes
from fdbd.fitting.statistics import Histogram, ordered_bits
from fdbd.util.torch_compat import is_plain, tracing

ASH_PAPER = Paper(
    "Extremely Simple Activation Shaping for Out-of-Distribution Detection", "Djurisic et al.", "ICLR", 2023
)


class Shaping(Configured):
    """What is done to a sample's features before it is scored. Never in place, and each row by itself.

    A subclass writes `forward` and, where it learns something from the training data, `passes` and ``learns = True``.
    """

    reads: ClassVar[tuple[str, ...]] = ("features",)
    """What `shape` looks at: features, or features and logits."""
    touches: ClassVar[str] = "features"
    """What `shape` changes: "features", from which logits follow, or the "logits" alone."""
    learns: ClassVar[bool] = False
    """Whether `passes` asks for training statistics."""
    needs_network: ClassVar[bool] = False
    """Whether it needs more of the network than its features, so that only a Guard can give it."""

    def passes(self, head: Head) -> Passes:
        """Ask for statistics of the raw training features, like `Detector.passes`."""
        return
        yield

    def warm_up(self) -> None:
        """Have compiled what `forward` will need; a fit does."""

    def forward(self, features: Tensor) -> Tensor:
        """Shaped features (N, P) of features (N, P)."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def shape(self, batch: Batch) -> Batch:
        """The shaped batch. Its logits are None where features changed: the detector computes them from the head."""
        views = None if batch.views is None else torch.stack([self(view) for view in batch.views])
        return batch._replace(features=self(batch.features), logits=None, views=views)

    def network_batch(self, images: Any, classifier: Callable[[Any], Batch]) -> Batch:
        """What a Guard asks of a shaping that `needs_network`; see `Detector.network_batch`."""
        return classifier(images)

    def _fitted(self, name: str) -> Tensor:
        if name not in self._buffers:
            kind = type(self).__name__
            raise NotFittedError(f"{kind} has seen no training data: fit Shaped({kind}(), detector)")
        tensor: Tensor = getattr(self, name)
        return tensor


class ReAct(Shaping):
    """Activations clipped at a percentile of all training activations (Sun et al., 2021): min(z, c). O(P) a sample.

    Args:
        percentile: percent of all activations of the training data that lie below c. 90 is the original's; the fDBD
            paper's experiments take 80.

    >>> react = ReAct(80)
    >>> react.set(threshold=torch.tensor(1.0))
    >>> react(torch.tensor([[0.5, 3.0]]))
    tensor([[0.5000, 1.0000]])
    """

    name = "react"
    paper = Paper("ReAct: Out-of-distribution Detection With Rectified Activations", "Sun et al.", "NeurIPS", 2021)
    learns = True

    def __init__(self, percentile: float = 90.0) -> None:
        super().__init__()
        self.percentile = _percent("percentile", percentile)

    def passes(self, head: Head) -> Passes:
        histogram = yield Histogram()
        self.set(threshold=torch.tensor(histogram.quantile(self.percentile / 100), dtype=torch.float64))

    def forward(self, features: Tensor) -> Tensor:
        return torch.minimum(features, self._fitted("threshold").to(features.device))


class VRA(Shaping):
    """Low activations removed, high ones clipped (Xu et al., 2023): 0 below α, z between, β above β. O(P) a sample.

    α and β are percentiles of each feature's own training activations, found in two passes to a relative 2⁻¹²; fitting
    keeps counts of O(P), no samples.

    Args:
        low: percent of a feature's activations below its α; 60 is the authors' for CIFAR.
        high: percent below its β; the authors take 90 for CIFAR-10 and 95 for CIFAR-100.
    """

    name = "vra"
    paper = Paper(
        "VRA: Variational Rectified Activation for Out-of-distribution Detection", "Xu et al.", "NeurIPS", 2023
    )
    learns = True

    def __init__(self, low: float = 60.0, high: float = 95.0) -> None:
        super().__init__()
        self.low, self.high = _percent("low", low), _percent("high", high)
        if self.low > self.high:
            raise ValueError(f"low is {low} and high is {high}, expected low to be at most high")

    def passes(self, head: Head) -> Passes:
        coarse = yield _FeatureBins(head.num_features)
        # As the authors do, between the two order statistics next to the percentile.
        positions = [percent / 100 * (coarse.count - 1) for percent in (self.low, self.high)]
        ranks = [min(int(position) + step, coarse.count - 1) for position in positions for step in (0, 1)]
        places = [coarse.find(rank) for rank in ranks]
        fine = yield _FeatureBins(head.num_features, torch.stack([cell for cell, _ in places]))
        values = [fine.value(level, rank) for level, (_, rank) in enumerate(places)]
        alpha = torch.lerp(values[0], values[1], positions[0] % 1)
        beta = torch.lerp(values[2], values[3], positions[1] % 1)
        if self.fit_dtype == torch.float64:  # bins are float32's: what was rounded up to alpha is not below
            alpha = torch.nextafter(alpha.float(), torch.tensor(-torch.inf)).double()
        self.set(alpha=alpha, beta=beta)

    def forward(self, features: Tensor) -> Tensor:
        alpha, beta = self._fitted("alpha").to(features.device), self._fitted("beta").to(features.device)
        return torch.minimum(features, beta).masked_fill(features < alpha, 0)


class _TopShare(Shaping):
    """Shapings by the sample's own largest activations: all but the lowest `percentile` percent of its P features."""

    def __init__(self, percentile: float) -> None:
        super().__init__()
        self.percentile = _percent("percentile", percentile)

    def kept(self, features: Tensor) -> int:
        """k, how many of P activations are not pruned: P − round(P · percentile / 100), at least one."""
        width = features.shape[1]
        return max(1, width - round(width * self.percentile / 100))

    def ratio(self, features: Tensor, top: Tensor | None = None) -> Tensor:
        """(N, 1) sum of all activations over `top` (N, 1), the sum of the k largest; 1 where the latter is 0."""
        top = largest(features, self.kept(features))[1] if top is None else top
        total = features.sum(dim=1, keepdim=True)
        return torch.where(top == 0, 1, total / torch.where(top == 0, 1, top))


class ASHP(_TopShare):
    """All but a sample's largest activations pruned to 0, the rest kept (ASH-P, Djurisic et al., 2023). O(P) a
    sample.

    Args:
        percentile: percent of the sample's P activations to prune; 65 is that of the authors' code. Ties go to the
            lower index.

    >>> ASHP(50)(torch.tensor([[1.0, 4.0, 3.0, 2.0]]))
    tensor([[0., 4., 3., 0.]])
    """

    name = "ash-p"
    paper = ASH_PAPER

    def __init__(self, percentile: float = 65.0) -> None:
        super().__init__(percentile)

    def forward(self, features: Tensor) -> Tensor:
        return prune(features, self.kept(features))


class ASHB(_TopShare):
    """All but a sample's k largest activations pruned to 0, the rest set to one value that keeps the sum: Σz / k
    (ASH-B, Djurisic et al., 2023). O(P) a sample.

    Args:
        percentile: percent of the sample's P activations to prune; 65 is that of the authors' code. Ties go to the
            lower index.

    >>> ASHB(50)(torch.tensor([[1.0, 4.0, 3.0, 2.0]]))
    tensor([[0., 5., 5., 0.]])
    """

    name = "ash-b"
    paper = ASH_PAPER

    def __init__(self, percentile: float = 65.0) -> None:
        super().__init__(percentile)

    def forward(self, features: Tensor) -> Tensor:
        k = self.kept(features)
        return prune(features, k, features.sum(dim=1, keepdim=True) / k)


class ASHS(_TopShare):
    """All but a sample's k largest activations pruned to 0, the rest scaled by exp(Σz / Σ of the k largest)
    (ASH-S, Djurisic et al., 2023). Made for features that are not negative, as those after a ReLU. O(P) a sample.

    Args:
        percentile: percent of the sample's P activations to prune; 90 is that of the authors' configs.
    """

    name = "ash-s"
    paper = ASH_PAPER

    def __init__(self, percentile: float = 90.0) -> None:
        super().__init__(percentile)

    def forward(self, features: Tensor) -> Tensor:
        k = self.kept(features)
        kth, top = largest(features, k)
        return prune(features, k, kth=kth) * self.ratio(features, top).exp()


class SCALE(_TopShare):
    """All activations scaled by exp(Σz / Σ of the k largest), none pruned (Xu et al., 2024). Made for features that are
    not negative, as those after a ReLU. O(P) a sample.

    Args:
        percentile: percent of the sample's P activations that are not among the k largest; 85 is the authors' for
            ImageNet.

    >>> SCALE(50)(torch.tensor([[1.0, 3.0]])) / torch.tensor(4 / 3).exp()
    tensor([[1., 3.]])
    """

    name = "scale"
    paper = Paper(
        "Scaling for Training Time and Post-hoc Out-of-distribution Detection Enhancement", "Xu et al.", "ICLR", 2024
    )

    def __init__(self, percentile: float = 85.0) -> None:
        super().__init__(percentile)

    def forward(self, features: Tensor) -> Tensor:
        return features * self.ratio(features).exp()


class LTS(_TopShare):
    """Logits scaled by (Σz / Σ of the k largest)², over the positive activations (Djurisic et al., 2024).

    Features stay as they are, so it means something only for detectors that read the logits' size (Energy, MSP, …), not
    for those that take just the predicted class from them, such as fDBD. O(P) a sample.

    Args:
        percentile: percent of the sample's P activations that are not among the k largest; the paper's top 5 % is 95.
    """

    name = "lts"
    paper = Paper("Logit Scaling for Out-of-Distribution Detection", "Djurisic et al.", "arXiv", 2024)
    reads = ("features", "logits")
    touches = "logits"

    def __init__(self, percentile: float = 95.0) -> None:
        super().__init__(percentile)

    def forward(self, features: Tensor) -> Tensor:
        return features

    def shape(self, batch: Batch) -> Batch:
        assert batch.logits is not None
        return batch._replace(logits=batch.logits * self.ratio(batch.features.relu()).square())


def largest(features: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(N, 1) the k-th largest of each row of (N, P), and (N, 1) the sum of the k largest."""
    if not is_plain(features):
        top = features.topk(k, dim=1).values
        return top[:, -1:], top.sum(dim=1, keepdim=True)
    # numpy selects with vector instructions, several times faster than torch's topk or kthvalue.
    rows = features.detach().numpy()
    kth, sums = np.empty((len(rows), 1), rows.dtype), np.empty((len(rows), 1), rows.dtype)
    cut = rows.shape[1] - k
    for start in range(0, len(rows), 1024):
        top_rows = np.partition(rows[start : start + 1024], cut, axis=1)[:, cut:]
        kth[start : start + 1024, 0] = top_rows[:, 0]
        top_rows.sum(axis=1, keepdims=True, out=sums[start : start + 1024])
    return torch.from_numpy(kth), torch.from_numpy(sums)


def prune(features: Tensor, k: int, fill: Tensor | None = None, kth: Tensor | None = None) -> Tensor:
    """Features (N, P) with all but the k largest of each row set to 0, ties going to the lower index. `fill` (N, 1)
    replaces the kept values; `kth` (N, 1) is the k-th largest where it is known."""
    if not is_plain(features):
        if tracing():  # graphs have no stable sort; ONNX promises the order of ties for topk, which torch does not
            values, indices = features.topk(k, dim=1)
        else:
            values, indices = (part[:, :k] for part in features.sort(dim=1, descending=True, stable=True))
        return torch.zeros_like(features).scatter(1, indices, values if fill is None else fill.expand(-1, k))
    kth = largest(features, k)[0] if kth is None else kth
    below = features < kth
    pruned = (features if fill is None else fill.expand_as(features)).masked_fill(below, 0)
    tied = features.shape[1] - below.sum(dim=1) > k
    if fill is None:
        tied &= kth[:, 0] != 0  # whether a zero is kept or pruned, it stays 0
    if tied.any():
        rows, bound = features[tied], kth[tied]
        above, equal = rows > bound, rows == bound
        keep = above | (equal & (equal.cumsum(dim=1) <= k - above.sum(dim=1, keepdim=True)))
        pruned[tied] = torch.where(keep, rows if fill is None else fill[tied], 0)
    return pruned


def _percent(name: str, value: float) -> float:
    if not 0 <= value < 100:
        raise ValueError(f"{name} is {value}, expected percent from 0 to below 100 (90, not 0.9)")
    return float(value)


_COARSE, _FINE = 11, 10
"""Leading bits of a float32 that the first pass counts by (sign, exponent, two of the mantissa), and the second's."""
_ROWS_AT_A_TIME = 4096


class _FeatureBins:
    """Counts of each feature's values by the leading bits of their float32 pattern, or, for values whose leading bits
    are `cells` (L, P), by the bits that follow: two such passes find L order statistics of every feature."""

    def __init__(self, num_features: int, cells: Tensor | None = None) -> None:
        self.cells = cells
        self.count = 0
        levels, bins = (1, 1 << _COARSE) if cells is None else (len(cells), 1 << _FINE)
        self.counts = torch.zeros(levels, num_features, bins, dtype=torch.int64)

    def update(self, batch: Batch) -> None:
        self.count += batch.features.shape[0]
        width, bins = self.counts.shape[1:]
        columns = np.arange(width) * bins
        for piece in batch.features.split(_ROWS_AT_A_TIME):
            keys = ordered_bits(piece) >> (32 - _COARSE)
            keys += 1 << _COARSE - 1
            if self.cells is None:
                places = [(keys + columns).reshape(-1)]
            else:
                following = ((ordered_bits(piece) >> (32 - _COARSE - _FINE)) & (bins - 1)) + columns
                places = [following[keys == cell] for cell in self.cells.numpy()]
            for level, found in enumerate(places):
                self.counts[level] += torch.from_numpy(np.bincount(found, minlength=width * bins).reshape(width, bins))

    def merge(self, other: Self) -> None:
        self.count += other.count
        self.counts += other.counts

    def find(self, rank: int | Tensor, level: int = 0) -> tuple[Tensor, Tensor]:
        """(P,) the bin that holds each feature's value of this rank, and its rank within the bin."""
        rank = torch.as_tensor(rank).expand(self.counts.shape[1]).contiguous()
        cumulative = self.counts[level].cumsum(dim=1)
        index = torch.searchsorted(cumulative, rank[:, None], right=True)
        before = torch.where(index > 0, cumulative.gather(1, (index - 1).clamp_min(0)), 0)
        return index[:, 0], rank - before[:, 0]

    def value(self, level: int, rank: Tensor) -> Tensor:
        """(P,) float64 value of this rank within the cells of a level: the least of its bin, so that what is equal to
        it is not below."""
        assert self.cells is not None
        rest = 32 - _COARSE - _FINE
        keys = (self.cells[level] << _FINE) + self.find(rank, level)[0] << rest
        bits = torch.where(keys >= 1 << 31, keys - (1 << 31), -1 - keys)
        values = bits.to(torch.int32).view(torch.float32)
        return torch.where(values.abs() < torch.finfo(torch.float32).tiny, 0, values).to(torch.float64)
