"""The page of `fdbd choose`: pictures of the pseudo-OOD kinds, what each detector makes of them,
weights and costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fdbd.core.pixels import thumbnail
from fdbd.data.pseudo_ood import KINDS
from fdbd.decision.advice import COST_NOTE, Advice, Interval, describe_cost
from fdbd.decision.choice import Member
from fdbd.util.files import write_text
from fdbd.util.pages import render, with_fading_edges

PLOT_WIDTH, PLOT_HEIGHT = 720, 320
PLOT_LEFT, PLOT_RIGHT, PLOT_BOTTOM = 48, 600, 280
PLOT_TOP = 30
LETTER, LINE = 7, 13
"""The size of a letter in the plot, at most."""
LONGEST = 16
"""Letters of a detector's name."""
LEVEL_STEPS = (1, 2, 5, 10, 20, 25)
"""Percent between two lines of the plot."""
LABELLED = 0.02
"""Weights from which a detector's name stands beside its point."""


def write_choice(advice: Advice, out: Path, title: str) -> None:
    """Write the page, one self-contained .html file."""
    choice = advice.choice
    kinds = list(choice.per_kind)
    cost = choice.cost
    kept = choice.kept
    members = sorted(choice.members, key=lambda member: -member.weight)
    weights = "equal weights"
    if choice.is_weighed:
        weights = kept[0].name + " has the most weight"
    facts = [
        ("kept", f"{len(kept)} of {len(members)}", weights),
        ("time", describe_cost(cost.microseconds), COST_NOTE),
        ("memory", f"{cost.megabytes:.3g} MB", "beside the head"),
        ("held-out samples", f"{choice.num_held_out:,}", f"{len(kinds)} kinds"),
    ]
    page = render(
        "choice.html",
        with_fading_edges(),
        advice.to_dict(),
        images="; img-src data:",
        title=title,
        advice=advice.sentence,
        cautions=[*advice.cautions, *choice.notes],
        facts=facts,
        kinds=[_kind(name, advice.pictures.get(name)) for name in kinds],
        rows=[_row(member, kinds) for member in members],
        sets=list(advice.ood),
        real=_real_rows(advice),
        plot=_plot(advice),
        cost_note=COST_NOTE,
    )
    write_text(out, page)


def _kind(name: str, picture: Tensor | None) -> dict[str, Any]:
    summary = KINDS[name].summary if name in KINDS else "given by you"
    address = None if picture is None else _data_address(picture)
    return {"name": name, "summary": summary, "picture": address}


def _data_address(picture: Tensor) -> str:
    """A small JPEG of an image (C, H, W) from 0 to 1; of other than three channels, its first."""
    if picture.shape[0] != 3:
        picture = picture[:1].expand(3, -1, -1)
    return thumbnail((255 * picture).round().byte().permute(1, 2, 0).contiguous().numpy())


def _row(member: Member, kinds: list[str]) -> dict[str, Any]:
    share = f"{100 * member.share:.0f} %" if member.share else ""
    return {
        "name": member.name,
        "share": share,
        "time": describe_cost(member.cost.microseconds),
        "memory": _megabytes(member.cost.megabytes),
        "cells": [_cell(member.aurocs[kind]) for kind in kinds],
    }


def _megabytes(size: float) -> str:
    """A size that a reader takes in: some detectors keep a handful of numbers."""
    if 0 < size < 0.001:
        return "< 0.001"
    return f"{size:.2g}"


def _cell(found: Interval) -> dict[str, str]:
    value, low, high = found
    # Half of all pairs in the right order is chance, and has no colour; most values are high.
    heat = max(0.0, 2 * value - 1) ** 4
    return {
        "value": f"{100 * value:.1f}",
        "interval": f"{100 * low:.0f}–{100 * high:.0f}",
        "heat": f"{heat:.3f}",
    }


def _real_rows(advice: Advice) -> list[dict[str, Any]]:
    if not advice.ood:
        return []
    detectors = list(next(iter(advice.ood.values())))
    detectors.sort(key=lambda name: name != "auto")
    rows = []
    for name in detectors:
        cells = [_cell(row[name]) for row in advice.ood.values()]
        rows.append({"name": name, "cells": cells})
    return rows


def _would_overlap(point: dict[str, Any], x: float, y: float) -> bool:
    """Whether a name at this place would be written over that of the point."""
    if not point["label"]:
        return False
    width = max(LETTER * len(point["label"]), LETTER * LONGEST)
    return bool(abs(point["x"] - x) < width and abs(point["y"] - y) < LINE)


class _TimeAxis(NamedTuple):
    """The logarithm of the time, from left to right."""

    first: int
    """Power of ten, in microseconds, at the left end."""
    last: int

    @classmethod
    def around(cls, times: Sequence[float]) -> _TimeAxis:
        """The axis that holds these times, in microseconds."""
        first = math.floor(math.log10(min(times)))
        last = max(first + 1, math.ceil(math.log10(max(times))))
        return cls(first, last)

    def place(self, microseconds: float) -> float:
        share = (math.log10(microseconds) - self.first) / (self.last - self.first)
        return round(PLOT_LEFT + share * (PLOT_RIGHT - PLOT_LEFT), 1)

    def ticks(self) -> list[dict[str, Any]]:
        found = []
        for power in range(self.first, self.last + 1):
            time = 10.0**power
            found.append({"x": self.place(time), "label": describe_cost(time)})
        return found


def _height(share: float) -> float:
    """Where a share of the largest weight stands in the plot."""
    return round(PLOT_BOTTOM - share * (PLOT_BOTTOM - PLOT_TOP), 1)


def _levels(top: float) -> list[dict[str, Any]]:
    """Round weights up to the largest, each with its place: three to five of them."""
    step = next(step for step in LEVEL_STEPS if 100 * top / step < 5)
    found = []
    for percent in range(0, math.floor(100 * top) + 1, step):
        found.append({"y": _height(percent / 100 / top), "label": f"{percent} %"})
    return found


def _plot(advice: Advice) -> dict[str, Any]:
    """Places of all detectors: the logarithm of the time from left to right, the weight upwards."""
    # The weightiest first, so that their names have room.
    members = sorted(advice.choice.members, key=lambda member: -member.weight)
    times = [max(member.cost.microseconds, 1e-3) for member in members]
    axis = _TimeAxis.around(times)
    top = max(member.weight for member in members)
    front = {member.name for member in advice.pareto}
    points: list[dict[str, Any]] = []
    for member, time in zip(members, times):
        x = axis.place(time)
        y = _height(member.weight / top)
        has_room = not any(_would_overlap(other, x, y) for other in points)
        label = ""
        if member.weight >= LABELLED and has_room:
            label = member.name
        points.append(
            {
                "x": x,
                "y": y,
                "front": member.name in front,
                "label": label,
                "title": f"{member.name}: {100 * member.weight:.1f} %, {describe_cost(time)}",
            }
        )
    return {
        "width": PLOT_WIDTH,
        "height": PLOT_HEIGHT,
        "left": PLOT_LEFT,
        "right": PLOT_RIGHT,
        "bottom": PLOT_BOTTOM,
        "levels": _levels(top),
        "points": points,
        "ticks": axis.ticks(),
    }
