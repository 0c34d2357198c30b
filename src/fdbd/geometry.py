"""The decision boundaries of a linear head: distances to them, their folded form with one vector
per class, and the exact projection on a decision region. Pure functions of a Head and features."""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fdbd import kernels
from fdbd.core.batch import Head
from fdbd.core.configuration import one_of

Normalizer = Literal["deviation", "norm"] | None
_Array = NDArray[np.float64]
_BLOCK_BYTES = 64 << 20


def pairwise_norms(head: Head) -> Tensor:
    """(C, C) float64 distances ‖w_k − w_c‖ between the rows of the head; exactly 0 for equal rows.

    >>> pairwise_norms(Head([[0.0, 0.0], [3.0, 4.0]])).tolist()
    [[0.0, 5.0], [5.0, 0.0]]
    """
    norms = np.empty((head.num_classes, head.num_classes))
    for start, block in _norm_blocks(_float64(head.weight).numpy()):
        norms[start : start + len(block)] = block
    return torch.from_numpy(norms)


def _norm_blocks(weight: Any) -> Iterator[tuple[int, Any]]:
    """Rows [start, start + B) of the pairwise norms, block by block, so that C × C is never held.
    In numpy, whose calls take less time than torch's for a small head."""
    # Differences of the rows stay the same, and cancel less.
    centred = weight - weight.mean(axis=0)
    squares = np.einsum("cp,cp->c", centred, centred)
    rows = max(1, _BLOCK_BYTES // (8 * weight.shape[0]))
    at_a_time = max(1, _BLOCK_BYTES // (16 * weight.shape[1]))
    for start in range(0, weight.shape[0], rows):
        block = (-2 * centred[start : start + rows]) @ centred.T
        scale = squares[start : start + rows, None] + squares
        block += scale
        # Three digits or more were lost at these: they are computed again, by subtraction.
        cancelled_rows, cancelled_columns = np.nonzero(block <= 1e-3 * scale)
        np.maximum(block, 0, out=block)
        np.sqrt(block, out=block)
        for first in range(0, len(cancelled_rows), at_a_time):
            i = cancelled_rows[first : first + at_a_time]
            j = cancelled_columns[first : first + at_a_time]
            block[i, j] = np.linalg.norm(weight[start + i] - weight[j], axis=1)
        if not np.isfinite(block).all():
            largest = np.abs(weight).max()
            raise ValueError(
                f"the head's weights reach {largest:.3g}, too large for float64: scale them down"
            )
        yield start, block


def _float64(values: Tensor) -> Tensor:
    """The values in float64 on the CPU, since not every device has float64."""
    return values.detach().cpu().to(torch.float64)


def distances(
    features: Tensor,
    head: Head,
    *,
    logits: Tensor | None = None,
    predicted: Tensor | None = None,
    norms: Tensor | None = None,
) -> Tensor:
    """(N, C) closed-form distance of each feature to each class's boundary (Theorem 3.2 of the fDBD
    paper):

        D̃(z, c) = ((w_k − w_c)·z + b_k − b_c) / ‖w_k − w_c‖,   k = predicted class of z

    NaN at the predicted class; +inf for a class with the same weights, since no boundary lies
    between.

    Args:
        features: (N, P).
        logits: (N, C); None: the head's.
        predicted: (N,) classes k; None: the argmax of the logits.
        norms: (C, C) from `pairwise_norms`; None: computed for the predicted classes.

    >>> distances(torch.tensor([[3.0, 7.0]]), Head([[1.0, 0.0], [-1.0, 0.0]]))
    tensor([[nan, 3.]])
    """
    if logits is None:
        logits = head(features)
    if predicted is None:
        predicted = logits.argmax(dim=1)
    if norms is None:
        classes, place = predicted.unique(return_inverse=True)
        norms_of_classes = _norms_from(classes, head)
    else:
        place = predicted
        norms_of_classes = norms
    # In this order: not every device has float64.
    norms_of_rows = norms_of_classes.to(logits.dtype).to(features.device)[place]
    has_no_boundary = norms_of_rows == 0
    # 0/0 would make the gradient NaN, masked or not.
    divisor = norms_of_rows.masked_fill(has_no_boundary, 1)
    own = predicted[:, None]
    distance = (logits.gather(1, own) - logits) / divisor
    return distance.masked_fill(has_no_boundary, torch.inf).scatter(1, own, torch.nan)


def _norms_from(classes: Tensor, head: Head) -> Tensor:
    """(K, C) norms ‖w_k − w_c‖ from each of K given classes k to all classes c; float64 on the
    CPU."""
    weight = _float64(head.weight)
    # A matrix product would cancel digits.
    return torch.cdist(weight[classes.cpu()], weight, compute_mode="donot_use_mm_for_euclid_dist")


def label_distances(features: Tensor, head: Head, *, logits: Tensor | None = None) -> Tensor:
    """(N, C) distance of each feature to each label's own boundary, for heads in which every label
    is a yes or no of its own (sigmoid): |w_c·z + b_c| / ‖w_c‖. +inf for a label with the weight 0,
    which has no boundary.

    >>> label_distances(torch.tensor([[3.0, 7.0]]), Head([[2.0, 0.0], [0.0, -1.0]]))
    tensor([[3., 7.]])
    """
    logits = head(features) if logits is None else logits
    norms = torch.linalg.vector_norm(_float64(head.weight), dim=1).to(logits.dtype)
    norms = norms.to(logits.device)
    distance: Tensor = logits.abs() / norms
    return distance.masked_fill(norms == 0, torch.inf)


def nearest_boundary(distance: Tensor) -> tuple[Tensor, Tensor]:
    """Distance (N,) to the nearest boundary and its class (N,), from the (N, C) output of
    `distances`.

    >>> head = Head([[1.0, 0.0], [-1.0, 0.0], [0.0, -1.0]])
    >>> nearest_boundary(distances(torch.tensor([[3.0, 0.0]]), head))
    (tensor([2.1213]), tensor([2]))
    """
    nearest = torch.where(distance.isnan(), torch.inf, distance).min(dim=1)
    return nearest.values, nearest.indices


def mean_of_nearest(distance: Tensor, k: int) -> Tensor:
    """(N,) mean of the k smallest boundary distances of each row of (N, C) `distances`, or of
    all if there are fewer than k.

    >>> mean_of_nearest(torch.tensor([[torch.nan, 3.0, 1.0]]), 2)
    tensor([2.])
    """
    reachable = torch.where(distance.isnan(), torch.inf, distance)
    smallest = reachable.topk(min(k, distance.shape[1] - 1), dim=1, largest=False).values
    finite = torch.isfinite(smallest)
    return torch.where(finite, smallest, 0).sum(dim=1) / finite.sum(dim=1).clamp_min(1)


class Folded:
    """The boundaries of a head, folded into one vector and one number per class:

        U_k = 1/n_k Σ_c (w_k − w_c)/‖w_k − w_c‖        γ_k = 1/n_k Σ_c (b_k − b_c)/‖w_k − w_c‖

    so that the average distance of z to the boundaries of its predicted class k is U_k·z + γ_k, and

        regDistDB(z) = (U_k·(z − μ) + U_k·μ + γ_k) / ‖z − μ‖

    costs O(P) per sample. Pairs of classes with equal weights are left out of the sum and the count
    n_k. Folding is done in float64, block by block. Attributes: `normals` U (C, P), `offsets`
    U·center + γ (C,), `center` μ or zeros (P,) and `floor`, the smallest denominator, eps·max(1,
    ‖μ‖).

    Args:
        head: the linear head, at least two distinct classes.
        mean: (P,) training mean μ; needed by the "deviation" normalizer.
        normalizer: "deviation" divides by ‖z − μ‖ (the paper), "norm" by ‖z‖ (OpenOOD), None not at
            all (avgDistDB).
        dtype: of the folded tensors; default the head's.

    >>> folded = Folded(Head([[1.0, 0.0], [-1.0, 0.0]]), mean=torch.zeros(2))
    >>> folded.score(torch.tensor([[3.0, 4.0]]), torch.tensor([0]))
    tensor([0.6000])
    """

    def __init__(
        self,
        head: Head,
        mean: Tensor | None = None,
        normalizer: Normalizer = "deviation",
        dtype: torch.dtype | None = None,
    ) -> None:
        one_of("normalizer", normalizer, "deviation", "norm", None)
        dtype = head.weight.dtype if dtype is None else dtype
        normals, gammas = fold(head)
        center = torch.zeros(head.num_features, dtype=torch.float64, device="cpu")
        if normalizer == "deviation":
            if mean is None:
                raise ValueError(
                    "the 'deviation' normalizer needs the mean of the training features"
                )
            if mean.shape != (head.num_features,):
                raise ValueError(
                    f"mean has shape {tuple(mean.shape)}, expected ({head.num_features},) like the"
                    " head"
                )
            # Rounded to the dtype first, so that the offsets fit the center that is subtracted.
            center = mean.cpu().to(dtype).to(torch.float64)
        self.normals = normals.to(dtype)
        self.offsets = (self.normals.to(torch.float64) @ center + gammas).to(dtype)
        self.center = center.to(dtype)
        length = torch.linalg.vector_norm(center).clamp_min(1)
        self.floor = torch.finfo(dtype).eps * length.to(dtype)
        self.divide = normalizer is not None

    def score(
        self, features: Tensor, predicted: Tensor | None = None, *, logits: Tensor | None = None
    ) -> Tensor:
        """(N,) scores of (N, P) features whose classes are `predicted` (N,) or the argmax of
        `logits` (N, C). Rows with a NaN or an infinity, or whose norm overflows, score NaN or −inf:
        `FDBD.score` decides on those."""
        if features.dtype not in (torch.float32, torch.float64):
            # From half precision or integers, this is exact.
            features = features.to(self.normals.dtype)
        if logits is not None and logits.dtype not in (torch.float32, torch.float64):
            logits = logits.to(self.normals.dtype)
        folded = (self.normals, self.offsets, self.center, self.floor)
        return kernels.folded_score(
            features, folded, self.divide, predicted=predicted, logits=logits
        )


def fold(head: Head) -> tuple[Tensor, Tensor]:
    """Folded normals U (C, P) and offsets γ (C,) of a head, in float64; see `Folded`.

    >>> fold(Head([[1.0, 0.0], [-1.0, 0.0]]))[0].tolist()
    [[1.0, 0.0], [-1.0, 0.0]]
    """
    weight = _float64(head.weight).numpy()
    bias = _float64(head.bias).numpy()
    normals = np.empty_like(weight)
    gammas = np.empty_like(bias)
    for start, norms in _norm_blocks(weight):
        stop = start + len(norms)
        is_apart = norms > 0
        count = is_apart.sum(axis=1)
        if not count.all():
            raise ValueError(
                f"the head has fewer than two distinct classes ({head.num_classes} rows of weights,"
                " all equal), so it has no decision boundary; is the model untrained? Some start "
                "with a head of zeros: load trained weights"
            )
        # The factors 1/(n_k ‖w_k − w_c‖) of the sum over c; 0 for equal rows, which have no
        # boundary between them.
        factors = np.divide(1 / count[:, None], norms, out=np.zeros_like(norms), where=is_apart)
        total = factors.sum(axis=1)
        normals[start:stop] = total[:, None] * weight[start:stop] - factors @ weight
        gammas[start:stop] = total * bias[start:stop] - factors @ bias
    return torch.from_numpy(normals), torch.from_numpy(gammas)


def exact_distances(features: Tensor, head: Head, *, predicted: Tensor | None = None) -> Tensor:
    """(N, C) float64 true distances of Definition 3.1: how far a feature must move to be classified
    as c.

    The projection on the polyhedron {z' : class c wins} is Lawson and Hanson's least-distance
    programme (Solving Least Squares Problems, 1974, chapter 23). NaN at the predicted class, +inf
    for a class that is never predicted. Never below `distances`, and equal to it at the nearest
    boundary.

    >>> exact_distances(torch.tensor([[3.0, 7.0]]), Head([[1.0, 0.0], [-1.0, 0.0]]))
    tensor([[nan, 3.]], dtype=torch.float64)
    """
    z = _float64(features)
    head = Head(_float64(head.weight), _float64(head.bias))
    logits = head(z)
    if predicted is None:
        predicted = logits.argmax(dim=1)
    predicted = predicted.cpu()
    closed = distances(z, head, logits=logits, predicted=predicted)
    regions = _Regions(head.weight.numpy(), head.bias.numpy())
    # Already right at the predicted class, and at classes without a boundary.
    out = closed.clone()
    for row, label in torch.isfinite(closed).nonzero().tolist():
        own = int(predicted[row])
        distance = closed[row, label].item()
        out[row, label] = regions.distance(logits[row].numpy(), own, label, distance)
    return out


class _Regions:
    """The decision regions of a head, for distances to them."""

    def __init__(self, weight: _Array, bias: _Array) -> None:
        self._bias = bias
        self._coordinates = _coordinates(weight)
        # Classes of equal weights differ by their biases alone; their logits differ by rounding
        # too, so they are found by their weights.
        self._group = np.unique(weight, axis=0, return_inverse=True)[1].reshape(-1)

    def distance(self, logits: _Array, own: int, label: int, closed: float) -> float:
        """How far a sample of class `own` with logits (C,) must move to be classified as `label`;
        `closed` is its distance to the hyperplane between the two."""
        is_twin = self._group == self._group[label]
        if (self._bias[is_twin] > self._bias[label]).any():
            # A twin with a larger bias wins wherever this class could.
            return np.inf
        others = logits[~is_twin]
        constraints = self._coordinates[label] - self._coordinates[~is_twin]
        gaps = others - logits[label]
        magnitudes = np.abs(others) + abs(logits[label])
        hyperplane = self._coordinates[label] - self._coordinates[own]
        return _project(constraints, gaps, magnitudes, hyperplane, closed)


def _coordinates(weight: _Array) -> _Array:
    """(C, r) coordinates of the centred rows in an orthonormal basis of their span, whose dimension
    r may be far smaller than P."""
    left, values, _ = np.linalg.svd(weight - weight.mean(axis=0), full_matrices=False)
    rank = max(1, int((values > values[:1] * 1e-12).sum()))
    coordinates: _Array = left[:, :rank] * values[:rank]
    return coordinates


def _project(
    constraints: _Array, gaps: _Array, magnitudes: _Array, hyperplane: _Array, closed: float
) -> float:
    """min ‖y‖ subject to constraints (M, r) · y ≥ gaps (M,). `magnitudes` (M,) are the sizes of the
    logits behind each gap, which bound its rounding error; `closed` is the distance to the
    hyperplane against the predicted class, whose normal is `hyperplane` (r,)."""
    # If all constraints hold at the nearest point of that hyperplane, the closed form is exact.
    at_hyperplane = constraints @ hyperplane * (closed / np.linalg.norm(hyperplane))
    tolerance = 1e-12 * (magnitudes + np.abs(at_hyperplane))
    if (at_hyperplane - gaps >= -tolerance).all():
        return closed
    # In units of the closed form, which bounds the distance from below.
    unit = closed if closed > 0 else 1.0
    distance = _least_norm(constraints, gaps / unit) * unit
    return max(distance, closed)


def _least_norm(constraints: _Array, gaps: _Array) -> float:
    """min ‖y‖ subject to constraints (M, r) · y ≥ gaps (M,); infinity if no y satisfies them.

    Lawson and Hanson's form: with E the constraints beside the gaps, transposed (r + 1, M), and t
    the last unit vector, find u ≥ 0 that minimises ‖E u − t‖. The last entry of the residual
    ρ = E u − t is −‖ρ‖², and the solution is y = ρ[:r] / ‖ρ‖².
    """
    # Here, since it takes time to import.
    from scipy.optimize import lsq_linear

    lengths = np.linalg.norm(constraints, axis=1, keepdims=True)
    rows = np.column_stack([constraints, gaps]) / lengths
    target = np.zeros(rows.shape[1])
    target[-1] = 1
    # By bounded-variable least squares: `scipy.optimize.nnls` is wrong on some of these problems
    # before scipy 1.16.
    most_steps = 30 * len(rows) + 100
    bounds = (0, np.inf)
    solution = lsq_linear(rows.T, target, bounds, "bvls", tol=1e-14, max_iter=most_steps)
    residual = rows.T @ solution.x - target
    squares = float(residual @ residual)
    # 1e-14 stands for a region ten million times as far away as its hyperplane, which float64
    # cannot tell from an empty one.
    if squares < 1e-14:
        return np.inf
    return float(np.linalg.norm(residual[:-1])) / squares


def nearest_squared_distance(rows: Tensor, points: Tensor) -> Tensor:
    """(N,) squared Euclidean distance from each row (N, D) to the nearest point (M, D). A matrix
    product finds the point; the distance is computed by subtraction, since the product cancels for
    points far from the origin."""
    nearest = squared_distances(rows, points).argmin(dim=1)
    return (rows - points[nearest]).square().sum(dim=1)


def squared_distances(rows: Tensor, points: Tensor, squares: Tensor | None = None) -> Tensor:
    """(N, M) squared Euclidean distances from rows (N, D) to points (M, D), by one matrix product;
    `squares` (M,) are the points' squared norms, if known."""
    if squares is None:
        squares = points.square().sum(dim=1)
    # ‖p‖² − 2 r·p, then + ‖r‖²: in place, for the result may be large.
    found = torch.addmm(squares, rows, points.T, alpha=-2)
    found.add_(rows.square().sum(dim=1, keepdim=True))
    return found.clamp_min_(0)
