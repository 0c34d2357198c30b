"""AdaSCALE: scaling whose percentile adapts to how far activations move when trivial pixels do."""

import math
from collections.abc import Callable
from typing import Annotated, Literal

import torch
from torch import Tensor

from fdbd.core.batch import Batch, Head, Inputs, required_logits, required_perturbed
from fdbd.core.configuration import Needs, Paper, Passes, expect, one_of
from fdbd.detectors.shaping.base import Shaping
from fdbd.fitting.statistics import Histogram, check_finite


class AdaSCALE(Shaping):
    """SCALE with a separate percentile for each sample, lower the more its largest activations
    shift when the image's least important pixels are moved (Regmi, 2025):

        Q' = λ · Σ_{top k₁ %} |z − z'| + Σ_{top k₂ %} max(z', 0)    z' = features of the moved image
        p  = low + (1 − F(Q')) · (high − low)        F = distribution of Q' over training data
        r  = Σz / Σ{largest 100 − p %}               over positive activations

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
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Flatten(), torch.nn.Linear(12, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    ... )
    >>> guard = fdbd.Guard(model, "adascale").fit([torch.rand(64, 3, 2, 2)])
    >>> guard.score(torch.rand(5, 3, 2, 2)).shape
    torch.Size([5])
    """

    name = "adascale"
    paper = Paper("AdaSCALE: Adaptive Scaling for OOD Detection", "Regmi", "arXiv", 2025)
    needs = Needs(logits=True, perturbed=True, network=True, passes=1)
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
        self.low = float(low)
        self.high = float(high)
        self.shift = float(shift)
        self.level = float(level)
        self.weight = float(weight)
        self.pixels = float(pixels)
        self.step = float(step)
        self.variant = one_of("variant", variant, "activation", "logit")
        self.touches = "logits" if variant == "logit" else "features"

    def observe(self, images: Inputs, classifier: Callable[[Inputs], Batch]) -> Batch:
        """The model's batch of the images, and the features of the moved images."""
        if not isinstance(images, Tensor) or not images.is_floating_point():
            raise TypeError(
                "adascale needs images as one floating-point tensor (N, …), got "
                f"{type(images).__name__}"
            )
        with torch.inference_mode(False), torch.enable_grad():
            inputs = images.detach().clone().requires_grad_()
            batch = classifier(inputs)
            largest = required_logits(batch).amax(dim=1).sum()
            (gradient,) = torch.autograd.grad(largest, inputs)
        with torch.no_grad():
            moved = inputs.detach() + self.step * self._trivial(gradient) * gradient.sign()
            perturbed = classifier(moved).features
        return batch.detach()._replace(perturbed=perturbed)

    def _trivial(self, gradient: Tensor) -> Tensor:
        """1 at each image's least important numbers, those with the smallest gradient, 0
        elsewhere."""
        sizes = gradient.flatten(1).abs()
        count = max(1, int(sizes.shape[1] * self.pixels / 100))
        smallest = sizes.topk(count, dim=1, largest=False).indices
        return torch.zeros_like(sizes).scatter(1, smallest, 1.0).view_as(gradient)

    def passes(self, head: Head) -> Passes:
        histogram = yield Histogram(self._finite_oodness)
        # Quantiles stand for the distribution: resolution 1/1024, and a comparison that exports.
        fractions = [(i + 0.5) / 1024 for i in range(1024)]
        self.set_buffers(knots=histogram.quantiles(fractions))

    def oodness(self, batch: Batch) -> Tensor:
        """(N, 1) Q', how much a sample looks out-of-distribution."""
        features = batch.features
        perturbed = required_perturbed(batch).to(features.dtype)
        width = features.shape[1]
        shift_count = max(1, int(width * self.shift / 100))
        level_count = max(1, int(width * self.level / 100))
        top = features.topk(max(shift_count, level_count), dim=1).indices
        shifts = (features - perturbed).abs().gather(1, top[:, :shift_count])
        levels = perturbed.relu().gather(1, top[:, :level_count])
        return self.weight * shifts.sum(dim=1, keepdim=True) + levels.sum(dim=1, keepdim=True)

    def _finite_oodness(self, batch: Batch) -> Tensor:
        oodness = self.oodness(batch)
        check_finite(oodness, "its features, or those of the moved images,")
        return oodness

    def shape(self, batch: Batch) -> Batch:
        features = batch.features
        knots = self.fitted("knots").to(features.device)
        share = (self.oodness(batch) >= knots).to(features.dtype).mean(dim=1, keepdim=True)
        percentile = self.low + (1 - share) * (self.high - self.low)
        ratio = self._ratio(features.relu(), percentile)
        shaped = batch._replace(perturbed=None)
        if self.variant == "logit":
            return shaped._replace(logits=required_logits(batch) * ratio.square())
        return shaped._replace(features=features * ratio.exp(), logits=None)

    def _ratio(self, positive: Tensor, percentile: Tensor) -> Tensor:
        """(N, 1) sum of each row over the sum of its largest, of which `percentile` (N, 1) says how
        many."""
        width = positive.shape[1]
        most = max(1, width - round(width * self.low / 100))
        kept = (width - (width * percentile / 100).round()).to(torch.int64).clamp(1, most)
        sums_of_largest = positive.topk(most, dim=1).values.cumsum(dim=1)
        top = sums_of_largest.gather(1, kept - 1)
        ratio = positive.sum(dim=1, keepdim=True) / torch.where(top == 0, 1, top)
        return torch.where(top == 0, 1, ratio)
