"""What a score costs as classes and features grow."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fdbd.core import geometry
from fdbd.core.batch import Batch, Head
from fdbd.detectors import KNN, MDS, Detector, ViM
from fdbd.paper import plot
from fdbd.paper.experiment import Experiment, Say
from fdbd.paper.result import Result, check
from fdbd.paper.table import Table

ALL_PAIRS = "fDBD as printed, O(C + P)"
FOLDED = "fDBD folded, O(P)"
Curve = dict[str, list[float]]


def complexity(experiment: Experiment, say: Say) -> Result:
    """Seconds per sample of each score stage, logits and predicted classes given, over C and over P; fitted slopes.

    On one thread: several wait for each other, which on a busy machine takes longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _complexity(experiment, say)
    finally:
        torch.set_num_threads(threads)


def _complexity(experiment: Experiment, say: Say) -> Result:
    settings = experiment.settings
    curves: dict[str, Curve] = {}
    for axis, sizes in (("C", settings["classes"]), ("P", settings["widths"])):
        fixed = settings["fixed_width"] if axis == "C" else settings["fixed_classes"]
        curve: Curve = {}
        for size in sizes:
            say(f"cost at {axis} = {size:,}")
            classes, width = (size, fixed) if axis == "C" else (fixed, size)
            for name, seconds in costs(classes, width, settings).items():
                curve.setdefault(name, []).append(seconds)
        curves[axis] = curve
    grids = {"C": settings["classes"], "P": settings["widths"]}
    slopes = {name: {axis: slope(grids[axis], curves[axis][name]) for axis in ("C", "P")} for name in curves["C"]}
    rows = [
        [name, *(f"{value:.2f}" for value in parts.values()), *(f"{curves[a][name][-1] * 1e6:.3g}" for a in ("C", "P"))]
        for name, parts in slopes.items()
    ]
    columns = ["score", "slope in C", "slope in P", f"µs at C = {grids['C'][-1]:,}", f"µs at P = {grids['P'][-1]:,}"]
    note = (
        f"Batches of {settings['batch']} on one thread; C grows at P = {settings['fixed_width']}, "
        f"P at C = {settings['fixed_classes']}; "
        f"KNN with {settings['bank']:,} training samples. Slopes of log time over log size, by least squares."
    )
    result = Result(tables=[Table(experiment.title, columns, rows, [note])])
    own, printed = slopes[FOLDED], slopes[ALL_PAIRS]
    last = {name: [curves[axis][name][-1] for axis in "CP"] for name in slopes}
    others = {name: min(a / b for a, b in zip(last[name], last[FOLDED])) for name in ("KNN", "MDS", "ViM")}
    result.checks = [
        check(
            "The cost of fDBD grows at most linearly in C and in P",
            max(*printed.values(), own["P"]) < 1.2,
            f"As printed: slopes {printed['C']:.2f} and {printed['P']:.2f}.",
        ),
        check(
            "Folded, it does not grow with C: slope below 0.1",
            own["C"] < 0.1,
            f"Slope {own['C']:.2f}; {last[ALL_PAIRS][0] / last[FOLDED][0]:.0f} times cheaper at the largest C.",
        ),
        check(
            "KNN, MDS and ViM cost more, at the largest C and P",
            min(others.values()) > 1,
            ", ".join(f"{name} at least {value:.0f} times" for name, value in others.items()) + ".",
        ),
    ]
    for name in ("MDS", "ViM"):
        sizes, times = grids["P"][-2:], curves["P"][name][-2:]
        growth, exponent = times[1] / times[0], slope(sizes, times)
        steps = f"{growth:.1f} times from P = {sizes[0]:,} to {sizes[1]:,}: exponent {exponent:.2f}."
        statement = f"The cost of {name} grows with the square of P: at the last step with an exponent above 1.5"
        result.checks.append(check(statement, exponent > 1.5, steps))
    more, cost = (values[-1] / values[0] for values in (grids["C"], curves["C"]["MDS"]))
    measured = f"{cost:.1f} times the cost at {more:.0f} times the classes."
    result.checks.append(
        check(
            "Whitened, MDS costs less than C times that square: its cost grows more slowly than C",
            cost < more / 2,
            measured,
        )
    )
    result.data = {"sizes": grids, "seconds": curves, "slopes": slopes}
    result.figure = _figure(grids, curves, slopes, settings)
    return result


def costs(classes: int, width: int, settings: Any) -> dict[str, float]:
    """Seconds per sample of each score stage at one size, on random features."""
    generator = torch.Generator().manual_seed(0)
    head = Head(torch.randn(classes, width, generator=generator), torch.randn(classes, generator=generator))
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


def as_printed(
    z: torch.Tensor, logits: torch.Tensor, predicted: torch.Tensor, norms: torch.Tensor, mean: torch.Tensor
) -> torch.Tensor:
    """regDistDB term by term: C − 1 distances from logits and a table of norms (C, C), then their mean over ‖z − μ‖."""
    distances = (logits.gather(1, predicted[:, None]) - logits).abs() / norms[predicted]
    average = distances.sum(dim=1) / (logits.shape[1] - 1)
    score: torch.Tensor = average / torch.linalg.vector_norm(z - mean, dim=1)
    return score


def _seconds(score: Callable[[], Any], settings: Any) -> float:
    """Seconds per sample in the fastest of several runs, since other work on the machine only adds time."""
    with torch.inference_mode():
        score()
        times: list[float] = []
        end = time.perf_counter() + settings["budget"]
        while len(times) < 5 or (time.perf_counter() < end and len(times) < 500):
            start = time.perf_counter()
            score()
            times.append(time.perf_counter() - start)
    return min(times) / int(settings["batch"])


def slope(sizes: list[int], seconds: list[float]) -> float:
    """Of log time over log size.

    >>> round(slope([1, 10, 100], [2.0, 20.0, 200.0]), 6)
    1.0
    """
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def _figure(grids: Any, curves: Any, slopes: Any, settings: Any) -> Any:
    drawn, axes = plot.figure(9.5, 3.8, 1, 2)
    labels = {
        "C": f"C, number of classes (P = {settings['fixed_width']})",
        "P": f"P, number of features (C = {settings['fixed_classes']})",
    }
    for panel, axis in zip(axes[0], "CP"):
        for colour, (name, seconds) in zip((plot.OUTSIDE, plot.INSIDE, *plot.COLOURS[1:]), curves[axis].items()):
            label = f"{name}: slope {slopes[name][axis]:.2f}"
            panel.loglog(grids[axis], [1e6 * value for value in seconds], marker="o", ms=4, color=colour, label=label)
        panel.grid(color="#eeeeee")
        panel.set_ylim(top=100 * 1e6 * max(max(part) for part in curves[axis].values()))  # room for the legend
        plot.label(panel, labels[axis], "µs per sample", legend=7)
    return drawn
