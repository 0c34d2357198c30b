"""The base of ASH, SCALE and LTS: shapings by a sample's own largest activations."""

import torch
from torch import Tensor

from fdbd.core.linear_algebra import largest
from fdbd.detectors.shaping.base import Shaping, percent
from fdbd.util.torch_compat import is_out_of_sight


class TopShare(Shaping):
    """Shapings by the sample's own largest activations: all but the lowest `percentile` percent of
    its P features."""

    def __init__(self, percentile: float = 65.0) -> None:
        super().__init__()
        self.percentile = percent("percentile", percentile)

    def top(self, features: Tensor) -> Tensor:
        """(N, k) the largest activations in any order, k = P − round(P · percentile / 100), at
        least one."""
        width = features.shape[1]
        return largest(features, max(1, width - round(width * self.percentile / 100)))

    def ratio(self, features: Tensor, top: Tensor | None = None) -> Tensor:
        """(N, 1) sum of all activations over the sum of the k largest; 1 if the latter is 0."""
        if top is None:
            top = self.top(features)
        of_top = top.sum(dim=1, keepdim=True)
        of_all = features.sum(dim=1, keepdim=True)
        # The quotient is computed everywhere, so a zero must not divide.
        ratio = of_all / torch.where(of_top == 0, 1, of_top)
        return torch.where(of_top == 0, 1, ratio)


def prune(features: Tensor, top: Tensor, fill: Tensor | None = None) -> Tensor:
    """Features (N, P) with all but their `top` (N, k) set to 0, ties going to the lower index.
    `fill` (N, 1) replaces the kept values."""
    k = top.shape[1]
    if is_out_of_sight(features):
        # Ties cannot be looked for; ONNX promises their order for topk.
        values, indices = features.topk(k, dim=1)
        if fill is not None:
            values = fill.expand(-1, k)
        return torch.zeros_like(features).scatter(1, indices, values)
    kth = top.detach().amin(dim=1, keepdim=True)
    # 1 or 0 as floats, which multiply faster than booleans select.
    is_kept = torch.ge(features.detach(), kth, out=torch.empty_like(features))
    # In float32: half precision would round the count.
    surplus = is_kept.sum(dim=1, keepdim=True, dtype=torch.float32) - k
    if fill is None:
        # Whether a zero is kept or pruned, it stays 0.
        surplus *= kth != 0
    # Few rows have ties, as a rule, so only these are corrected.
    tied = surplus[:, 0] > 0
    if tied.any():
        is_kth = features.detach()[tied] == kth[tied]
        # How many of the tied values stand from here to the end of the row: the last ones go.
        ties_from_here = is_kth.flip(1).cumsum(dim=1).flip(1)
        is_surplus = is_kth & (ties_from_here <= surplus[tied])
        is_kept[tied] *= ~is_surplus
    if fill is None:
        return is_kept * features
    return is_kept * fill
