"""SSD: Mahalanobis distances of normalised features to clusters."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from fdbd.core.linear_algebra import in_blocks, unit, whitener
from fdbd.detectors.base import (
    Batch,
    Head,
    Needs,
    Paper,
    Passes,
    at_least_one,
    expect,
    required_labels,
)
from fdbd.detectors.mds import SharedCovariance, with_unit_features
from fdbd.fitting.kmeans import kmeans, nearest
from fdbd.fitting.sample_size import warn_of_few_for_covariance
from fdbd.fitting.statistics import ClassMoments, Moments, Together, Transformed

LARGEST_TABLE = 1 << 27
"""Entries M·P² of all clusters' covariances above which they share one: 2 GB while fitting, 0.5 GB
kept."""


class SSD(SharedCovariance):
    """Mahalanobis distance of the normalised feature to the nearest cluster (Sehwag et al., 2021).

        score(z) = −min_m (ẑ − μ_m)ᵀ Σ_m⁻¹ (ẑ − μ_m),   ẑ = z/‖z‖

    Clusters are the classes (SSD+, on contrastive features) or come from k-means. Each has its own
    covariance, so a score costs O(MP²). If the M·P² entries of the covariances are more than 2²⁷,
    all clusters share the covariance within clusters, as in `MDSPlusPlus`: O(P² + MP). `covariance`
    says which it was. Clusters without samples are left out.

    Args:
        clusters: "class", or a number M of k-means clusters, for which no labels are needed.
        shrinkage: λ from 0 to 1 in (1 − λ) Σ_m + λ Σ, with the shared Σ: 0 is the original, 1 the
            shared covariance. None: 0 if every cluster has more than P samples; else P/(P + n_m)
            for a cluster of n_m, as if P samples of the shared covariance had been added, since
            covariances of fewer samples are singular.
        iterations: of k-means over the training data, one pass each. It starts from k-means++ on
            the few thousand samples with the smallest hashes, so the result depends neither on
            chance nor on the order of the data.

    >>> features = 4 * torch.eye(3).repeat(20, 1) + torch.rand(60, 3)
    >>> labels = torch.arange(3).repeat(20)
    >>> detector = SSD().fit(Batch(features, None, labels), Head(torch.eye(3)))
    >>> known_and_unknown = Batch(torch.tensor([[4.5, 0.5, 0.5], [1.5, 1.5, 1.5]]))
    >>> detector.score(known_and_unknown).argmax()
    tensor(0)
    """

    name = "ssd"
    paper = Paper(
        "SSD: A Unified Framework for Self-Supervised Outlier Detection",
        "Sehwag et al.",
        "ICLR",
        2021,
    )
    needs = Needs(labels=True, passes=1)
    #: (P, P) if clusters share a covariance, else (M, P, P)
    whitener: Tensor
    shrinkages: Annotated[Tensor, "M"]

    def __init__(
        self,
        clusters: int | Literal["class"] = "class",
        shrinkage: float | None = None,
        iterations: int = 10,
    ) -> None:
        super().__init__()
        is_share = shrinkage is None or 0 <= shrinkage <= 1
        self.shrinkage = expect("shrinkage", shrinkage, is_share, "a number from 0 to 1, or None")
        self.clusters = clusters
        if clusters != "class":
            expected = "'class' or a number of clusters, at least 1"
            self.clusters = at_least_one("clusters", clusters, expected)
        self.iterations = at_least_one("iterations", iterations, "a number of passes, at least 1")
        one_pass = clusters in ("class", 1)
        self.needs = Needs(labels=clusters == "class", passes=1 if one_pass else None)

    def passes(self, head: Head) -> Passes:
        width = head.num_features
        # `to_clusters` normalises the features of a batch and labels them by cluster.
        if self.clusters == "class":
            count = head.num_classes
            to_clusters = with_unit_features
        elif self.clusters == 1:
            count = 1
            # With a single centre, any point will do.
            to_clusters = partial(in_clusters, torch.zeros(1, width, dtype=torch.float64))
        else:
            count = int(self.clusters)
            centers = yield from kmeans(count, width, self.iterations)
            to_clusters = partial(in_clusters, centers)
        num_entries = count * width**2
        if self.shrinkage == 1 or num_entries > LARGEST_TABLE:
            shared = yield Transformed(ClassMoments(count, width), to_clusters)
            self.set_shared_covariance(shared.statistic)
            self.set_buffers(shrinkages=torch.ones(len(self.means)))
        else:
            own = yield Transformed(ClusterMoments(count, width), to_clusters)
            self._set_own_covariances(own.statistic)

    def _set_own_covariances(self, moments: ClusterMoments) -> None:
        """Keep the mean and the whitening matrix of each cluster with samples."""
        seen = [part for part in moments.parts if part.count]
        counts = torch.tensor([part.count for part in seen], dtype=torch.float64)
        means = torch.stack([part.mean() for part in seen])
        total = counts.sum()
        width = means.shape[1]
        warn_of_few_for_covariance(self.label, int(total), width, len(seen))
        pooled = torch.zeros(width, width, dtype=torch.float64)
        for part in seen:
            pooled += part.scatter / total
        center = counts @ means / total
        shrinkages = self._shrinkages(counts, width)
        whiteners = torch.empty(len(seen), width, width, dtype=torch.float64)
        for number, (part, share) in enumerate(zip(seen, shrinkages)):
            covariance = (1 - share) * part.covariance() + share * pooled
            whiteners[number] = whitener(covariance)
        self.set_buffers(
            center=center,
            whitener=whiteners,
            means=torch.einsum("mij,mj->mi", whiteners, means - center),
            shrinkages=shrinkages,
        )

    def _shrinkages(self, counts: Tensor, width: int) -> Tensor:
        """(M,) λ of clusters with these numbers of samples."""
        if self.shrinkage is not None:
            return torch.full_like(counts, self.shrinkage)
        if (counts > width).all():
            return torch.zeros_like(counts)
        return width / (width + counts)

    def buffer_shape(self, name: str) -> str | None:
        if name != "whitener":
            return super().buffer_shape(name)
        return "M P P" if self.whitener.ndim == 3 else "P P"

    @property
    def covariance(self) -> str | None:
        """Once fitted, "own" for one covariance per cluster or "shared" for one in all."""
        if not self.is_fitted:
            return None
        return "own" if self.whitener.ndim == 3 else "shared"

    def extra_repr(self) -> str:
        shown = super().extra_repr()
        if self.is_fitted:
            shown += f", covariance={self.covariance!r}"
        return shown

    def formula(self, batch: Batch) -> Tensor:
        features = unit(batch.features)
        if self.whitener.ndim == 2:
            return -self.shared_distance(features)
        return -in_blocks(self._nearest_cluster, features, self.means.numel())

    def _nearest_cluster(self, features: Tensor) -> Tensor:
        """(N,) squared distance to the nearest cluster, each under its own covariance."""
        # One product for all clusters: rows of W_m x side by side, each cluster's mean subtracted
        # after whitening.
        x = features - self.center
        whitened = torch.nn.functional.linear(x, self.whitener.flatten(0, 1), -self.means.flatten())
        return whitened.view(-1, *self.means.shape).square().sum(dim=2).amin(dim=1)


class ClusterMoments(Together):
    """Moments of each class separately: M·P² numbers."""

    def __init__(self, num_classes: int, num_features: int) -> None:
        super().__init__(Moments(num_features) for _ in range(num_classes))

    def update(self, batch: Batch) -> None:
        labels = required_labels(batch)
        order = labels.argsort(stable=True)
        counts = torch.bincount(labels, minlength=len(self.parts)).tolist()
        for moments, rows in zip(self.parts, torch.split(order, counts)):
            moments.update(Batch(batch.features[rows.to(batch.features.device)]))


def in_clusters(centers: Tensor, batch: Batch) -> Batch:
    """The batch with normalised features, labelled by the nearest of the centres."""
    rows, clusters = nearest(centers, batch)
    return batch._replace(features=rows, labels=clusters)
