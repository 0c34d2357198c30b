"""SSD: Mahalanobis distances of normalised features to clusters."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from fdbd.core.linear_algebra import in_blocks, unit, whitener
from fdbd.detectors.base import (
    Batch,
    Detector,
    Head,
    Needs,
    Paper,
    Passes,
    at_least_one,
    expect,
    labels_of,
)
from fdbd.fitting.kmeans import kmeans, nearest
from fdbd.fitting.statistics import ClassMoments, Moments, Together, Transformed
from fdbd.geometry import nearest_squared_distance

LARGEST_TABLE = 1 << 27
"""Entries M·P² of all clusters' covariances above which they share one: 2 GB while fitting, 0.5 GB
kept."""


class SSD(Detector):
    """Mahalanobis distance of the normalised feature to the nearest cluster (Sehwag et al., 2021).

        score(z) = −min_m (ẑ − μ_m)ᵀ Σ_m⁻¹ (ẑ − μ_m),   ẑ = z/‖z‖

    Clusters are the classes (SSD+, on contrastive features) or come from k-means. Each has its own
    covariance, so a score costs O(MP²). Where the M·P² entries of the covariances are more than
    2²⁷, all clusters share the covariance within clusters: O(P² + MP). `covariance` says which it
    was. Clusters without samples are left out.

    Args:
        clusters: "class", or a number M of k-means clusters, for which no labels are needed.
        shrinkage: λ from 0 to 1 in (1 − λ) Σ_m + λ Σ, with the shared Σ: 0 is the original, 1 the
            shared covariance. None: 0 if every cluster has more than P samples; else P/(P + n_m)
            for a cluster of n_m, as if P samples of the shared covariance had been added, since
            covariances of fewer samples are singular.
        iterations: of k-means over the training data, one pass each. It starts from k-means++ on
            the few thousand samples with the smallest hashes, so the result depends neither on
            chance nor on the order of the data.

    >>> features, labels = 4 * torch.eye(3).repeat(20, 1) + torch.rand(60, 3), torch.arange(3).repeat(20)
    >>> detector = SSD().fit(Batch(features, None, labels), Head(torch.eye(3)))
    >>> detector.score(Batch(torch.tensor([[4.5, 0.5, 0.5], [1.5, 1.5, 1.5]]))).argmax()  # the first is known
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
    center: Annotated[Tensor, "P"]
    whitener: Tensor  #: (P, P) where clusters share a covariance, else (M, P, P)
    means: Annotated[Tensor, "M P"]
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
            self.clusters = at_least_one(
                "clusters", clusters, "'class' or a number of clusters, at least 1"
            )
        self.iterations = at_least_one("iterations", iterations, "a number of passes, at least 1")
        self.needs = Needs(
            labels=clusters == "class", passes=1 if clusters in ("class", 1) else None
        )

    def passes(self, head: Head) -> Passes:
        width = head.num_features
        count = head.num_classes if self.clusters == "class" else int(self.clusters)
        centers: Tensor | None = None
        if self.clusters == 1:
            centers = torch.zeros(1, width, dtype=torch.float64)
        elif self.clusters != "class":
            centers = yield from kmeans(count, width, self.iterations)
        shared = self.shrinkage == 1 or count * width**2 > LARGEST_TABLE
        statistic = ClassMoments if shared else ClusterMoments
        summed = yield Transformed(statistic(count, width), partial(normalised, centers))
        (self._set_shared if shared else self._set_own)(summed.statistic)

    def _set_shared(self, moments: ClassMoments) -> None:
        whitening, means = moments.whitened()
        self.set(
            center=moments.mean(),
            whitener=whitening,
            means=means,
            shrinkages=torch.ones(len(means)),
        )

    def _set_own(self, moments: ClusterMoments) -> None:
        seen = [part for part in moments.parts if part.count]
        counts = torch.tensor([part.count for part in seen], dtype=torch.float64)
        means = torch.stack([part.mean() for part in seen])
        width = means.shape[1]
        pooled = sum(part.scatter / counts.sum() for part in seen)
        if self.shrinkage is not None:
            shrinkages = torch.full_like(counts, self.shrinkage)
        else:
            shrinkages = (
                torch.zeros_like(counts) if (counts > width).all() else width / (width + counts)
            )
        center = counts @ means / counts.sum()
        whiteners = torch.empty(len(seen), width, width, dtype=torch.float64)
        for place, part, share in zip(whiteners, seen, shrinkages):
            place.copy_(whitener((1 - share) * part.covariance() + share * pooled))
        offsets = torch.einsum("mij,mj->mi", whiteners, means - center)
        self.set(center=center, whitener=whiteners, means=offsets, shrinkages=shrinkages)

    def buffer_shape(self, name: str) -> str | None:
        return (
            ("M P P" if self.whitener.ndim == 3 else "P P")
            if name == "whitener"
            else super().buffer_shape(name)
        )

    @property
    def covariance(self) -> str | None:
        """Once fitted, "own" for one covariance per cluster or "shared" for one in all."""
        return None if not self.is_fitted else "own" if self.whitener.ndim == 3 else "shared"

    def extra_repr(self) -> str:
        return super().extra_repr() + (
            f", covariance={self.covariance!r}" if self.is_fitted else ""
        )

    def score(self, batch: Batch) -> Tensor:
        return in_blocks(self._score, batch.features, self.means.numel())

    def _score(self, features: Tensor) -> Tensor:
        x = unit(features) - self.center
        if self.whitener.ndim == 2:
            return -nearest_squared_distance(x @ self.whitener.T, self.means)
        # One product for all clusters: rows of W_m x side by side, each cluster's mean subtracted
        # after whitening.
        whitened = torch.nn.functional.linear(x, self.whitener.flatten(0, 1), -self.means.flatten())
        return -whitened.view(-1, *self.means.shape).square().sum(dim=2).amin(dim=1)


class ClusterMoments(Together):
    """Moments of each class separately: M·P² numbers."""

    def __init__(self, num_classes: int, num_features: int) -> None:
        super().__init__(Moments(num_features) for _ in range(num_classes))

    def update(self, batch: Batch) -> None:
        labels = labels_of(batch)
        order = labels.argsort(stable=True)
        counts = torch.bincount(labels, minlength=len(self.parts)).tolist()
        for moments, rows in zip(self.parts, torch.split(order, counts)):
            moments.update(Batch(batch.features[rows.to(batch.features.device)]))


def normalised(centers: Tensor | None, batch: Batch) -> Batch:
    """The batch with normalised features, labelled by the nearest centre where there are
    centres."""
    if centers is None:
        return batch._replace(features=unit(batch.features))
    rows, clusters = nearest(centers, batch)
    return batch._replace(features=rows, labels=clusters)
