"""GEN, a generalised entropy of the largest probabilities."""

import torch
from torch import Tensor

from fdbd.core.linear_algebra import largest
from fdbd.detectors.base import (
    Batch,
    Detector,
    Needs,
    Paper,
    at_least_one,
    positive,
    required_logits,
)
from fdbd.detectors.softmax import bound_, gaps
from fdbd.util.torch_compat import is_out_of_sight


class GEN(Detector):
    """Negative generalised entropy of the largest probabilities (Liu et al., 2023).

        score = −Σ_{c in the `top` largest} p_c^γ (1 − p_c)^γ

    O(C) per sample, and a selection of the largest logits if there are more than `top` classes.

    Args:
        gamma: exponent γ, positive; a small one weighs small deviations from certainty.
        top: number of the largest probabilities that count (M in the paper); all if there are
            fewer classes.

    >>> import fdbd
    >>> detector = GEN(gamma=1.0).fit(Batch(torch.eye(2)), fdbd.Head(torch.eye(2)))
    >>> detector.score(Batch(torch.zeros(1, 2)))
    tensor([-0.5000])
    """

    name = "gen"
    paper = Paper(
        "GEN: Pushing the Limits of Softmax-Based Out-of-Distribution Detection",
        "Liu et al.",
        "CVPR",
        2023,
    )
    needs = Needs(features=False, logits=True, passes=0)

    def __init__(self, gamma: float = 0.1, top: int = 100) -> None:
        # The defaults are the paper's settings for ImageNet.
        super().__init__()
        self.gamma = positive("gamma", gamma)
        self.top = at_least_one("top", top, "a number of classes, at least 1")

    def formula(self, batch: Batch) -> Tensor:
        # With Σ the sum of the weights e^gap, p = e^gap / Σ and 1 − p = rest / Σ.
        gap = gaps(required_logits(batch))
        weights = bound_(gap.clone()).exp_()
        total, log_rest_of_largest = _total_and_log_rest(gap, weights)
        if self.top < gap.shape[1]:
            gap = largest(gap, self.top)
            weights = bound_(gap.clone()).exp_()
        log_rest = torch.where(gap < 0, (total - weights).log(), log_rest_of_largest)
        return -(self.gamma * (gap + log_rest - 2 * total.log())).exp().sum(dim=1)


def _total_and_log_rest(gap: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(N, 1) the sum of the weights (N, C), and the logarithm of that sum without the weight of the
    predicted class.

    The power of the score blows up 1 − p near p = 1, where float32 has no digits left. So the rest
    is not the sum less 1, but is summed over the other classes: the weights below 1, and the
    classes that share the largest logit."""
    is_below = -gap.sign()
    ties = gap.shape[1] - is_below.sum(dim=1, keepdim=True)
    others = is_below.mul_(weights).sum(dim=1, keepdim=True)
    total = others + ties
    log_rest = (others + (ties - 1)).log()
    # `bound_` has raised weights that are so small: their sum is then taken exactly.
    tiny = -60 if gap.dtype == torch.float32 else -600
    is_tiny = log_rest < tiny
    if is_out_of_sight(gap) or is_tiny.any():
        without_largest = gap.masked_fill(gap == 0, torch.finfo(gap.dtype).min)
        exact = without_largest.logsumexp(dim=1, keepdim=True)
        log_rest = torch.where(is_tiny, exact, log_rest)
    return total, log_rest
