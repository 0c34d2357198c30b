"""ViM and Residual: scores by the part of a feature outside the principal space of the training
features."""

from typing import Annotated

import torch
from torch import Tensor

from fdbd.core.linear_algebra import VARIANCE_FLOOR, eigenvectors, in_blocks
from fdbd.detectors.base import (
    Batch,
    Detector,
    Head,
    Needs,
    Paper,
    Passes,
    at_least_one,
    required_logits,
)
from fdbd.detectors.softmax import logsumexp
from fdbd.fitting.sample_size import warn_of_few_for_covariance
from fdbd.fitting.statistics import Moments, Sum, check_finite

VIM_PAPER = Paper(
    "ViM: Out-Of-Distribution with Virtual-logit Matching", "Wang et al.", "CVPR", 2022
)


class Residual(Detector):
    """How little of a feature lies outside the principal space of the training features (Wang et
    al., 2022).

        score(z) = −‖Rᵀ(z − o)‖,   o = −W⁺b

    From the origin o the head's bias vanishes; R spans the complement of the D leading eigenvectors
    of the mean of (z − o)(z − o)ᵀ. A score costs O(P·min(P − D, 2D)): if D is small, the
    principal part is subtracted instead.

    Args:
        dim: D, from 1 to P − 1; None: 1000 for P ≥ 2048 and 512 for P ≥ 768, as in the authors'
            experiments, else P/2.

    >>> import fdbd
    >>> features = torch.randn(200, 4) * torch.tensor([1.0, 1.0, 1.0, 0.01])
    >>> detector = fdbd.Residual(dim=3).fit(fdbd.Batch(features), fdbd.Head(torch.eye(4)[:3]))
    >>> known, unknown = detector.score(fdbd.Batch(torch.tensor([[1.0, 1, 1, 0], [1, 1, 1, 1]])))
    >>> bool(known > unknown)
    True
    """

    name = "residual"
    paper = VIM_PAPER
    needs = Needs(passes=1)
    origin: Annotated[Tensor, "P"]
    basis: Annotated[Tensor, "P D"]
    shift: Annotated[Tensor, "D"]

    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        expected = "a number of principal dimensions, at least 1, or None"
        self.dim = None if dim is None else at_least_one("dim", dim, expected)

    def passes(self, head: Head) -> Passes:
        moments = yield Moments(head.num_features)
        self._set_space(head, moments)

    def _set_space(self, head: Head, moments: Moments) -> Tensor:
        """Set origin and basis; returns the mean of ‖z − o‖²."""
        width = head.num_features
        dim = self._dim(width)
        if dim >= width:
            raise ValueError(
                f"dim is {dim}, expected less than the {width} features, so that a residual is left"
            )
        warn_of_few_for_covariance(self.label, moments.count, width)
        origin = _origin(head)
        second = moments.second_moment(origin)
        # By ascending eigenvalue: the residual comes first.
        directions = eigenvectors(second)
        if self._subtracts(width):
            basis = directions[:, width - dim :]
        else:
            basis = directions[:, : width - dim]
        self.set_buffers(origin=origin, basis=basis, shift=-origin @ basis)
        return second.trace()

    def _dim(self, width: int) -> int:
        if self.dim is not None:
            return self.dim
        if width >= 2048:
            return 1000
        if width >= 768:
            return 512
        return max(1, width // 2)

    def _subtracts(self, width: int) -> bool:
        """Whether x − QQᵀx with the principal basis Q is less work than Rᵀx with the residual
        basis."""
        return 3 * self._dim(width) < width

    def residual_norms(self, features: Tensor) -> Tensor:
        """(N,) ‖Rᵀ(z − o)‖ of (N, P) features."""
        subtracts = self._subtracts(features.shape[1])

        def norms(rows: Tensor) -> Tensor:
            rest = torch.addmm(self.shift, rows, self.basis)
            if subtracts:
                # That was the principal part. Vectors are subtracted: squared norms would cancel.
                rest = rows - self.origin - rest @ self.basis.T
            found: Tensor = torch.linalg.vector_norm(rest, dim=1)
            return found

        width = features.shape[1] if subtracts else len(self.shift)
        return in_blocks(norms, features, width)

    def formula(self, batch: Batch) -> Tensor:
        return -self.residual_norms(batch.features)


class ViM(Residual):
    """Energy against a virtual logit made of the feature's residual (Wang et al., 2022).

        score(z) = logsumexp(logits) − α ‖Rᵀ(z − o)‖, α = Σ max logit / Σ ‖Rᵀ(z − o)‖ over the
        training data

    with R and o as in `Residual`. The fDBD paper prints the second term alone, and without its
    sign. A score costs O(P·min(P − D, 2D) + C); fitting takes two passes.

    Args:
        dim: D, as in `Residual`.

    >>> features = torch.randn(200, 8) * torch.tensor([1.0, 1, 1, 1, 0.1, 0.1, 0.1, 0.1])
    >>> detector = ViM(dim=4).fit(Batch(features), Head(torch.eye(8)[:4]))
    >>> bool(
    ...     detector.score(Batch(features)).mean() > detector.score(Batch(features.flip(1))).mean()
    ... )
    True
    """

    name = "vim"
    paper = VIM_PAPER
    needs = Needs(logits=True, passes=2)
    alpha: Annotated[Tensor, ""]

    def passes(self, head: Head) -> Passes:
        moments = yield Moments(head.num_features)
        square = self._set_space(head, moments)
        sums = yield Sum(self._logit_and_residual)
        logit, residual = sums.sum()
        # Training data that lie in the principal space leave no residual but rounding errors, which
        # must not decide.
        floor = VARIANCE_FLOOR**0.5 * sums.count * square.sqrt()
        self.set_buffers(alpha=logit / residual.clamp_min(floor))

    def formula(self, batch: Batch) -> Tensor:
        return logsumexp(required_logits(batch)) - self.alpha * self.residual_norms(batch.features)

    def _logit_and_residual(self, batch: Batch) -> Tensor:
        """(N, 2): the largest logit and the residual's norm of each sample."""
        features = batch.features.to(self.basis)
        if batch.logits is None:
            head = self.head
            largest = in_blocks(lambda rows: head(rows).amax(dim=1), features, head.num_classes)
        else:
            check_finite(batch.logits, "its logits")
            largest = batch.logits.amax(dim=1).to(features)
        return torch.stack([largest, self.residual_norms(features)], dim=1)


def _origin(head: Head) -> Tensor:
    """(P,) float64 o = −W⁺b, where the logits are smallest: there the head's bias vanishes."""
    weight = head.weight.to("cpu", torch.float64)
    bias = head.bias.to("cpu", torch.float64)
    # Rows of a softmax head often sum to zero, and what is left of that direction is rounding: of
    # its dtype, or of the solver that a float64 head comes from.
    rounding = max(1e-10, max(head.weight.shape) * torch.finfo(head.weight.dtype).eps)
    solved = torch.linalg.lstsq(weight, -bias[:, None], rcond=rounding, driver="gelsy")
    origin: Tensor = solved.solution[:, 0]
    return origin
