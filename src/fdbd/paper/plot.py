"""The look of all figures: matplotlib's object interface, so that no window system or global state is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdbd.report.numbers import score_range
from fdbd.util.extras import require

INSIDE, OUTSIDE = "#1f5fa8", "#d1495b"
COLOURS = ("#d1495b", "#edae49", "#66a182", "#7a5195", "#2e4057", "#8d96a3", "#00798c")

Floats = NDArray[np.float64]


def figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """A Figure of so many inches and an array (rows, columns) of its axes."""
    figures = require("matplotlib.figure", "report")
    made = figures.Figure(figsize=(width, height), layout="constrained")
    axes = made.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    return made, axes


def histograms(axis: Any, inside: tuple[str, Floats], outside: Mapping[str, Floats], bins: int = 60) -> None:
    """The ID set filled, each OOD set as a line; densities, the outermost half percent left out."""
    low, high = score_range([inside[1], *outside.values()])
    edges = np.linspace(low, high, bins + 1)
    filled = {"histtype": "stepfilled", "color": INSIDE, "alpha": 0.45}  # one path: bars would make large files
    axis.hist(inside[1], edges, density=True, label=f"{inside[0]} (ID)", **filled)
    for colour, (name, values) in zip(COLOURS, outside.items()):
        axis.hist(values, edges, density=True, histtype="step", color=colour, linewidth=1.3, label=name)
    axis.set_yticks([])


def dots(axis: Any, names: Sequence[str], values: Sequence[float], label: str, marks: Sequence[bool]) -> None:
    """One horizontal line with a dot a name, first on top; marked ones in the colour of ID."""
    places = np.arange(len(names))[::-1]
    axis.hlines(places, 0 if not len(values) else min(values), values, color="#cccccc", linewidth=1)
    axis.scatter(values, places, color=[INSIDE if mark else "#888888" for mark in marks], zorder=3, s=22)
    axis.set_yticks(places, names, fontsize=8)
    axis.set_ylim(-0.6, len(names) - 0.4)
    axis.set_xlabel(label, fontsize=9)
    axis.grid(axis="x", color="#eeeeee")
