"""Theorem 3.2: the closed form bounds the boundary distance from below, and is equal to it at the nearest class."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fdbd.core import geometry
from fdbd.core.batch import Head
from fdbd.core.linear_algebra import unit
from fdbd.paper import plot
from fdbd.paper.result import Result


def theorem(result: Result) -> None:
    """Random heads over class counts and dimensions: bound, equality, and a search for a nearer point."""
    settings, tolerance = result.settings, 1e-9
    generator = torch.Generator().manual_seed(settings["seed"])
    cases, ranks = [], {}
    for classes, width in settings["sizes"]:
        result.say(f"{classes} classes in {width} dimensions")
        case, by_rank = _case(classes, width, settings["samples"], settings["tries"], generator)
        cases.append(case)
        ranks[f"C = {classes}, P = {width}"] = 100 * by_rank
    columns = {"C": "{classes}", "P": "{width}", "pairs": "{pairs:,}", "largest violation": "{violation:.1e}"}
    columns |= {"mean gap": "{gap_mean:.2%}", "p95 gap": "{gap_p95:.2%}", "pairs with equality": "{equal:.2%}"}
    note = "Gap: 1 − closed form / exact distance. Violation: how far the closed form exceeds it, relative."
    result.table(columns, cases, note)
    of = {key: [case[key] for case in cases] for key in cases[0]}
    excess, difference, beyond, broken = max(of["violation"]), max(of["nearest"]), min(of["beyond"]), of["broken"]
    measured = f"{sum(of['pairs']):,} pairs, largest relative excess {excess:.1e}."
    result.check("The closed form is never above the exact distance", excess <= tolerance, measured)
    measured = f"Largest relative difference {difference:.1e}."
    result.check("At the nearest class the two are equal", difference <= tolerance, measured)
    statement = "A search finds no member of a class's region nearer than the closed form"
    result.check(statement, not any(of["found"]), f"{sum(of['tried']):,} points tried.")
    statement = "The search works: just beyond the bound it finds members of the nearest class's region"
    result.check(statement, beyond > 0.999, f"For {beyond:.1%} of the samples or more.")
    statement = "Without the assumption that k is the predicted class the bound fails, and the search finds that"
    result.check(statement, min(broken) > 0, f"In {min(broken):.1%} to {max(broken):.1%} of the pairs.")
    result.notes = ["The bound is tight at the nearest class alone; at the others the gaps of the table are left."]
    result.data = {"cases": cases}
    axis = result.axes(7, 3.6)[0, 0]
    plot.curves(axis, None, ranks)
    x, y = "rank of the class by its closed-form distance (1: nearest)", "mean gap below the exact distance, percent"
    plot.label(axis, x, y, legend=8, log="x")


def _case(
    classes: int, width: int, samples: int, tries: int, generator: torch.Generator
) -> tuple[dict[str, Any], plot.Floats]:
    """What was found for one random head, and the mean gap by the rank of the class."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    head, z = Head(normal(classes, width), normal(classes)), 2 * normal(samples, width)
    logits = head(z)
    predicted = logits.argmax(dim=1)
    closed, exact = geometry.distances(z, head), geometry.exact_distances(z, head)
    reachable = exact.isfinite()
    ratio = closed[reachable] / exact[reachable]
    nearest, target = geometry.nearest_boundary(closed)
    gap = (1 - ratio).clamp_min(0)
    every = (predicted[:, None] != torch.arange(classes)).nonzero()[:: max(1, samples * (classes - 1) // tries)]
    rows, targets = every.unbind(dim=1)
    # The least likely class in place of the predicted one: z lies on the wrong side of its hyperplanes.
    least = logits.argmin(dim=1)[rows]
    kept = least != targets
    by_rank = (1 - closed / exact).clamp_min(0).gather(1, closed.nan_to_num(torch.inf).argsort(dim=1)[:, :-1])
    found = nearer_points(z[rows], head, predicted[rows], targets, 0.999, generator)
    beyond = nearer_points(z, head, predicted, target, 1.001, generator, tilts=(0.0,))
    broken = nearer_points(z[rows][kept], head, least[kept], targets[kept], 0.999, generator)
    case = {
        "classes": classes,
        "width": width,
        "pairs": int(reachable.sum()),
        "violation": float((ratio - 1).max().clamp_min(0)),
        "nearest": float((nearest / exact.gather(1, target[:, None])[:, 0] - 1).abs().max()),
        "gap_mean": float(gap.mean()),
        "gap_p95": float(gap.quantile(0.95)),
        "equal": float((gap < 1e-9).double().mean()),
        "tried": 17 * len(rows),
        "found": int(found.sum()),
        "beyond": float(beyond.double().mean()),
        "broken": float(broken.double().mean()),
    }
    return case, by_rank.nan_to_num(1.0).mean(dim=0).numpy()


def nearer_points(
    z: Tensor,
    head: Head,
    assumed: Tensor,
    targets: Tensor,
    factor: float,
    generator: torch.Generator,
    tilts: tuple[float, ...] = (0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 2.5),
) -> Tensor:
    """(N,) whether a member of the target's region was found within `factor` times the closed form of z.

    Steps go from the winning class straight to the target, along the hyperplane's normal, and tilted from it in random
    directions, at the full length and half of it.
    `assumed` (N,) is the class k of the closed form, whose numerator is taken by its amount as the paper prints it.
    """
    gap = head.weight[targets] - head.weight[assumed]
    logits = head(z)
    numerator = (logits.gather(1, assumed[:, None]) - logits.gather(1, targets[:, None]))[:, 0].abs()
    length = factor * numerator / torch.linalg.vector_norm(gap, dim=1)
    normal, straight = unit(gap), unit(head.weight[targets] - head.weight[logits.argmax(dim=1)])
    found = head(z + length[:, None] * straight).argmax(dim=1) == targets
    for tilt in tilts:
        across = torch.randn(z.shape, generator=generator, dtype=z.dtype)
        across = unit(across - (across * normal).sum(dim=1, keepdim=True) * normal)
        direction = np.cos(tilt) * normal + np.sin(tilt) * across
        for share in (1.0, 0.5):
            found |= head(z + share * length[:, None] * direction).argmax(dim=1) == targets
    return found
