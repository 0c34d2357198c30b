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

from .fused import compiled
from .team import over_rows

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
    matrix = np.empty((rank + 1, classes - 1))
    for i in range(start, stop):
        for c in range(classes):
            if c == predicted[i]:
                out[i, c] = np.nan
            elif not np.isfinite(closed[i, c]):
                out[i, c] = np.inf
            else:
                out[i, c] = _project(weight, bias, twins, logits[i], predicted[i], closed[i, c], c, matrix)


@_jit
def _project(weight: Any, bias: Any, twins: Any, logits: Any, k: int, closed: float, c: int, matrix: Any) -> float:
    """Distance to the region of class c; `closed` is the distance to its hyperplane against class k."""
    classes, rank = weight.shape
    # Step to that hyperplane and a hair beyond: if class c wins there, the closed form is exact.
    normal = weight[c] - weight[k]
    length = np.sqrt((normal * normal).sum())
    scale = closed if closed > 0 else 1.0
    wins = True
    for j in range(classes):
        if twins[j] == twins[c]:
            if bias[j] > bias[c]:
                return np.inf  # j wins wherever c could
        elif j != k:
            step = closed * ((weight[c] - weight[j]) * normal).sum() / length
            rounding = 1e-12 * (abs(logits[c]) + abs(logits[j]) + abs(step))
            wins = wins and logits[c] - logits[j] + step >= -rounding
    if wins:
        return closed
    column = 0
    for j in range(classes):
        if j == c:
            continue
        size = 0.0
        for d in range(rank):
            matrix[d, column] = weight[c, d] - weight[j, d]
            size += matrix[d, column] ** 2
        # Rows of the programme may be scaled freely: unit normals. A twin of c asks for nothing.
        size = np.inf if twins[j] == twins[c] else np.sqrt(size)
        for d in range(rank):
            matrix[d, column] /= size
        matrix[rank, column] = (logits[j] - logits[c]) / scale / size
        column += 1
    residual = _nnls_residual(matrix)
    squares = (residual * residual).sum()
    if squares < _EMPTY:
        return np.inf
    # residual = E u − f, so its last entry is −‖residual‖² and the step is y = residual[:r] / −residual[r].
    step = np.sqrt((residual[:rank] * residual[:rank]).sum()) / squares
    return float(max(step * scale, closed))


@_jit
def _nnls_residual(matrix: Any) -> Any:
    """E u − f for the u ≥ 0 that minimises ‖E u − f‖, f = (0, …, 0, 1): Lawson and Hanson's active-set method."""
    height, width = matrix.shape
    solution = np.zeros(width)
    passive = np.zeros(width, dtype=np.bool_)
    blocked = np.zeros(width, dtype=np.bool_)
    residual = np.zeros(height)
    residual[height - 1] = -1.0
    for _ in range(3 * width + 10):
        best, steepest = -1, _TOLERANCE
        for j in range(width):
            if not passive[j] and not blocked[j]:
                descent = -(matrix[:, j] * residual).sum() / np.sqrt((matrix[:, j] ** 2).sum() + 1e-300)
                if descent > steepest:
                    best, steepest = j, descent
        if best < 0:
            break
        passive[best] = True
        while True:
            chosen = np.nonzero(passive)[0]
            trial = _least_squares(matrix, chosen)
            if trial[np.searchsorted(chosen, best)] <= 0 and solution[best] == 0:
                passive[best] = False  # rounding made this direction look like a descent: leave it out for good
                blocked[best] = True
                break
            if trial.min() > 0:
                solution[:] = 0.0
                for position in range(len(chosen)):
                    solution[chosen[position]] = trial[position]
                break
            fraction = 1.0
            for position in range(len(chosen)):
                j = chosen[position]
                if trial[position] <= 0:
                    fraction = min(fraction, solution[j] / (solution[j] - trial[position]))
            for position in range(len(chosen)):
                j = chosen[position]
                solution[j] += fraction * (trial[position] - solution[j])
                if trial[position] <= 0 and solution[j] <= 1e-14:
                    solution[j] = 0.0
                    passive[j] = False
        residual = matrix @ solution
        residual[height - 1] -= 1.0
    return residual


@_jit
def _least_squares(matrix: Any, chosen: Any) -> Any:
    """The unconstrained solution on the chosen columns for the right-hand side (0, …, 0, 1)."""
    columns = np.empty((matrix.shape[0], len(chosen)))
    for position in range(len(chosen)):
        columns[:, position] = matrix[:, chosen[position]]
    target = np.zeros(matrix.shape[0])
    target[-1] = 1.0
    return np.linalg.lstsq(columns, target)[0]
