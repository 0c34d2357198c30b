"""From maps of scores to decisions: a threshold whose promise holds per image.

Images are exchangeable, their pixels are not: neighbours resemble each other, and one odd image has
many odd pixels at once. A threshold set from pooled pixels therefore promises nothing about the
next image. Two promises can be kept from n calibration images:

- on average over ID images, at most a share α of an image's pixels is flagged (conformal risk
  control: Angelopoulos, Bates, Fisch, Lei & Schuster, "Conformal Risk Control", ICLR 2024);
- an image as a whole is flagged with probability at most α (a conformal p-value of one number per
  image).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from fdbd.core.ranks import as_fraction
from fdbd.decision.threshold import Target, Threshold, check_target
from fdbd.fitting.statistics import float_bins, lower_ends_of_bins
from fdbd.util.torch_compat import tracing

LOW_SHARE = 0.05
"""An image's score is the score that this share of its pixels stays below: a few odd pixels are
noise, a region is not. It does not depend on the calibration, so its p-value is valid."""
_ONE_IN = 20
"""LOW_SHARE as a ratio: one position in this many."""


def image_scores(scores: Tensor) -> Tensor:
    """(N,) one score per image, from its pixels' scores (N, M).

    >>> image_scores(torch.arange(100.0)[None])
    tensor([4.])
    """
    positions = scores.shape[1]
    # LOW_SHARE of the positions, rounded up; in integers, since a graph for images of any size has
    # no number here.
    place = (positions + _ONE_IN - 1) // _ONE_IN
    if tracing():
        # ONNX has no operator for one place in the order.
        return scores.topk(place, dim=1, largest=False).values[:, -1]
    return scores.kthvalue(place, dim=1).values


class PixelShares:
    """What a map threshold is set from: for any threshold, the mean over calibration images of the
    share of pixels below it; and one score per image.

    The shares are counted in about a million bins of float32 that are fixed before any data are
    seen, so memory does not grow with the number of pixels.

    >>> shares = PixelShares()
    >>> shares.add(torch.tensor([[1.0, 2.0, 3.0, 4.0], [2.0, 2.0, 2.0, 2.0]]))
    >>> shares.images, [round(float(shares.below(edge)), 3) for edge in (1.5, 2.5)]
    (2, [0.125, 0.75])
    """

    def __init__(self) -> None:
        self.images = 0
        self._image_scores: list[Tensor] = []
        self._bin_shares = torch.zeros(len(lower_ends_of_bins()), dtype=torch.float64)

    def add(self, scores: Tensor) -> None:
        """Count images: finite scores (N, M) of their M pixels each."""
        if scores.ndim != 2 or 0 in scores.shape:
            raise ValueError(
                f"scores of calibration images have shape {tuple(scores.shape)}, expected (N, M): "
                "the scores of M pixels for each of N images"
            )
        scores = scores.detach().to("cpu", torch.float32)
        finite = torch.isfinite(scores).all(dim=1)
        if not finite.all():
            image = int(finite.int().argmin())
            raise ValueError(
                f"calibration image {self.images + image} has pixels whose score is not finite: "
                "leave out images with NaN or infinity"
            )
        counts = torch.bincount(float_bins(scores).reshape(-1), minlength=len(self._bin_shares))
        self._bin_shares += counts.double() / scores.shape[1]
        self._image_scores.append(image_scores(scores))
        self.images += len(scores)

    def merge(self, other: PixelShares) -> None:
        """Count the other's images too."""
        self.images += other.images
        self._bin_shares += other._bin_shares
        self._image_scores += other._image_scores

    def image_scores(self) -> Tensor:
        """(n,) scores of the calibration images."""
        if not self._image_scores:
            return torch.empty(0)
        return torch.cat(self._image_scores)

    def below(self, edge: float) -> Tensor:
        """The mean share of an image's pixels in bins that end at or below `edge`."""
        return self._bin_shares[lower_ends_of_bins() < edge].sum() / max(1, self.images)

    def largest_threshold(self, level: float) -> Tensor:
        """(1,) the largest end of a bin below which at most a mean share `level` (0 or more) of
        the pixels lies."""
        cumulative = self._bin_shares.cumsum(0) / self.images
        # A threshold at the lower end of bin b flags the bins before b.
        flagged = torch.cat([torch.zeros(1, dtype=torch.float64), cumulative[:-1]])
        # Sums of shares carry rounding errors of about 1e-13.
        allowed = (flagged <= level + 1e-12).nonzero().flatten()
        ends = lower_ends_of_bins()
        return ends[allowed[-1]].reshape(1).float()


class MapThreshold(nn.Module):
    """Decides which pixels of a map are out-of-distribution, and which images.

    Attributes:
        kind: "quantile" for a share to accept (`tpr`), "conformal" for a bound on false alarms.
        target: the `tpr` or the `alpha` that was asked for, a fraction.
        value: (1,) pixels with a score at or above it are in-distribution.
        image_threshold: decides on the images' scores.

    >>> shares = PixelShares()
    >>> shares.add(torch.randn(200, 64, generator=torch.Generator().manual_seed(0)))
    >>> threshold = MapThreshold.from_shares(shares, alpha=0.1)
    >>> maps = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1))
    >>> threshold.is_ood(maps).shape
    torch.Size([2, 8, 8])
    >>> threshold.image_threshold.is_ood(image_scores(maps.flatten(1)))
    tensor([False, False])
    """

    value: Tensor

    def __init__(self, kind: str, target: float, value: Tensor, image_threshold: Threshold) -> None:
        super().__init__()
        self.kind = kind
        self.target = target
        self.image_threshold = image_threshold
        self.register_buffer("value", value)
        if value.shape != (1,) or torch.isnan(value).any():
            raise ValueError(f"the threshold of pixels is {value.tolist()}, expected one number")

    @classmethod
    def from_shares(cls, shares: PixelShares, **target: Unpack[Target]) -> MapThreshold:
        """The strictest threshold that keeps the promise.

        Args:
            shares: of calibration images, which neither the network's training nor the fit saw.
            target: `tpr`, the share of an ID image's pixels to accept (0.95 if nothing is given),
                or `alpha`, the largest share to flag on average over ID images.
        """
        tpr = target.get("tpr")
        alpha = target.get("alpha")
        check_target(tpr, alpha)
        if target.get("per_class"):
            raise ValueError("a threshold of maps is one for all classes: leave per_class out")
        count = shares.images
        if not count:
            raise ValueError("there are no calibration images; give at least one batch of them")
        if alpha is None:
            if tpr is None:
                tpr = 0.95
            wanted = float(as_fraction("tpr", tpr))
            of_images = Threshold.quantile(shares.image_scores(), wanted)
            return cls("quantile", wanted, shares.largest_threshold(1 - wanted), of_images)
        share = float(as_fraction("alpha", alpha))
        of_images = Threshold.conformal(shares.image_scores(), share)
        # The next image may be flagged whole: it counts as one image with a share of 1.
        level = ((count + 1) * share - 1) / count
        return cls("conformal", share, shares.largest_threshold(level), of_images)

    def is_ood(self, scores: Tensor) -> Tensor:
        """(…) bool for scores (…): below the threshold, or not finite."""
        return ~((scores >= self.value) & (scores < torch.inf))

    @property
    def count(self) -> int:
        """Number of calibration images."""
        return self.image_threshold.count

    @property
    def caution(self) -> str | None:
        """Why the promise about whole images may not hold well; None: nothing is known against
        it."""
        return self.image_threshold.caution

    @property
    def guarantee(self) -> str:
        """What the threshold promises, in one sentence."""
        if self.kind == "quantile":
            return (
                f"Accepts at least {self.target:.4g} of the pixels of the {self.count} calibration "
                "images, on average over them."
            )
        return (
            f"On average over in-distribution images that are exchangeable with the {self.count} "
            f"calibration images, at most {self.target:.4g} of an image's pixels are flagged, and "
            f"an image as a whole is flagged with probability at most {self.target:.4g}."
        )

    def to_config(self) -> dict[str, object]:
        """What `from_state` needs besides ``state_dict()``, as JSON values."""
        images = self.image_threshold.to_config()
        return {"kind": self.kind, "target": self.target, "maps": True, "images": images}

    @classmethod
    def from_state(
        cls, config: Mapping[str, object], tensors: Mapping[str, Tensor]
    ) -> MapThreshold:
        """The threshold that ``to_config()`` and ``state_dict()`` came from; anything inconsistent
        is a ValueError."""
        kind = config.get("kind")
        target = config.get("target")
        images = config.get("images")
        is_kind = isinstance(kind, str) and kind in ("quantile", "conformal")
        if not is_kind or not isinstance(target, float):
            raise ValueError(f"the threshold's state is not valid: {kind!r} at {target!r}")
        if not isinstance(images, Mapping) or "value" not in tensors:
            raise ValueError("the threshold's state lacks its images or its value")
        prefix = "image_threshold."
        of_images = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        threshold = Threshold.from_state(images, of_images)
        return cls(str(kind), target, tensors["value"].clone(), threshold)

    def __repr__(self) -> str:
        return f"MapThreshold({self.extra_repr()})"

    def extra_repr(self) -> str:
        name = "tpr" if self.kind == "quantile" else "alpha"
        return f"{self.kind}, {name}={self.target:g}, {self.count} calibration images"
