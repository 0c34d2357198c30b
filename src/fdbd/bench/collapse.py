"""How far the features of a network have collapsed onto their class means, which the choice of a
detector depends on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fdbd.data.features import FeatureSet
from fdbd.fitting.statistics import ClassMoments


def collapse_ratio(train: FeatureSet, moments: ClassMoments | None = None) -> float | None:
    """Variance of the training features within classes, divided by that between classes; from the
    samples at hand, or from the moments of the full training set. None without labels, and for
    fewer than two classes or one sample per class."""
    if moments is not None:
        return _of_moments(moments)
    if train.labels is None:
        return None
    known = train.labels >= 0
    try:
        return collapse(train.features[known].double(), train.labels[known])
    except ValueError:
        return None


def collapse(features: Tensor, labels: Tensor) -> float:
    """The collapse ratio of features (N, P) with labels (N,): the trace of the covariance within
    classes, divided by that of the covariance between them.

    Both are without bias for any number of samples per class from two on (the components of a
    one-way analysis of variance), so that networks fitted on two photographs per class and on
    thousands can be compared.

    >>> features = torch.tensor([[0.0], [1.0], [4.0], [5.0]], dtype=torch.float64)
    >>> round(collapse(features, torch.tensor([0, 0, 1, 1])), 4)
    0.0645
    """
    classes, places, counts = labels.unique(return_inverse=True, return_counts=True)
    if len(classes) < 2 or len(features) <= len(classes):
        raise ValueError(
            f"{len(features)} samples of {len(classes)} classes: expected two classes, with "
            "several each"
        )
    means = torch.zeros(len(classes), features.shape[1], dtype=features.dtype)
    means.index_add_(0, places, features)
    means /= counts[:, None]
    squares_within = float(((features - means[places]) ** 2).sum())
    centre = features.mean(dim=0)
    squares_between = float((counts[:, None] * (means - centre) ** 2).sum())
    return _ratio(squares_within, squares_between, counts.double())


def _of_moments(moments: ClassMoments) -> float | None:
    counts = moments.counts.double()
    present = counts > 0
    if int(present.sum()) < 2 or moments.count <= int(present.sum()):
        return None
    totals = moments.totals[present].double()
    counts = counts[present]
    means = totals / counts[:, None]
    centre = totals.sum(dim=0) / counts.sum()
    squares_between = float((counts[:, None] * (means - centre) ** 2).sum())
    squares_within = float(moments.scatter.diagonal().sum()) - squares_between
    return _ratio(squares_within, squares_between, counts)


def _ratio(squares_within: float, squares_between: float, counts: Tensor) -> float:
    """The components of variance from the sums of squares within and between classes."""
    total = float(counts.sum())
    groups = len(counts)
    within = squares_within / (total - groups)
    # Class sizes as the analysis of variance weighs them; n if all classes have n samples.
    size = (total - float((counts**2).sum()) / total) / (groups - 1)
    between = (squares_between / (groups - 1) - within) / size
    if between <= 0:
        return math.inf
    return within / between
