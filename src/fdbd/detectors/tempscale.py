"""Temperature scaling: softmax confidence, calibrated."""

from collections.abc import Generator
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from fdbd import kernels
from fdbd.detectors.base import (
    Batch,
    Detector,
    Head,
    Needs,
    Paper,
    Passes,
    one_of,
    required_labels,
    required_logits,
)
from fdbd.detectors.softmax import bound_, gaps, largest_probability
from fdbd.fitting.statistics import Sum, in_float64, with_logits

INVERSE_TEMPERATURES = tuple(2.0**k for k in range(-6, 7))
"""Grid of 1/T on which the likelihood is summed: T from 64 down to 1/64."""


class TemperatureScaling(Detector):
    """Log-probability of the predicted class at the temperature that calibrates it (Guo et al.,
    2017).

        score = log max_c softmax(logits / T)_c,   T = argmin_T −Σ_n log softmax(logits_n / T)_{y_n}

    The negative log-likelihood is convex in 1/T. A first pass sums it and its slope on a fixed
    grid, a second one around the minimum of the cubic through them, and others if it was not there.
    O(C) per sample.

    Fit it on held-out data, as the paper does: a network that gets every sample right has no best
    temperature, and T stops at the end of the grid, 1/64 (64 if predictions are worse than
    chance).

    Args:
        scale: "log", or "probability" for the probability itself, which ranks samples the same but
            rounds to 1 in float32 for most in-distribution samples of a good network; guards saved
            by version 0.1.0 use it.

    >>> features = 4 * torch.eye(3).repeat(20, 1) + torch.rand(60, 3)
    >>> labels = torch.arange(3).repeat(20)
    >>> detector = TemperatureScaling().fit(Batch(features, None, labels), Head(torch.eye(3)))
    >>> known_and_unknown = Batch(torch.tensor([[4.5, 0.5, 0.5], [1.5, 1.5, 1.5]]))
    >>> detector.score(known_and_unknown).argmax()
    tensor(0)
    """

    name = "tempscale"
    paper = Paper("On Calibration of Modern Neural Networks", "Guo et al.", "ICML", 2017)
    needs = Needs(features=False, logits=True, labels=True, heldout=True)
    _earlier_options = {"scale": "probability"}
    temperature: Annotated[Tensor, ""]

    def __init__(self, scale: Literal["log", "probability"] = "log") -> None:
        super().__init__()
        self.scale = one_of("scale", scale, "log", "probability")

    def passes(self, head: Head) -> Passes:
        sums = yield from _summed_likelihood(INVERSE_TEMPERATURES, head)
        best, is_inside = minimum(INVERSE_TEMPERATURES, sums)
        # If the likelihood rises or falls over the whole grid, its end is the best there is.
        needs_another_pass = is_inside
        while needs_another_pass:
            # Three points around the minimum of the cubic; or around the end of the last three, if
            # the cubic was so far off that the minimum is not between them.
            points = (best / 1.05, best, best * 1.05)
            sums = yield from _summed_likelihood(points, head)
            best, is_inside = minimum(points, sums)
            needs_another_pass = not is_inside
        self.set_buffers(temperature=torch.tensor(1 / best, dtype=torch.float64))

    def formula(self, batch: Batch) -> Tensor:
        logits = required_logits(batch)
        if self.scale == "probability":
            return largest_probability(logits / self.temperature)
        # log p = −log(1 + rest), with the sum over the other classes: next to 1, p itself has no
        # digits left.
        exponents = bound_(gaps(logits).div_(self.temperature))
        predicted = kernels.argmax(logits)[:, None]
        rest = exponents.scatter_(1, predicted, -torch.inf).exp_().sum(dim=1)
        # −log1p(rest), whose small values ONNX would round away.
        return -2 * torch.atanh(rest / (2 + rest))


def _summed_likelihood(
    inverse_temperatures: tuple[float, ...], head: Head
) -> Generator[Any, Any, Tensor]:
    """(2, G) the `likelihood` and its slope, summed over the training data in one pass: a part of
    `passes`."""
    statistic = Sum(partial(likelihood, inverse_temperatures=inverse_temperatures))
    sums = yield from with_logits(statistic, head)
    return sums.sum()


def likelihood(batch: Batch, inverse_temperatures: tuple[float, ...]) -> Tensor:
    """(N, 2, G) negative log-likelihood of the labels at each inverse temperature b, and its slope
    over b: logsumexp(b·v) − b·v_y and E_p[v] − v_y."""
    given = required_logits(batch)
    # 4 MB of float64 at once.
    rows = max(1, (1 << 19) // given.shape[1])
    pieces = []
    for logits, own in zip(in_float64(given, rows), torch.split(required_labels(batch), rows)):
        logits = logits - logits.amax(dim=1, keepdim=True)
        target = logits.gather(1, own[:, None])[:, 0]
        piece = logits.new_empty(logits.shape[0], 2, len(inverse_temperatures))
        for index, b in enumerate(inverse_temperatures):
            weights = bound_(logits * b).exp_()
            total = weights.sum(dim=1)
            piece[:, 0, index] = total.log() - b * target
            piece[:, 1, index] = weights.mul_(logits).sum(dim=1) / total - target
        pieces.append(piece)
    if not pieces:
        return torch.zeros(0, 2, len(inverse_temperatures), dtype=torch.float64)
    return torch.cat(pieces)


def minimum(points: tuple[float, ...], sums: Tensor) -> tuple[float, bool]:
    """The point at which a convex function is least, given its values and slopes (2, G) at
    ascending points: the minimum of the cubic through the two points between which the slope
    changes sign, and True; an end point and False if the slope keeps its sign."""
    values, slopes = sums.tolist()
    right = 0
    while right < len(points) and slopes[right] <= 0:
        right += 1
    if right == 0:
        return points[0], False
    if right == len(points):
        return points[-1], False
    # Nocedal and Wright, Numerical Optimization (2006), equation 3.59.
    left = right - 1
    slope = slopes[left]
    end_slope = slopes[right]
    width = points[right] - points[left]
    bend = slope + end_slope - 3 * (values[right] - values[left]) / width
    root = (bend * bend - slope * end_slope) ** 0.5
    step_back = width * (end_slope + root - bend) / (end_slope - slope + 2 * root)
    return points[right] - step_back, True
