"""Linear algebra that several detectors share: whitening, unit rows, blocks of rows, the largest
inner products."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fdbd.util.torch_compat import is_plain, tracing

VARIANCE_FLOOR = 1e-12
"""Variances below this share of the largest one are rounding errors of float32 features, and count
as zero."""
ROUNDING = 1e-13
"""Variances below this share of the total one are rounding errors of float64 sums."""
SMALLEST_NORM = 1e-12
"""A row with a smaller norm has no direction."""
_QUERIES = 1024
_POINTS = 1 << 13
"""Rows and points of a block of inner products, which takes 32 MB."""
_ELEMENTS = 1 << 21
"""Elements of a block of rows: 8 MB, which fit the cache."""


def unit(rows: Tensor) -> Tensor:
    """Rows (…, P) divided by their Euclidean norms; a row of zeros stays zero."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return rows / norms.clamp_min(SMALLEST_NORM)


def whitener(covariance: Tensor, total: Tensor | float = 0.0) -> Tensor:
    """(P, P) float64 W with WᵀW = Σ⁺, the pseudo-inverse of the covariance Σ: ‖W(x − y)‖ is the
    Mahalanobis distance.

    Directions whose variance is below `VARIANCE_FLOOR` of the largest are left out of the distance,
    as ``pinv`` and scikit-learn's ``EmpiricalCovariance`` do. If Σ is what a subtraction left of a
    larger covariance, `total` is the trace of the larger one, and variances below `ROUNDING` of it
    are left out too.
    """
    covariance = covariance.to(torch.float64)
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if not failed:
        identity = torch.eye(len(factor), dtype=torch.float64)
        inverse: Tensor = torch.linalg.solve_triangular(factor, identity, upper=False)
        # The trace bounds the largest variance from above, and 1/‖L⁻¹‖² the smallest from below: if
        # the second is above the floor of the first, no direction is left out.
        highest_floor = max(VARIANCE_FLOOR * covariance.trace(), ROUNDING * total)
        if inverse.square().sum() * highest_floor < 1:
            return inverse
    variances, directions = torch.linalg.eigh(covariance)
    floor = max(VARIANCE_FLOOR * variances[-1].clamp_min(0), ROUNDING * total)
    kept = variances > floor
    if not kept.any():
        remedy = "give more samples per class, or use a detector without a covariance"
        raise ValueError(
            f"the training features do not vary within their classes or clusters; {remedy}"
        )
    directions = directions[:, kept]
    symmetric: Tensor = (directions / variances[kept].sqrt()) @ directions.T
    return symmetric


def eigenvectors(matrix: Tensor) -> Tensor:
    """(P, P) eigenvectors of a symmetric positive semidefinite float64 matrix, as columns by
    ascending eigenvalue.

    Two choices that a solver leaves open, the basis of the null space and the signs, are made here,
    so that the eigenvectors change little when the matrix is rounded."""
    values, directions = torch.linalg.eigh(matrix)
    is_null = values <= VARIANCE_FLOOR * values[-1].clamp_min(0)
    count = int(is_null.sum())
    if count > 1:
        # Any rotation of these directions is a basis of the null space. Of all, take the
        # eigenvectors of a fixed matrix with distinct eigenvalues, restricted to that space.
        null = directions[:, :count]
        fixed_diagonal = torch.linspace(1, 2, len(matrix), dtype=matrix.dtype)
        restricted = null.T @ (fixed_diagonal[:, None] * null)
        rotation = torch.linalg.eigh(restricted).eigenvectors
        directions = torch.cat([null @ rotation, directions[:, count:]], dim=1)
    # The component of largest magnitude of each eigenvector is to be positive.
    largest = directions.gather(0, directions.abs().argmax(dim=0, keepdim=True))
    return torch.where(largest < 0, -directions, directions)


def largest(rows: Tensor, k: int) -> Tensor:
    """(N, k) the largest values of each row (N, P), in any order.

    >>> largest(torch.tensor([[3.0, 1.0, 2.0]]), 2).sum()
    tensor(5.)
    """
    if not is_plain(rows):
        return rows.topk(k, dim=1, sorted=False).values
    # numpy selects with vector instructions, ten times as fast as torch.
    first = rows.shape[1] - k
    return torch.from_numpy(np.partition(rows.detach().numpy(), first, axis=1)[:, first:])


def in_blocks(function: Callable[[Tensor], Tensor], rows: Tensor, width: int) -> Tensor:
    """function(rows) (N,), computed in blocks of rows for which the function's (N, width) array
    takes about 8 MB."""
    size = max(64, _ELEMENTS // max(width, 1))
    if tracing() or rows.shape[0] <= size:
        return function(rows)
    return torch.cat([function(block) for block in torch.split(rows, size)])


def largest_products(rows: Tensor, points: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k (at most M) largest inner products of each row (N, P) with the points (M, P), and the
    points' indices: both (N, k), in no particular order. Exact, block by block: memory is bounded
    for any N and M."""
    k = min(k, points.shape[0])
    if tracing():
        values, indices = (rows @ points.T).topk(k, dim=1)
        return values, indices
    all_values = []
    all_indices = []
    for block in torch.split(rows, _QUERIES):
        values, indices = _search(block, points, k)
        all_values.append(values)
        all_indices.append(indices)
    return torch.cat(all_values), torch.cat(all_indices)


def _search(rows: Tensor, points: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`largest_products` of one block of rows: the largest of each block of points, and of those
    the largest."""
    best_values = []
    best_indices = []
    for start in range(0, points.shape[0], _POINTS):
        products = rows @ points[start : start + _POINTS].T
        if k == 1:
            values, indices = products.max(1, keepdim=True)
        else:
            values, indices = products.topk(min(k, products.shape[1]), dim=1, sorted=False)
        best_values.append(values)
        best_indices.append(indices + start)
    values, chosen = torch.cat(best_values, dim=1).topk(k, dim=1, sorted=False)
    return values, torch.cat(best_indices, dim=1).gather(1, chosen)
