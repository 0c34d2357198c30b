"""The look of all figures: matplotlib's object interface, so that no window system or global state
is touched."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fdbd.bench.figures import Floats
from fdbd.util.pages import score_range

INSIDE = "#1f5fa8"
OUTSIDE = "#d1495b"
GREY = "#888888"
COLOURS = ("#d1495b", "#edae49", "#66a182", "#7a5195", "#2e4057", "#8d96a3", "#00798c")
Axes = Any
"""Axes of matplotlib, which is an optional extra."""


def label(
    axis: Axes,
    x: str = "",
    y: str = "",
    title: str = "",
    legend: int = 0,
    log: str = "",
    **options: Any,
) -> None:
    """Label the axes; `legend` is the font size of the legend, 0 for none; `log` names the
    logarithmic axes, such as "xy"; further options are the legend's."""
    if "x" in log:
        axis.set_xscale("log")
    if "y" in log:
        axis.set_yscale("log")
    if x:
        axis.set_xlabel(x, fontsize=9)
    if y:
        axis.set_ylabel(y, fontsize=9)
    if title:
        axis.set_title(title, fontsize=9, loc="left")
    if legend:
        axis.legend(fontsize=legend, frameon=False, **options)


def curves(
    axis: Axes, x: Any, lines: Mapping[str, Any], size: int = 3, colours: Sequence[str] = ()
) -> None:
    """One line with dots per label; `x` is common to all, or None for places from 1 on."""
    for colour, (name, y) in zip(colours or (INSIDE, *COLOURS), lines.items()):
        places = np.arange(1, len(y) + 1) if x is None else x
        axis.plot(places, y, marker="o", ms=size, color=colour, label=name)


def histograms(axis: Axes, values: Mapping[str, Floats], bins: int = 60) -> None:
    """Densities of the first set (ID), filled, and of each further one (OOD) as a line, without the
    outermost half percent."""
    low, high = score_range(list(values.values()))
    edges = np.linspace(low, high, bins + 1)
    names = list(values)
    # One filled path instead of a rectangle per bin keeps the files small.
    axis.hist(
        values[names[0]],
        edges,
        density=True,
        histtype="stepfilled",
        color=INSIDE,
        alpha=0.45,
        label=f"{names[0]} (ID)",
    )
    for colour, name in zip(COLOURS, names[1:]):
        axis.hist(
            values[name],
            edges,
            density=True,
            histtype="step",
            color=colour,
            linewidth=1.3,
            label=name,
        )
    axis.set_yticks([])
