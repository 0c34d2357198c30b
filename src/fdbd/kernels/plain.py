"""The kernels' definitions in plain torch: for small inputs, gradients, other devices, compiled and exported graphs."""

from __future__ import annotations

import torch
from torch import Tensor

OVERFLOW = {torch.float32: 1e30, torch.float64: 1e290}
"""A row whose squared norm is not below this is not trusted: it scores NaN, and the caller finds out why."""


def folded_score(
    features: Tensor, predicted: Tensor, normals: Tensor, offsets: Tensor, center: Tensor, floor: Tensor, divide: bool
) -> Tensor:
    """(N,) scores ``(normals[k]·d + offsets[k]) / max(‖d‖, floor)`` with d = features − center and k = predicted.

    NaN where d holds a NaN or an infinity, or is too large for the dtype.

    Args:
        features: (N, P).
        predicted: (N,) class indices.
        normals: (C, P) folded unit normals U.
        offsets: (C,) value of the folded distance at the center.
        center: (P,) training mean, or zeros.
        floor: scalar, the smallest denominator.
        divide: False leaves the denominator out.
    """
    deviation = features - center
    squares = deviation.square().sum(dim=1)
    score = (normals[predicted] * deviation).sum(dim=1) + offsets[predicted]
    if divide:
        score = score / torch.maximum(squares.sqrt(), floor)
    return torch.where(squares < OVERFLOW[features.dtype], score, torch.nan)


def column_sums(features: Tensor) -> Tensor:
    """(P,) float64 sums over the rows of (N, P)."""
    return features.detach().to(torch.float64).sum(dim=0)
