"""What a score costs as classes and features grow."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fdbd import geometry
from fdbd.core.batch import Batch, Head
from fdbd.decision.guard import Guard
from fdbd.detectors import KNN, MDS, MSP, ODIN, SSD, Energy, ViM
from fdbd.networks.classifier import Classifier
from fdbd.networks.factories import create
from fdbd.paper import plot
from fdbd.paper.finding import Finding
from fdbd.paper.image_detectors import time_forward_and_guard
from fdbd.paper.settings import Complexity

ALL_PAIRS = "fDBD as printed, O(C + P)"
FOLDED = "fDBD folded, O(P)"
_IMAGES = 16
"""Images in a timed batch of ODIN."""
_CLUSTERS = 4
"""Clusters of SSD."""
_FEWEST_RUNS = 5

Curves = dict[str, list[float]]
"""Seconds per sample at each size, by the name of the score."""


def complexity(finding: Finding, settings: Complexity) -> None:
    """Seconds per sample of each score stage, logits and predicted classes given, over C and over
    P; fitted slopes. ODIN, whose cost is that of the network, stands beside them."""
    # Threads that wait for each other take longer on a busy machine than the work itself.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        over_classes, over_widths = _measure(finding, settings)
        odin, forward = _odin_and_forward(settings)
    finally:
        torch.set_num_threads(threads)
    slopes = {}
    for name in over_classes:
        slopes[name] = {
            "C": slope(settings.classes, over_classes[name]),
            "P": slope(settings.widths, over_widths[name]),
        }
    _table(slopes, over_classes, over_widths, odin, settings, finding)
    _decide_fdbd(slopes, over_classes, finding)
    _decide_cheaper_than_others(over_classes, over_widths, finding)
    _decide_squares(over_widths, settings, finding)
    _decide_whitened_mds(over_classes["MDS"], settings, finding)
    finding.decide(
        f"ODIN costs more than another forward pass of the network ({settings.network})",
        odin > forward,
        f"{1e6 * odin:,.0f} µs per image beyond the forward pass, which takes "
        f"{1e6 * forward:,.0f} µs.",
    )
    finding.data = {
        "sizes": {"C": settings.classes, "P": settings.widths},
        "seconds": {"C": over_classes, "P": over_widths},
        "slopes": slopes,
        "odin": {"extra": odin, "forward": forward},
    }
    _draw(slopes, over_classes, over_widths, settings, finding)


def _measure(finding: Finding, settings: Complexity) -> tuple[Curves, Curves]:
    """The costs over C, and those over P."""
    over_classes: Curves = {}
    over_widths: Curves = {}
    for classes in settings.classes:
        finding.say(f"cost at C = {classes:,}")
        for name, seconds in costs(classes, settings.fixed_width, settings).items():
            over_classes.setdefault(name, []).append(seconds)
    for width in settings.widths:
        finding.say(f"cost at P = {width:,}")
        for name, seconds in costs(settings.fixed_classes, width, settings).items():
            over_widths.setdefault(name, []).append(seconds)
    return over_classes, over_widths


def costs(classes: int, width: int, settings: Complexity) -> dict[str, float]:
    """Seconds per sample of each score stage at one size, on random features."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(classes, width, generator=generator)
    head = Head(weight, torch.randn(classes, generator=generator))
    samples = max(settings.bank, 2 * classes)
    bank = torch.randn(samples, width, generator=generator).relu()
    labels = torch.arange(samples) % classes
    z = torch.randn(settings.batch, width, generator=generator).relu()
    logits = head(z)
    predicted = logits.argmax(dim=1)
    mean = bank.mean(dim=0)

    norms = geometry.pairwise_norms(head).float().fill_diagonal_(1)
    folded = geometry.Folded(head, mean)
    found = {
        ALL_PAIRS: _seconds(lambda: as_printed(z, logits, predicted, norms, mean), settings),
        FOLDED: _seconds(lambda: folded.score(z, predicted), settings),
    }
    train = Batch(bank, None, labels)
    fitted = {
        "MSP": MSP().fit(train, head),
        "Energy": Energy().fit(train, head),
        # KNN's cost is that of its bank; the others need at least two samples per class.
        "KNN": KNN(k=10).fit(train.rows(slice(0, settings.bank)), head),
        "MDS": MDS().fit(train, head),
        # With a cluster per class SSD would give up covariances of their own at the largest sizes.
        "SSD+": SSD(clusters=_CLUSTERS, iterations=1).fit(train, head),
        "ViM": ViM().fit(train, head),
    }
    for name, detector in fitted.items():
        found[name] = _seconds(partial(detector.score, Batch(z, logits)), settings)
    return found


def _odin_and_forward(settings: Complexity) -> tuple[float, float]:
    """Seconds per image that ODIN adds to the forward pass of a network, and those of the forward
    pass."""
    network = create(settings.network, 10).eval()
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(_IMAGES, 3, settings.side, settings.side, generator=generator)
    classifier = Classifier(network)
    guard = Guard(classifier, ODIN()).fit([images], progress=False)

    plain, whole = time_forward_and_guard(
        classifier, guard, images, rounds=10, clock=time.process_time
    )
    return (whole - plain) / _IMAGES, plain / _IMAGES


def as_printed(z: Tensor, logits: Tensor, predicted: Tensor, norms: Tensor, mean: Tensor) -> Tensor:
    """regDistDB term by term: C − 1 distances from logits and a table of norms (C, C), then their
    mean over ‖z − μ‖."""
    distances = (logits.gather(1, predicted[:, None]) - logits).abs() / norms[predicted]
    average = distances.sum(dim=1) / (logits.shape[1] - 1)
    score: Tensor = average / torch.linalg.vector_norm(z - mean, dim=1)
    return score


def _seconds(score: Callable[[], Any], settings: Complexity) -> float:
    """Seconds of processor time per sample, in the fastest of several runs. On a busy machine a
    clock on the wall would measure how long the process waits for its turn."""
    fastest = math.inf
    spent = 0.0
    runs = 0
    with torch.inference_mode():
        # The first call compiles, and fills caches.
        score()
        while runs < _FEWEST_RUNS or spent < settings.budget:
            start = time.process_time()
            score()
            seconds = time.process_time() - start
            fastest = min(fastest, seconds)
            spent += seconds
            runs += 1
    return fastest / settings.batch


def slope(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The slope of log time over log size, by least squares.

    >>> round(slope([1, 10, 100], [2.0, 20.0, 200.0]), 6)
    1.0
    """
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def _table(
    slopes: Mapping[str, Mapping[str, float]],
    over_classes: Curves,
    over_widths: Curves,
    odin: float,
    settings: Complexity,
    finding: Finding,
) -> None:
    rows = []
    for name, of_score in slopes.items():
        at_most_classes = f"{1e6 * over_classes[name][-1]:.3g}"
        at_largest_width = f"{1e6 * over_widths[name][-1]:.3g}"
        slope_cells = [f"{of_score['C']:.2f}", f"{of_score['P']:.2f}"]
        rows.append([name, *slope_cells, at_most_classes, at_largest_width])
    rows.append([f"ODIN, on {settings.network}", "", "", f"{1e6 * odin:.3g}", f"{1e6 * odin:.3g}"])
    finding.table(
        [
            "score",
            "slope in C",
            "slope in P",
            f"µs at C = {settings.classes[-1]:,}",
            f"µs at P = {settings.widths[-1]:,}",
        ],
        rows,
        f"Processor time, batches of {settings.batch} on one thread; C grows at "
        f"P = {settings.fixed_width}, P at C = {settings.fixed_classes}; KNN with "
        f"{settings.bank:,} training samples, SSD+ with {_CLUSTERS} clusters. Slopes of log time "
        "over log size, by least squares. ODIN runs the network forwards, backwards and forwards "
        f"again: its time is that of {settings.network} on images of {settings.side}×"
        f"{settings.side}, without the first pass.",
    )


def _decide_fdbd(
    slopes: Mapping[str, Mapping[str, float]], over_classes: Curves, finding: Finding
) -> None:
    printed = slopes[ALL_PAIRS]
    folded = slopes[FOLDED]
    finding.decide(
        "The cost of fDBD grows at most linearly in C and in P",
        max(printed["C"], printed["P"], folded["P"]) < 1.2,
        f"As printed: slopes {printed['C']:.2f} and {printed['P']:.2f}.",
    )
    times_cheaper = over_classes[ALL_PAIRS][-1] / over_classes[FOLDED][-1]
    finding.decide(
        "Folded, it does not grow with C: slope below 0.1",
        folded["C"] < 0.1,
        f"Slope {folded['C']:.2f}; {times_cheaper:.0f} times cheaper at the largest C.",
        ours=True,
    )
    finding.decide(
        "MSP and Energy grow faster with C than folded fDBD",
        min(slopes["MSP"]["C"], slopes["Energy"]["C"]) > folded["C"],
        f"Slopes {slopes['MSP']['C']:.2f} and {slopes['Energy']['C']:.2f} against "
        f"{folded['C']:.2f}.",
        ours=True,
    )


def _decide_cheaper_than_others(
    over_classes: Curves, over_widths: Curves, finding: Finding
) -> None:
    ratios: dict[str, float] = {}
    for name in ("KNN", "MDS", "SSD+", "ViM"):
        at_most_classes = over_classes[name][-1] / over_classes[FOLDED][-1]
        at_largest_width = over_widths[name][-1] / over_widths[FOLDED][-1]
        ratios[name] = min(at_most_classes, at_largest_width)
    texts = [f"{name} at least {ratio:.0f} times" for name, ratio in ratios.items()]
    finding.decide(
        "KNN, MDS, SSD+ and ViM cost more, at the largest C and P",
        min(ratios.values()) > 1,
        f"{', '.join(texts)}.",
    )


def _decide_squares(over_widths: Curves, settings: Complexity, finding: Finding) -> None:
    """The exponent is that of the last step, since at small sizes other costs hide the square."""
    sizes = settings.widths[-2:]
    for name in ("MDS", "SSD+", "ViM"):
        times = over_widths[name][-2:]
        exponent = slope(sizes, times)
        growth = f"{times[1] / times[0]:.1f} times from P = {sizes[0]:,} to {sizes[1]:,}"
        finding.decide(
            f"The cost of {name} grows with the square of P: at the last step with an exponent "
            "above 1.5",
            exponent > 1.5,
            f"{growth}: exponent {exponent:.2f}.",
        )


def _decide_whitened_mds(seconds: Sequence[float], settings: Complexity, finding: Finding) -> None:
    more_classes = settings.classes[-1] / settings.classes[0]
    more_cost = seconds[-1] / seconds[0]
    finding.decide(
        "Whitened, MDS costs less than C times that square: its cost grows more slowly than C",
        more_cost < more_classes / 2,
        f"{more_cost:.1f} times the cost at {more_classes:.0f} times the classes.",
        ours=True,
    )


def _draw(
    slopes: Mapping[str, Mapping[str, float]],
    over_classes: Curves,
    over_widths: Curves,
    settings: Complexity,
    finding: Finding,
) -> None:
    left, right = finding.axes(9.5, 3.8, 1, 2)[0]
    colours = (plot.OUTSIDE, plot.INSIDE, *plot.COLOURS[1:], plot.GREY)
    panels = (
        (left, "C", settings.classes, over_classes),
        (right, "P", settings.widths, over_widths),
    )
    for axis, letter, sizes, curves in panels:
        lines = {}
        for name, seconds in curves.items():
            label = f"{name}: slope {slopes[name][letter]:.2f}"
            lines[label] = [1e6 * value for value in seconds]
        plot.curves(axis, sizes, lines, 4, colours)
        highest = max(max(part) for part in lines.values())
        # Room for the legend.
        axis.set_ylim(top=300 * highest)
        axis.grid(color="#eeeeee")
    plot.label(
        left,
        f"C, number of classes (P = {settings.fixed_width})",
        "µs per sample",
        legend=7,
        log="xy",
    )
    plot.label(
        right,
        f"P, number of features (C = {settings.fixed_classes})",
        "µs per sample",
        legend=7,
        log="xy",
    )
