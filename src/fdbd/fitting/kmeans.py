"""k-means on normalised features, in passes over mergeable statistics: the order of the data does
not matter."""

from collections.abc import Generator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from fdbd.core.batch import Batch
from fdbd.core.linear_algebra import unit
from fdbd.fitting.statistics import ClassMeans, in_float64, row_hashes
from fdbd.geometry import squared_distances


def kmeans(count: int, width: int, iterations: int) -> Generator[Any, Any, Tensor]:
    """(M, P) float64 centres of M = `count` clusters of features (N, P): a part of a detector's
    `passes`, to be used as ``centers = yield from kmeans(...)``. One pass draws a sample to start
    from, and each iteration takes another pass."""
    sample = yield RandomSample(max(2048, 32 * count))
    centers = initial_centers(sample.rows, count)
    for _ in range(iterations):
        means = yield ClassMeans(count, width, partial(nearest, centers))
        centers = torch.where(means.counts[:, None] > 0, means.means(), centers)
    return centers


class RandomSample:
    """Normalised features of the `count` samples with the smallest hashes: a random sample,
    the same in any order of the data."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.rows = torch.zeros(0, dtype=torch.float64)
        self.hashes = torch.zeros(0, dtype=torch.int64)

    def update(self, batch: Batch) -> None:
        rows = batch.features.detach().cpu()
        self._add(unit(rows).double(), row_hashes(rows))

    def merge(self, other: Self) -> None:
        if len(other.hashes):
            self._add(other.rows, other.hashes)

    def _add(self, rows: Tensor, hashes: Tensor) -> None:
        if len(self.hashes):
            rows = torch.cat([self.rows, rows])
            hashes = torch.cat([self.hashes, hashes])
        smallest = hashes.argsort(stable=True)[: self.count]
        self.rows = rows[smallest]
        self.hashes = hashes[smallest]


def initial_centers(rows: Tensor, count: int) -> Tensor:
    """(M, P) centres of k-means on a sample (S, P), started by k-means++ (Arthur and Vassilvitskii,
    2007) with a fixed seed."""
    # Here, since it takes a second to import.
    from sklearn.cluster import KMeans

    if len(rows) < count:
        raise ValueError(
            f"{count} clusters asked for, but there are only {len(rows)} training samples: ask for "
            "fewer clusters, or give more data"
        )
    found = KMeans(count, n_init=1, max_iter=10, random_state=0).fit(rows.numpy())
    return torch.from_numpy(found.cluster_centers_)


def nearest(centers: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Normalised features (N, P) and the cluster (N,) of each, in float64 so that no split of the
    data breaks a tie."""
    rows = unit(batch.features.detach().cpu())
    clusters = [torch.zeros(0, dtype=torch.int64)]
    for piece in in_float64(rows):
        clusters.append(squared_distances(piece, centers).argmin(dim=1))
    return rows, torch.cat(clusters)
