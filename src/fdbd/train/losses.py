"""Contrastive losses as pure functions of embeddings: supervised contrastive, its unsupervised case, CSI's."""

from __future__ import annotations

import torch
from torch import Tensor


def supcon(embeddings: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
    """Supervised contrastive loss, the form with the sum outside the logarithm (Khosla et al., 2020, eq. 2).

        L = mean_i −1/|P(i)| Σ_{p ∈ P(i)} log( exp(z_i·z_p/τ) / Σ_{a ≠ i} exp(z_i·z_a/τ) )

    embeddings: (M, D) of unit length; labels: (M,), P(i) are the other samples with i's label. A sample without a
    positive leaves the mean. With one label per image (its two views) it is SimCLR's NT-Xent.

    >>> z = torch.eye(4)[[0, 0, 1, 1]]
    >>> round(float(supcon(z, torch.tensor([0, 0, 1, 1]), temperature=1.0)), 4)
    0.5514
    """
    if embeddings.ndim != 2 or labels.shape != embeddings.shape[:1]:
        raise ValueError(
            f"embeddings (M, D) and labels (M,) do not match: {tuple(embeddings.shape)}, {tuple(labels.shape)}"
        )
    m = len(labels)
    similarity = embeddings @ embeddings.T / temperature
    itself = torch.eye(m, dtype=torch.bool, device=embeddings.device)
    log_probability = similarity - similarity.masked_fill(itself, float("-inf")).logsumexp(dim=1, keepdim=True)
    positive = (labels[:, None] == labels[None, :]) & ~itself
    count = positive.sum(dim=1)
    anchors = count > 0
    if not bool(anchors.any()):
        raise ValueError("no sample of this batch has a positive: give at least two views or two samples of a class")
    per_anchor = -(log_probability * positive).sum(dim=1)[anchors] / count[anchors]
    return per_anchor.mean()


def nearest_accuracy(embeddings: Tensor, labels: Tensor) -> Tensor:
    """Share of samples whose most similar other sample has the same label: a progress figure, fraction, no gradient."""
    with torch.no_grad():
        similarity = embeddings @ embeddings.T
        similarity.fill_diagonal_(float("-inf"))
        return (labels[similarity.argmax(dim=1)] == labels).float().mean()


def rotate(images: Tensor) -> Tensor:
    """The four quarter turns of square images (N, C, S, S), stacked: (4N, C, S, S), all of turn 0 first."""
    if images.shape[-1] != images.shape[-2]:
        raise ValueError(f"quarter turns keep the shape of square images only, not {tuple(images.shape)}")
    return torch.cat([torch.rot90(images, turn, dims=(2, 3)) for turn in range(4)])
