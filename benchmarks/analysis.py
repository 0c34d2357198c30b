"""What the analysis of scores costs: metrics with intervals, exact projections, and the folded
score as classes grow.

Run ``python benchmarks/analysis.py``; it writes the section "Analysis" of RESULTS.md. Run nothing
else meanwhile.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _common import machine, seconds_text, table, verdict, write_section, writes

from fdbd import Head, geometry, metrics
from fdbd.paper.closed_form import CarliniWagner
from fdbd.paper.complexity import FOLDED, costs, slope
from fdbd.paper.settings import Complexity

CLASSES = [10, 30, 100, 300, 1000]


def fastest(run: Callable[[], Any], rounds: int) -> float:
    """Seconds of the fastest of several runs, after one that warms up."""
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def folded_seconds(rounds: int) -> list[float]:
    """Seconds per sample of the folded score for each number of classes, the least of the
    rounds."""
    settings = Complexity(
        fixed_width=256,
        fixed_classes=10,
        batch=256,
        bank=300,
        budget=0.3,
        classes=tuple(CLASSES),
        widths=(),
    )
    # Threads that wait for each other would count as processor time.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    least = [math.inf] * len(CLASSES)
    for _ in range(rounds):
        for place, classes in enumerate(CLASSES):
            seconds = costs(classes, settings.fixed_width, settings)[FOLDED]
            least[place] = min(least[place], seconds)
    torch.set_num_threads(threads)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round, few attack steps; writes nothing"
    )
    quick = parser.parse_args().quick
    rounds = 1 if quick else 5
    random = np.random.default_rng(0)
    inside = random.normal(2, 1, 100_000)
    outside = random.normal(0, 1, 100_000)
    evaluation = fastest(lambda: metrics.evaluate(inside, outside), rounds)

    generator = torch.Generator().manual_seed(0)
    head = Head(torch.randn(10, 128, generator=generator), torch.randn(10, generator=generator))
    z = torch.randn(1000, 128, generator=generator)
    exact = fastest(lambda: geometry.exact_distances(z, head), rounds)
    attack = CarliniWagner(steps=50 if quick else 500)
    target = head(z[:1]).argmin(dim=1)
    attacked = fastest(lambda: attack.distances(z[:1], head, target), 1)

    growth = slope(CLASSES, folded_seconds(rounds))

    ratio = attacked / (exact / (len(z) * 9))
    rows = [
        ["metrics of 200,000 scores, with intervals", seconds_text(evaluation), "2 s"],
        ["exact distances of 1,000 samples to 9 classes", seconds_text(exact), "1 s"],
        [
            "attack on one pair over exact projection of one pair",
            f"{ratio:,.0f} ×",
            "at least 1,000 ×",
        ],
        ["slope of the folded score in the number of classes", f"{growth:.2f}", "0.1"],
    ]
    print("\n".join("  ".join(row) for row in rows))
    are_met = (evaluation < 2, exact < 1, ratio >= 1000, growth < 0.1)
    missed = [row[0] for row, is_met in zip(rows, are_met) if not is_met]
    if writes(quick):
        text = f"`python benchmarks/analysis.py` on {machine()}. The fastest of {rounds} runs.\n\n"
        write_section(
            "Analysis", text + table(["what", "measured", "target"], rows) + "\n" + verdict(missed)
        )


if __name__ == "__main__":
    main()
