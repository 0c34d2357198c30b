"""What shapings by a sample's own largest activations share: ASH, SCALE and LTS."""

import numpy as np
import torch
from torch import Tensor

from fdbd.shaping.base import Shaping, percent
from fdbd.util.torch_compat import is_plain, tracing


class TopShare(Shaping):
    """Shapings by the sample's own largest activations: all but the lowest `percentile` percent of its P features."""

    def __init__(self, percentile: float = 65.0) -> None:
        super().__init__()
        self.percentile = percent("percentile", percentile)

    def kept(self, features: Tensor) -> int:
        """k, how many of P activations are not pruned: P − round(P · percentile / 100), at least one."""
        width = features.shape[1]
        return max(1, width - round(width * self.percentile / 100))

    def ratio(self, features: Tensor, top: Tensor | None = None) -> Tensor:
        """(N, 1) sum of all activations over `top` (N, 1), the sum of the k largest; 1 where the latter is 0."""
        top = largest(features, self.kept(features))[1] if top is None else top
        total = features.sum(dim=1, keepdim=True)
        return torch.where(top == 0, 1, total / torch.where(top == 0, 1, top))


def largest(features: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(N, 1) the k-th largest of each row of (N, P), and (N, 1) the sum of the k largest."""
    if not is_plain(features):
        top = features.topk(k, dim=1).values
        return top[:, -1:], top.sum(dim=1, keepdim=True)
    # numpy selects with vector instructions, several times faster than torch's topk or kthvalue.
    rows = features.detach().numpy()
    kth, sums = np.empty((len(rows), 1), rows.dtype), np.empty((len(rows), 1), rows.dtype)
    cut = rows.shape[1] - k
    for start in range(0, len(rows), 1024):
        top_rows = np.partition(rows[start : start + 1024], cut, axis=1)[:, cut:]
        kth[start : start + 1024, 0] = top_rows[:, 0]
        top_rows.sum(axis=1, keepdims=True, out=sums[start : start + 1024])
    return torch.from_numpy(kth), torch.from_numpy(sums)


def prune(features: Tensor, k: int, fill: Tensor | None = None, kth: Tensor | None = None) -> Tensor:
    """Features (N, P) with all but the k largest of each row set to 0, ties going to the lower index. `fill` (N, 1)
    replaces the kept values; `kth` (N, 1) is the k-th largest where it is known."""
    if not is_plain(features):
        # Graphs have no stable sort; ONNX promises the order of ties for topk, which torch does not.
        ordered = features.topk(k, dim=1) if tracing() else features.sort(dim=1, descending=True, stable=True)
        values, indices = (part[:, :k] for part in ordered)
        return torch.zeros_like(features).scatter(1, indices, values if fill is None else fill.expand(-1, k))
    kth = largest(features, k)[0] if kth is None else kth
    is_kept = features.detach().clone().ge_(kth)  # 1 or 0 as floats, which multiply faster than booleans select
    pruned = is_kept * (features if fill is None else fill)
    tied = is_kept.sum(dim=1) > k
    if fill is None:
        tied &= kth[:, 0] != 0  # whether a zero is kept or pruned, it stays 0
    if tied.any():
        rows, bound = features[tied], kth[tied]
        above, equal = rows > bound, rows == bound
        keep = above | (equal & (equal.cumsum(dim=1) <= k - above.sum(dim=1, keepdim=True)))
        pruned[tied] = torch.where(keep, rows if fill is None else fill[tied], 0)
    return pruned
