"""ActSub: what the head reads of a feature, and what it does not, scored apart."""

from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from fdbd.core.linear_algebra import VARIANCE_FLOOR, eigenvectors, largest_products, unit
from fdbd.detectors.base import Batch, Head, Needs, Paper, Passes, positive
from fdbd.detectors.knn import Banked
from fdbd.detectors.shaping.scale import SCALE
from fdbd.detectors.softmax import logsumexp
from fdbd.fitting.statistics import Bank, Sum, Together


class ActSub(Banked):
    """Energy of the decisive part of a feature times the similarity of the rest to training
    samples (Zöngür et al., 2025).

        score(z) = E(SCALE(z_d)) · s(z_r)^power,   s(r) = −log(1 − 1/k Σ_{i ∈ k largest} r̂·r̂_i)

    z_d is the projection of z on the leading right singular vectors of the head's weight W, and z_r
    = z − z_d the rest, which hardly reaches the logits. The number of leading vectors is the one
    that makes the mean norms of z_d and z_r over the training data most alike. E is the energy of
    the head's logits. No labels are needed. O(P² + CP + MP) per sample for M samples kept.

    Two things differ from the authors' code, where that is undefined: the leading vectors are at
    most as many as the rank of W, beyond which their order is arbitrary, and a negative mean
    cosine, whose logarithm has no power, counts as 0.

    Args:
        percentile: of SCALE; 95 is the authors' for ResNet-50 and CIFAR-10, and they take 97.5 for
            MobileNetV2 and ViT-B/16 and 90 for CIFAR-100.
        power: weight of the rest (λ); 2 is the authors' for ResNet-50 and CIFAR, and they take 0.5
            for MobileNetV2 and 1 for ViT-B/16, chosen on validation data with outliers.
        k: number of neighbours.
        alpha: fraction of the training samples to keep, chosen by a hash of each sample; the
            authors keep a tenth of ImageNet.

    >>> import fdbd
    >>> features = 4 * torch.eye(3).repeat(20, 1) + torch.rand(60, 3)
    >>> head = Head(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))
    >>> detector = fdbd.create("actsub").fit(Batch(features), head)
    >>> detector.score(Batch(features)).shape
    torch.Size([60])
    """

    name = "actsub"
    paper = Paper(
        "Activation Subspaces for Out-of-Distribution Detection", "Zöngür et al.", "ICCV", 2025
    )
    needs = Needs(passes=1)
    #: leading right singular vectors of the head's weight
    decisive: Annotated[Tensor, "P K"]
    #: the others
    rest: Annotated[Tensor, "P I"]
    #: directions of the training samples in the rest
    bank: Annotated[Tensor, "M I"]

    def __init__(
        self, percentile: float = 95.0, power: float = 2.0, k: int = 10, alpha: float = 1.0
    ) -> None:
        super().__init__(k, alpha)
        self.scale = SCALE(percentile)
        self.percentile = self.scale.percentile
        self.power = float(positive("power", power))

    def passes(self, head: Head) -> Passes:
        if head.num_features < 2:
            raise ValueError(
                "the head has 1 feature, expected at least 2: ActSub divides a feature into what "
                "the head reads and the rest"
            )
        directions, rank = _singular_vectors(head.weight)
        norms = Sum(partial(_differences_of_norms, directions, rank))
        bank, norms = (yield Together([Bank(self.alpha), norms])).parts
        count = 1 + int((norms.sum() / norms.count).abs().argmin())
        rest = directions[:, count:]
        self.set_buffers(decisive=directions[:, :count], rest=rest)
        samples = bank.samples(self.fit_dtype)
        self.keep(unit(samples @ rest.to(self.fit_dtype)))

    def formula(self, batch: Batch) -> Tensor:
        decisive = batch.features @ self.decisive @ self.decisive.T
        logits = torch.nn.functional.linear(self.scale(decisive), self.head_weight, self.head_bias)
        return logsumexp(logits) * self._similarity(batch.features) ** self.power

    def _similarity(self, features: Tensor) -> Tensor:
        """(N,) −log(1 − mean cosine to the k nearest training samples), of the rest alone."""
        cosines, _ = largest_products(unit(features @ self.rest), self.bank, self.k)
        # A copy of a training sample has the cosine 1 but for rounding.
        # The exporter of ONNX takes bounds of one type alone.
        distance = (1 - cosines.mean(dim=1)).clamp(torch.finfo(cosines.dtype).eps, 1.0)
        return -distance.log()


def _singular_vectors(weight: Tensor) -> tuple[Tensor, int]:
    """(P, P) float64 right singular vectors of a weight (C, P) as columns, the leading ones first,
    and how many of them belong to the row space: at least one, and fewer than all."""
    weight = weight.detach().to("cpu", torch.float64)
    gram = weight.T @ weight
    directions = eigenvectors(gram).flip(1)
    variances = ((gram @ directions) * directions).sum(dim=0)
    rank = int((variances > VARIANCE_FLOOR * variances[0]).sum())
    return directions, max(1, min(rank, weight.shape[1] - 1))


def _differences_of_norms(directions: Tensor, rank: int, batch: Batch) -> Tensor:
    """(N, rank) ‖z_d‖ − ‖z_r‖ of each sample for 1, …, rank leading directions."""
    coordinates = batch.features.detach().to("cpu", torch.float64) @ directions
    squares = coordinates.square()
    of_leading = squares.cumsum(dim=1)[:, :rank]
    of_rest = squares.flip(1).cumsum(dim=1).flip(1)[:, 1 : rank + 1]
    return of_leading.sqrt() - of_rest.sqrt()
