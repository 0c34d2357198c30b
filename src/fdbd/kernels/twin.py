"""The folded score in plain torch: the definition, and the path for autograd, other devices, compile and export."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

OVERFLOW = {torch.float32: 1e30, torch.float64: 1e290}
"""Squared norms from here on are not trusted: the row comes back as NaN, and the caller finds out why."""


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


def folded_score_of_logits(features: Tensor, logits: Tensor, *folded: Any) -> Tensor:
    """`folded_score` for the class of the largest logit (N, C); NaN also where a logit is not finite."""
    score = folded_score(features, logits.argmax(dim=1), *folded)
    return torch.where(torch.isfinite(logits).all(dim=1), score, torch.nan)
