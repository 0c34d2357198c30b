"""The paper's model of features: class means at the corners of a simplex, and points drawn on spheres around them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ANGLES = 4001


def simplex_etf(classes: int, width: int) -> Tensor:
    """(C, P) float64 unit vectors with inner products −1/(C − 1): a simplex equiangular tight frame.

    >>> means = simplex_etf(3, 5)
    >>> torch.allclose(means @ means.T, torch.eye(3, dtype=torch.float64) * 1.5 - 0.5)
    True
    """
    if width < classes - 1:
        raise ValueError(f"{classes} class means of a simplex need {classes - 1} dimensions, not {width}")
    # The rows of Helmert's orthonormal basis of the vectors that sum to zero, written out: a singular value
    # decomposition would be degenerate here and give another frame on every machine.
    column = torch.arange(1, classes, dtype=torch.float64)
    row = torch.arange(classes)[:, None]
    corners = (row < column).double() - column * (row == column)
    corners = corners / (column * (column + 1)).sqrt() * math.sqrt(classes / (classes - 1))
    return torch.nn.functional.pad(corners, (0, width - classes + 1))


def boundary_distance(points: Tensor, means: Tensor, bias: Tensor | None = None) -> Tensor:
    """(N,) d(z, S) of points (N, P): to the nearest boundary of the region argmax ⟨μ_i, z⟩ (+ bias_i) they lie in."""
    logits = points @ means.T if bias is None else points @ means.T + bias
    own, predicted = logits.max(dim=1)
    norms = torch.cdist(means, means, compute_mode="donot_use_mm_for_euclid_dist")[predicted]
    gaps = (own[:, None] - logits) / norms.masked_fill(norms == 0, 1)
    nearest: Tensor = gaps.scatter(1, predicted[:, None], torch.inf).amin(dim=1)
    return nearest


def sphere(count: int, width: int, generator: torch.Generator) -> Tensor:
    """(N, P) float64 points, uniform on the unit sphere."""
    points = torch.randn(count, width, generator=generator, dtype=torch.float64)
    unit: Tensor = points / torch.linalg.vector_norm(points, dim=1, keepdim=True)
    return unit


def band(count: int, axis: Tensor, low: float, high: float, generator: torch.Generator) -> Tensor:
    """(N, P) points of the unit sphere, uniform among those whose angle with the unit vector `axis` is in [low, high].

    The angle is drawn from its density ∝ sin^(P−2), tabled in logarithms; rejection would find no point of a cap from
    about twenty dimensions on.
    """
    width = len(axis)
    angles = torch.linspace(low, high, _ANGLES, dtype=torch.float64)
    middle = (angles[1:] + angles[:-1]) / 2
    logs = (width - 2) * middle.sin().clamp_min(1e-300).log()
    steps = (logs - logs.max()).exp().cumsum(dim=0)
    chosen = torch.rand(count, generator=generator, dtype=torch.float64) * steps[-1]
    cell = torch.searchsorted(steps, chosen).clamp_max(_ANGLES - 2)
    within = torch.rand(count, generator=generator, dtype=torch.float64)
    angle = angles[cell] + within * (angles[1] - angles[0])
    across = torch.randn(count, width, generator=generator, dtype=torch.float64)
    across = across - (across @ axis)[:, None] * axis
    across = across / torch.linalg.vector_norm(across, dim=1, keepdim=True)
    points: Tensor = angle.cos()[:, None] * axis + angle.sin()[:, None] * across
    return points


def cap_angle(radius: float, norm: float, reach: float) -> float:
    """Angle up to which points of the sphere of `radius` are within `reach` of a mean at distance `norm`; NaN: none."""
    cosine = (radius**2 + norm**2 - reach**2) / (2 * radius * norm)
    return math.nan if cosine > 1 else math.acos(max(cosine, -1.0))


def separation_limit(classes: int) -> float:
    """The largest 2σ, in units of ‖μ_i‖, for which each dense region lies within its decision region: the distance
    √(C / (2(C − 1))) of a class mean to its boundaries.

    >>> separation_limit(2)
    1.0
    """
    return math.sqrt(classes / (2 * (classes - 1)))
