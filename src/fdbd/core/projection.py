"""Exact projection of features on decision regions: one small non-negative least-squares problem per sample and class.

min ‖y‖ subject to (w_c − w_j)·y ≥ logit_j − logit_c for all j is solved in the row space of the weight differences, of
dimension r ≤ C − 1, through NNLS on the (r + 1) × (C − 1) matrix of Lawson and Hanson (Solving Least Squares Problems,
1974, chapter 23).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Distances are measured in units of the closed form, which bounds them from below: a squared residual of 1e-14 stands
# for a region ten million times farther away than its hyperplane, which float64 cannot tell from an empty one.
_EMPTY = 1e-14

Array = NDArray[np.float64]


def exact_distances(weight: Tensor, bias: Tensor, logits: Tensor, predicted: Tensor, closed: Tensor) -> Tensor:
    """(N, C) float64 distances to each class's region; see `geometry.exact_distances` for the convention."""
    coordinates = _row_space((weight - weight.mean(dim=0)).numpy())
    # Classes of equal weights differ by their biases alone; their logits differ by rounding too.
    twins = np.unique(weight.numpy(), axis=0, return_inverse=True)[1].reshape(-1)
    out = closed.clone()  # right where no boundary lies between, and at the predicted class
    for i, c in torch.isfinite(closed).nonzero().tolist():
        is_twin = twins == twins[c]
        if (bias.numpy()[is_twin] > bias[c].item()).any():
            out[i, c] = torch.inf  # a twin wins wherever c could
            continue
        others = coordinates[c] - coordinates[~is_twin]
        gaps = logits[i].numpy()[~is_twin] - logits[i, c].item()
        sizes = np.abs(logits[i].numpy()[~is_twin]) + abs(logits[i, c].item())
        hyperplane = coordinates[c] - coordinates[predicted[i]]
        out[i, c] = _project(others, gaps, sizes, hyperplane, closed[i, c].item())
    return out


def _row_space(rows: Array) -> Array:
    """(C, r) coordinates of the rows in an orthonormal basis of their span."""
    left, values, _ = np.linalg.svd(rows, full_matrices=False)
    rank = max(1, int((values > values[0] * 1e-12).sum())) if len(values) else 0
    basis: Array = left[:, :rank] * values[:rank]
    return basis


def _project(others: Array, gaps: Array, sizes: Array, hyperplane: Array, closed: float) -> float:
    """min ‖y‖ subject to others (M, r) · y ≥ gaps (M,), where `sizes` (M,) is the magnitude of the logits behind each
    gap; `closed` is the distance to the hyperplane against the predicted class, whose normal is `hyperplane` (r,)."""
    # Step to that hyperplane: if all constraints hold there, the closed form is exact.
    step = others @ hyperplane * (closed / np.linalg.norm(hyperplane))
    if (step - gaps >= -1e-12 * (sizes + np.abs(step))).all():
        return closed
    scale = closed if closed > 0 else 1.0
    columns = np.column_stack([others, gaps / scale]) / np.linalg.norm(others, axis=1, keepdims=True)
    target = np.zeros(columns.shape[1])
    target[-1] = 1
    # The residual's last entry is −‖residual‖², and the step is y = residual[:r] / −residual[r].
    residual = columns.T @ _nnls(columns.T, target) - target
    squares = float(residual @ residual)
    if squares < _EMPTY:
        return np.inf
    return max(float(np.linalg.norm(residual[:-1])) / squares * scale, closed)


def _nnls(matrix: Array, target: Array) -> Array:
    """argmin ‖matrix · x − target‖ subject to x ≥ 0, by the active sets of Lawson and Hanson. scipy's own gives up, or
    answers wrongly, on some of these problems in its versions 1.12 to 1.15, the last ones for Python 3.10."""
    count = matrix.shape[1]
    solution, free = np.zeros(count), np.zeros(count, dtype=bool)
    tolerance = 10 * max(matrix.shape) * np.finfo(np.float64).eps * np.abs(matrix).sum(axis=0).max()
    for _ in range(30 * count + 100):
        descent = np.where(free, -np.inf, matrix.T @ (target - matrix @ solution))
        while descent.max() > tolerance:
            chosen = int(descent.argmax())
            free[chosen] = True
            trial = _least_squares(matrix, target, free)
            if trial[chosen] > 0:
                break
            free[chosen], descent[chosen] = False, -np.inf  # by rounding: no descent there
        else:
            return solution
        while (blocked := free & (trial <= 0)).any():
            share = solution[blocked] / (solution[blocked] - trial[blocked])
            solution = solution + share.min() * (trial - solution)
            free[np.flatnonzero(blocked)[share.argmin()]] = False
            free &= solution > 0
            solution[~free] = 0
            trial = _least_squares(matrix, target, free)
        solution = trial
    return solution


def _least_squares(matrix: Array, target: Array, free: NDArray[np.bool_]) -> Array:
    """The best x with zeros where it is not free."""
    out = np.zeros(len(free))
    out[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
    return out
