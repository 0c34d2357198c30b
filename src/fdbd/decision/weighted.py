"""Conformal p-values under a known shift between calibration data and new data."""

from __future__ import annotations

import torch
from torch import Tensor

from fdbd.core.batch import ArrayLike, as_floats


def weighted_p_values(
    calibration: ArrayLike,
    calibration_ratios: ArrayLike,
    scores: ArrayLike,
    ratios: ArrayLike,
) -> Tensor:
    """(N,) conformal p-values for new data from another distribution than the calibration data,
    if the likelihood ratio w(x) of new to calibration data is known:

        p = (Σ_{i: s_i ≤ s} w_i + w) / (Σ_i w_i + w)

    If the new in-distribution samples differ from the calibration samples by this ratio alone
    (covariate shift), p ≤ alpha with probability at most alpha, over the draw of both (Tibshirani,
    Foygel Barber, Candès & Ramdas, "Conformal prediction under covariate shift", NeurIPS 2019). The
    ratio may come from a classifier of new against calibration data, or from known sampling rates;
    the promise is only as good as the ratio, and it must not be estimated from the samples that it
    is used for. A common factor does not matter. Equal ratios give `Threshold.p_values`.

    Args:
        calibration: (n,) scores of calibration samples; higher is more in-distribution.
        calibration_ratios: (n,) their ratios, finite and at least 0.
        scores: (N,) scores of new samples. One that is not finite ranks lowest.
        ratios: (N,) their ratios.

    >>> weighted_p_values([1.0, 2.0, 3.0], [1.0, 1.0, 2.0], [2.5], [1.0])
    tensor([0.6000], dtype=torch.float64)
    """
    known = _vector(calibration, "calibration")
    known_ratios = _ratios(calibration_ratios, "calibration_ratios", len(known))
    asked = _vector(scores, "scores")
    own = _ratios(ratios, "ratios", len(asked))
    if not len(known) or not torch.isfinite(known).all():
        raise ValueError("calibration scores are expected to be finite, at least one")
    asked = torch.where(asked < torch.inf, asked, -torch.inf)
    ascending, order = known.sort()
    sums = known_ratios[order].cumsum(0)
    total = sums[-1]
    # The weight of all calibration scores at or below each score.
    below = torch.cat([sums.new_zeros(1), sums])[torch.searchsorted(ascending, asked, right=True)]
    mass = total + own
    # A sample without any weight around it says nothing: it is as ordinary as can be.
    p_values = torch.where(mass > 0, (below + own) / mass, 1.0)
    # A score that is not finite is out-of-distribution whatever its ratio.
    return torch.where(torch.isfinite(asked), p_values, 0.0)


def effective_samples(calibration_ratios: ArrayLike) -> float:
    """How many unweighted samples carry as much as these: (Σ w)² / Σ w². If it is small, p-values
    are coarse and depend on a few samples.

    >>> effective_samples([1.0, 1.0, 1.0, 1.0]), effective_samples([1.0, 0.0, 0.0, 0.0])
    (4.0, 1.0)
    """
    values = _vector(calibration_ratios, "calibration_ratios")
    values = _ratios(values, "calibration_ratios", len(values))
    largest = values.max() if len(values) else values.new_zeros(())
    if not largest > 0:
        return 0.0
    values = values / largest
    return float(values.sum().square() / values.square().sum())


def _vector(values: ArrayLike, name: str) -> Tensor:
    vector = as_floats(values, name, torch.float64).detach().cpu()
    if vector.ndim != 1:
        raise ValueError(f"{name} have shape {tuple(vector.shape)}, expected one per sample")
    return vector


def _ratios(values: ArrayLike, name: str, count: int) -> Tensor:
    vector = _vector(values, name)
    if len(vector) != count:
        raise ValueError(f"{name} are {len(vector)}, expected one for each of {count} scores")
    if not (torch.isfinite(vector).all() and (vector >= 0).all()):
        raise ValueError(f"{name} are expected to be finite and at least 0")
    return vector
