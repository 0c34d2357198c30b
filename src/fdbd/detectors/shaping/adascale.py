"""AdaSCALE: scaling whose percentile adapts to how far activations move when trivial pixels do."""

import math
from collections.abc import Callable
from typing import Annotated, Literal

import torch
from torch import Tensor

from fdbd.core.batch import Batch, Head, Inputs, logits_of
from fdbd.core.configuration import Needs, Paper, Passes, expect, one_of
from fdbd.detectors.shaping.base import Shaping
from fdbd.fitting.statistics import Histogram, check_finite


class AdaSCALE(Shaping):
    """SCALE with a separate percentile for each sample, lower the more its largest activations
    shift when the image's least important pixels are moved (Regmi, 2025):

        Q' = λ · Σ_{top k₁ %} |z − z'| + Σ_{top k₂ %} max(z', 0) z' = features of the moved image p
        = low + (1 − F(Q')) · (high − low) F = distribution of Q' over training data r = Σz /
        Σ{largest 100 − p %} over positive activations

    and z·exp(r) (variant "activation") or logits·r² ("logit"). "Top" is by z. Works only in a
    Guard, which lets `observe` run the network: two forward passes and a backward one.
    ``create("adascale")`` puts it before Energy, as in the paper, ``create("adascale+fdbd")``
    before fDBD.

    Args:
        low, high: percentiles between which p lies; 80 and 85 are the author's for ResNet-50 on
            ImageNet.
        shift: k₁, percent of the P features whose shift counts.
        level: k₂, percent of the P features whose level after the move counts.
        weight: λ.
        pixels: percent of the image's numbers that are moved, those with the smallest gradient of
            the largest logit.
        step: how far, in units of the (normalised) image.
        variant: "activation" (AdaSCALE-A) or "logit" (AdaSCALE-L).

    >>> import fdbd
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> guard = fdbd.Guard(model, "adascale").fit([torch.rand(64, 3, 2, 2)])
    >>> guard.score(torch.rand(5, 3, 2, 2)).shape
    torch.Size([5])
    """

    name = "adascale"
    paper = Paper("AdaSCALE: Adaptive Scaling for OOD Detection", "Regmi", "arXiv", 2025)
    needs = Needs(logits=True, views=True, network=True, passes=1)
    knots: Annotated[Tensor, "K"]

    def __init__(
        self,
        low: float = 80.0,
        high: float = 85.0,
        shift: float = 1.0,
        level: float = 5.0,
        weight: float = 10.0,
        pixels: float = 5.0,
        step: float = 0.5,
        variant: Literal["activation", "logit"] = "activation",
    ) -> None:
        super().__init__()
        expect(
            "low, high", (low, high), 0 <= low <= high < 100, "percent with 0 ≤ low ≤ high < 100"
        )
        for name, share in (("shift", shift), ("level", level), ("pixels", pixels)):
            expect(name, share, 0 < share <= 100, "percent above 0 and up to 100")
        for name, number in (("weight", weight), ("step", step)):
            expect(name, number, 0 <= number < math.inf, "a number from 0")
        self.low, self.high, self.shift, self.level = (
            float(low),
            float(high),
            float(shift),
            float(level),
        )
        self.weight, self.pixels, self.step = float(weight), float(pixels), float(step)
        self.variant = one_of("variant", variant, "activation", "logit")
        self.touches = "logits" if variant == "logit" else "features"

    def observe(self, images: Inputs, classifier: Callable[[Inputs], Batch]) -> Batch:
        """The model's batch of the images, and as its one view (1, N, P) the features of the moved
        images."""
        if not isinstance(images, Tensor) or not images.is_floating_point():
            raise TypeError(
                f"adascale needs images as one floating-point tensor (N, …), got {type(images).__name__}"
            )
        with torch.inference_mode(False), torch.enable_grad():
            inputs = images.detach().clone().requires_grad_()
            batch = classifier(inputs)
            (gradient,) = torch.autograd.grad(logits_of(batch).amax(dim=1).sum(), inputs)
        with torch.no_grad():
            size = gradient.flatten(1).abs()
            trivial = size.topk(
                max(1, int(size.shape[1] * self.pixels / 100)), dim=1, largest=False
            ).indices
            moved = torch.zeros_like(size).scatter(1, trivial, 1.0).view_as(gradient)
            views = classifier(inputs.detach() + self.step * moved * gradient.sign()).features[None]
        return batch.detach()._replace(views=views)

    def passes(self, head: Head) -> Passes:
        histogram = yield Histogram(self._finite_oodness)
        # Quantiles stand for the distribution: resolution 1/1024, and a comparison that exports.
        self.set(knots=histogram.quantiles([(i + 0.5) / 1024 for i in range(1024)]))

    def oodness(self, batch: Batch) -> Tensor:
        """(N, 1) Q', how much a sample looks out-of-distribution."""
        assert batch.views is not None
        features, moved = batch.features, batch.views[0].to(batch.features.dtype)
        width = features.shape[1]
        shift, level = (max(1, int(width * percent / 100)) for percent in (self.shift, self.level))
        top = features.topk(max(shift, level), dim=1).indices
        shifts = (features - moved).abs().gather(1, top[:, :shift]).sum(dim=1, keepdim=True)
        return self.weight * shifts + moved.relu().gather(1, top[:, :level]).sum(
            dim=1, keepdim=True
        )

    def _finite_oodness(self, batch: Batch) -> Tensor:
        oodness = self.oodness(batch)
        check_finite(oodness, "its features, or those of the moved images,")
        return oodness

    def shape(self, batch: Batch) -> Batch:
        knots = self.fitted("knots").to(batch.features.device)
        share = (self.oodness(batch) >= knots).to(batch.features.dtype).mean(dim=1, keepdim=True)
        ratio = self._ratio(batch.features.relu(), self.low + (1 - share) * (self.high - self.low))
        if self.variant == "logit":
            return batch._replace(logits=logits_of(batch) * ratio.square(), views=None)
        return batch._replace(features=batch.features * ratio.exp(), logits=None, views=None)

    def _ratio(self, positive: Tensor, percentile: Tensor) -> Tensor:
        """(N, 1) sum of each row over the sum of its largest, of which `percentile` (N, 1) says how
        many."""
        width = positive.shape[1]
        most = max(1, width - round(width * self.low / 100))
        kept = (width - (width * percentile / 100).round()).to(torch.int64).clamp(1, most)
        top = positive.topk(most, dim=1).values.cumsum(dim=1).gather(1, kept - 1)
        return torch.where(
            top == 0, 1, positive.sum(dim=1, keepdim=True) / torch.where(top == 0, 1, top)
        )
