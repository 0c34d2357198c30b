"""What a score costs as classes and features grow."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fdbd import geometry
from fdbd.bench.runner import timed
from fdbd.core.batch import Batch, Head
from fdbd.detectors import KNN, MDS, Detector, ViM
from fdbd.paper import plot
from fdbd.paper.result import Result

ALL_PAIRS = "fDBD as printed, O(C + P)"
FOLDED = "fDBD folded, O(P)"


def complexity(result: Result) -> None:
    """Seconds per sample of each score stage, logits and predicted classes given, over C and over
    P; fitted slopes."""
    settings = result.settings
    width, classes = settings["fixed_width"], settings["fixed_classes"]
    grids: dict[str, list[int]] = {"C": settings["classes"], "P": settings["widths"]}
    curves: dict[str, dict[str, list[float]]] = {"C": {}, "P": {}}
    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # several wait for each other, which on a busy machine takes longer than the work
    try:
        for axis, sizes in grids.items():
            for size in sizes:
                result.say(f"cost at {axis} = {size:,}")
                found = (
                    costs(size, width, settings) if axis == "C" else costs(classes, size, settings)
                )
                for name, seconds in found.items():
                    curves[axis].setdefault(name, []).append(seconds)
    finally:
        torch.set_num_threads(threads)
    slopes = {
        name: {axis: slope(grids[axis], curves[axis][name]) for axis in "CP"}
        for name in curves["C"]
    }
    last = {name: [curves[axis][name][-1] for axis in "CP"] for name in slopes}
    result.table(
        [
            "score",
            "slope in C",
            "slope in P",
            *(f"µs at {axis} = {grids[axis][-1]:,}" for axis in "CP"),
        ],
        [
            [
                name,
                *(f"{slope:.2f}" for slope in slopes[name].values()),
                *(f"{1e6 * time:.3g}" for time in times),
            ]
            for name, times in last.items()
        ],
        f"Batches of {settings['batch']} on one thread; C grows at P = {width}, P at C = {classes}; "
        f"KNN with {settings['bank']:,} training samples. Slopes of log time over log size, by least squares.",
    )
    own, printed = slopes[FOLDED], slopes[ALL_PAIRS]
    linear = max(*printed.values(), own["P"]) < 1.2
    measured = f"As printed: slopes {printed['C']:.2f} and {printed['P']:.2f}."
    result.check("The cost of fDBD grows at most linearly in C and in P", linear, measured)
    measured = f"Slope {own['C']:.2f}; {last[ALL_PAIRS][0] / last[FOLDED][0]:.0f} times cheaper at the largest C."
    result.check("Folded, it does not grow with C: slope below 0.1", own["C"] < 0.1, measured)
    others = {
        name: min(a / b for a, b in zip(last[name], last[FOLDED])) for name in ("KNN", "MDS", "ViM")
    }
    measured = (
        ", ".join(f"{name} at least {value:.0f} times" for name, value in others.items()) + "."
    )
    result.check(
        "KNN, MDS and ViM cost more, at the largest C and P", min(others.values()) > 1, measured
    )
    for name in ("MDS", "ViM"):
        sizes, times = grids["P"][-2:], curves["P"][name][-2:]
        exponent = slope(sizes, times)
        steps = f"{times[1] / times[0]:.1f} times from P = {sizes[0]:,} to {sizes[1]:,}: exponent {exponent:.2f}."
        statement = f"The cost of {name} grows with the square of P: at the last step with an exponent above 1.5"
        result.check(statement, exponent > 1.5, steps)
    more, cost = (values[-1] / values[0] for values in (grids["C"], curves["C"]["MDS"]))
    statement = (
        "Whitened, MDS costs less than C times that square: its cost grows more slowly than C"
    )
    result.check(
        statement, cost < more / 2, f"{cost:.1f} times the cost at {more:.0f} times the classes."
    )
    result.data = {"sizes": grids, "seconds": curves, "slopes": slopes}
    labels = f"C, number of classes (P = {width})", f"P, number of features (C = {classes})"
    for panel, axis, label in zip(result.axes(9.5, 3.8, 1, 2)[0], "CP", labels):
        lines = {
            f"{k}: slope {slopes[k][axis]:.2f}": [1e6 * v for v in part]
            for k, part in curves[axis].items()
        }
        plot.curves(panel, grids[axis], lines, 4, (plot.OUTSIDE, plot.INSIDE, *plot.COLOURS[1:]))
        plot.label(panel, label, "µs per sample", legend=7, log="xy")
        panel.grid(color="#eeeeee")
        panel.set_ylim(top=100 * max(max(part) for part in lines.values()))  # room for the legend


def costs(classes: int, width: int, settings: Any) -> dict[str, float]:
    """Seconds per sample of each score stage at one size, on random features."""
    generator = torch.Generator().manual_seed(0)
    head = Head(
        torch.randn(classes, width, generator=generator), torch.randn(classes, generator=generator)
    )
    bank = torch.randn(max(settings["bank"], 2 * classes), width, generator=generator).relu()
    labels = torch.arange(len(bank)) % classes
    z = torch.randn(settings["batch"], width, generator=generator).relu()
    logits = head(z)
    predicted, mean = logits.argmax(dim=1), bank.mean(dim=0)
    norms = geometry.pairwise_norms(head).float().fill_diagonal_(1)
    folded = geometry.Folded(head, mean)
    found = {
        ALL_PAIRS: _seconds(lambda: as_printed(z, logits, predicted, norms, mean), settings),
        FOLDED: _seconds(lambda: folded.score(z, predicted), settings),
    }
    detectors: dict[str, Detector] = {"KNN": KNN(k=10), "MDS": MDS(), "ViM": ViM()}
    batch = Batch(z, logits)
    for name, detector in detectors.items():
        count = settings["bank"] if name == "KNN" else len(bank)
        detector.fit(Batch(bank[:count], None, labels[:count]), head)
        found[name] = _seconds(lambda d=detector: d.score(batch), settings)  # type: ignore[misc]
    return found


def as_printed(z: Tensor, logits: Tensor, predicted: Tensor, norms: Tensor, mean: Tensor) -> Tensor:
    """regDistDB term by term: C − 1 distances from logits and a table of norms (C, C), then their
    mean over ‖z − μ‖."""
    distances = (logits.gather(1, predicted[:, None]) - logits).abs() / norms[predicted]
    average = distances.sum(dim=1) / (logits.shape[1] - 1)
    score: Tensor = average / torch.linalg.vector_norm(z - mean, dim=1)
    return score


def _seconds(score: Callable[[], Any], settings: Any) -> float:
    """Seconds per sample in the fastest of several runs, since other work on the machine only adds
    time."""
    return min(timed(lambda _: score(), [None], settings["batch"], settings["budget"], fewest=5))


def slope(sizes: list[int], seconds: list[float]) -> float:
    """Of log time over log size.

    >>> round(slope([1, 10, 100], [2.0, 20.0, 200.0]), 6)
    1.0
    """
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
