"""Exact projection of features on decision regions: one small non-negative least-squares problem a (sample, class).

min ‖y‖ subject to (w_c − w_j)·y ≥ logit_j − logit_c for all j is solved in the row space of the weight differences, of
dimension r ≤ C − 1, through NNLS on the (r + 1) × (C − 1) matrix of Lawson and Hanson.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from fdbd.kernels.fused import compiled
from fdbd.kernels.team import over_rows

# Distances are measured in units of the closed form, which bounds them from below, so a residual of 1e-14 stands for a
# region ten million times farther away than its hyperplane: none that can be told from empty in float64.
_EMPTY = 1e-14
_TOLERANCE = 1e-11


def _jit(function: Any) -> Any:
    return compiled(numba.njit, function)


def exact_distances(weight: Tensor, bias: Tensor, logits: Tensor, predicted: Tensor, closed: Tensor) -> Tensor:
    """(N, C) float64 distances to each class's region; see `geometry.exact_distances` for the convention."""
    coordinates = _row_space((weight - weight.mean(dim=0)).numpy())
    # Classes of equal weights differ by their biases alone; their logits differ by rounding too.
    twins = np.unique(weight.numpy(), axis=0, return_inverse=True)[1].reshape(-1)
    out = np.empty(tuple(logits.shape))
    arguments = (coordinates, bias.numpy(), twins, logits.numpy(), predicted.numpy(), closed.numpy(), out)
    over_rows(logits.shape[0], lambda start, stop: _project_rows(*arguments, start, stop))
    return torch.from_numpy(out)


def _row_space(rows: Any) -> Any:
    """(C, r) coordinates of the rows in an orthonormal basis of their span."""
    left, values, _ = np.linalg.svd(rows, full_matrices=False)
    rank = max(1, int((values > values[0] * 1e-12).sum())) if len(values) else 0
    return np.ascontiguousarray(left[:, :rank] * values[:rank])


@_jit
def _project_rows(
    weight: Any, bias: Any, twins: Any, logits: Any, predicted: Any, closed: Any, out: Any, start: int, stop: int
) -> None:
    classes, rank = weight.shape
    columns = np.empty((classes - 1, rank + 1))
    for i in range(start, stop):
        for c in range(classes):
            if c == predicted[i]:
                out[i, c] = np.nan
            elif not np.isfinite(closed[i, c]):
                out[i, c] = np.inf
            else:
                out[i, c] = _project(weight, bias, twins, logits[i], predicted[i], closed[i, c], c, columns)


@_jit
def _project(weight: Any, bias: Any, twins: Any, logits: Any, k: int, closed: float, c: int, columns: Any) -> float:
    """Distance to the region of class c; `closed` is the distance to its hyperplane against class k."""
    classes, rank = weight.shape
    # Step to that hyperplane and a hair beyond: if class c wins there, the closed form is exact.
    length = 0.0
    for d in range(rank):
        length += (weight[c, d] - weight[k, d]) ** 2
    wins = True
    for j in range(classes):
        if twins[j] == twins[c]:
            if bias[j] > bias[c]:
                return np.inf  # j wins wherever c could
        elif j != k:
            step = 0.0
            for d in range(rank):
                step += (weight[c, d] - weight[j, d]) * (weight[c, d] - weight[k, d])
            step *= closed / np.sqrt(length)
            rounding = 1e-12 * (abs(logits[c]) + abs(logits[j]) + abs(step))
            wins = wins and logits[c] - logits[j] + step >= -rounding
    if wins:
        return closed
    scale = closed if closed > 0 else 1.0
    column = 0
    for j in range(classes):
        if j != c:
            size = 0.0
            for d in range(rank):
                columns[column, d] = weight[c, d] - weight[j, d]
                size += columns[column, d] ** 2
            columns[column, rank] = (logits[j] - logits[c]) / scale
            # Constraints may be scaled freely: unit normals. A twin of c asks for nothing.
            size = np.inf if twins[j] == twins[c] else np.sqrt(size)
            for d in range(rank + 1):
                columns[column, d] /= size
            column += 1
    residual = _nnls_residual(columns)
    # residual = E u − f, so its last entry is −‖residual‖² and the step is y = residual[:r] / −residual[r].
    length = 0.0
    for d in range(rank):
        length += residual[d] ** 2
    squares = length + residual[rank] ** 2
    if squares < _EMPTY:
        return np.inf
    return float(max(np.sqrt(length) / squares * scale, closed))


@_jit
def _nnls_residual(columns: Any) -> Any:
    """E u − f for the u ≥ 0 that minimises ‖E u − f‖, f = (0, …, 0, 1), E given by its columns: Lawson and Hanson's
    active-set method."""
    width, height = columns.shape
    solution = np.zeros(width)
    blocked = np.zeros(width, dtype=np.bool_)
    chosen = np.empty(width, dtype=np.int64)  # the passive set, in the order in which columns entered it
    count = 0
    trial = np.empty(width)
    residual = np.zeros(height)
    residual[height - 1] = -1.0
    for _ in range(3 * width + 10):
        best, steepest = -1, _TOLERANCE
        for j in range(width):
            if solution[j] == 0.0 and not blocked[j]:
                descent = -_dot(columns[j], residual) / np.sqrt(_dot(columns[j], columns[j]) + 1e-300)
                if descent > steepest:
                    best, steepest = j, descent
        if best < 0:
            break
        chosen[count] = best
        count += 1
        while True:
            _least_squares(columns, chosen, count, trial)
            if solution[best] == 0.0 and trial[count - 1] <= 0:
                blocked[best] = True  # rounding made this direction look like a descent: leave it out for good
                count -= 1
                break
            fraction = 1.0
            for p in range(count):
                if trial[p] <= 0:
                    fraction = min(fraction, solution[chosen[p]] / (solution[chosen[p]] - trial[p]))
            kept = 0
            for p in range(count):
                j = chosen[p]
                solution[j] += fraction * (trial[p] - solution[j])
                if trial[p] <= 0 and solution[j] <= 1e-14:
                    solution[j] = 0.0
                else:
                    chosen[kept] = j
                    kept += 1
            if kept == count:
                break
            count = kept
        for d in range(height):
            residual[d] = -1.0 if d == height - 1 else 0.0
            for p in range(count):
                residual[d] += solution[chosen[p]] * columns[chosen[p], d]
    return residual


@_jit
def _least_squares(columns: Any, chosen: Any, count: int, out: Any) -> None:
    """Fill out[:count] with the unconstrained solution on so many chosen columns for the right-hand side (0, …, 0, 1);
    0 for a column that depends on those before it. By Gram and Schmidt, each column orthogonalised twice."""
    height = columns.shape[1]
    basis = np.empty((count, height))
    upper = np.zeros((count, count))
    for p in range(count):
        for d in range(height):
            basis[p, d] = columns[chosen[p], d]
        size = np.sqrt(_dot(basis[p], basis[p]))
        for _ in range(2):
            for q in range(p):
                share = _dot(basis[q], basis[p])
                upper[q, p] += share
                for d in range(height):
                    basis[p, d] -= share * basis[q, d]
        upper[p, p] = np.sqrt(_dot(basis[p], basis[p]))
        if upper[p, p] <= 1e-13 * size:
            upper[p, p] = 0.0
        for d in range(height):
            basis[p, d] = basis[p, d] / upper[p, p] if upper[p, p] > 0 else 0.0
    for p in range(count - 1, -1, -1):
        out[p] = basis[p, height - 1]
        for q in range(p + 1, count):
            out[p] -= upper[p, q] * out[q]
        out[p] = out[p] / upper[p, p] if upper[p, p] > 0 else 0.0


@_jit
def _dot(a: Any, b: Any) -> float:
    total = 0.0
    for d in range(len(a)):
        total += a[d] * b[d]
    return total
