"""The table of the report as data for its template. Every metric is in every cell, and the page shows one at a time:
sorting and choosing a metric then need no drawing, and the table is whole without a script."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fdbd.metrics import as_percent
from fdbd.results.rows import METRICS, SMALLER_IS_BETTER, Row
from fdbd.results.table import ResultTable
from fdbd.results.text import TITLES, datasets, number_text

SPOKEN = {"best": "best", "tied": "tied with the best"}


def table(results: ResultTable, references: Mapping[str, int]) -> dict[str, Any]:
    """Headings and rows, best average AUROC first.

    Args:
        results: what to show.
        references: number of each detector's paper in the list below the table, by the detector's name.
    """
    shown = datasets(results)
    sizes = sorted({timing.batch_size for row in results.finished for timing in row.latencies})
    marks = {(name, metric): results.standing(name, metric) for name in shown for metric in METRICS}
    tints = {(name, metric): _tints(results, name, metric) for name in shown for metric in METRICS}
    return {
        "metrics": [
            {"name": m, "title": TITLES[m], "better": "lower" if m in SMALLER_IS_BETTER else "higher"} for m in METRICS
        ],
        "headings": [_heading(results, name) for name in shown],
        "sizes": sizes,
        "rows": [
            {
                "name": row.name,
                "from_bank": row.from_bank,
                "reference": references.get(row.name),
                "cells": [_cell(results, row, name, marks, tints) for name in shown],
                "timings": [_timing(results, row, size) for size in sizes],
            }
            for row in results.ranked()
        ],
    }


def _heading(results: ResultTable, name: str) -> dict[str, str]:
    count = results.setting.ood.get(name)
    if count is not None:
        return {"name": name, "kind": "set", "remark": f"{count:,}"}
    members = len(results.setting.members(name))
    return {"name": name, "kind": "group", "remark": f"{members} set{'s' if members != 1 else ''}"}


def _cell(results: ResultTable, row: Row, name: str, marks: Mapping[Any, Any], tints: Mapping[Any, Any]) -> Any:
    values = []
    for metric in METRICS:
        value, mark = results.value(row, name, metric), marks[name, metric].get(row.name, "")
        values.append(
            {
                "metric": metric,
                "mark": mark,
                "spoken": SPOKEN.get(mark),
                "value": f"{float(value):.6g}",
                "tint": f"{tints[name, metric].get(row.name, 0.0):.2f}",
                "text": as_percent(value),
                "interval": f"{as_percent(value.low)}–{as_percent(value.high)}",
            }
        )
    return {"kind": "set" if name in results.setting.ood else "group", "values": values}


def _timing(results: ResultTable, row: Row, size: int) -> dict[str, str]:
    timing = next((timing for timing in row.latencies if timing.batch_size == size), None)
    if timing is None or not timing.median > 0:
        return {"value": "", "text": "–", "interval": "", "share": ""}
    micro = [number_text(1e6 * seconds) for seconds in (timing.median, timing.low, timing.high)]
    share = results.setting.share_of_forward(timing)
    return {
        "value": f"{timing.median:.4g}",
        "text": micro[0],
        "interval": f"{micro[1]}–{micro[2]}" if math.isfinite(timing.low) else "",
        "share": "" if share is None else f"{share:.2%} of the forward pass",
    }


def _tints(results: ResultTable, name: str, metric: str) -> dict[str, float]:
    """Tint of each detector's cell, 0 to 1: from the column's lower quartile to its best."""
    sign = -1 if metric in SMALLER_IS_BETTER else 1
    values = {row.name: sign * float(results.value(row, name, metric)) for row in results.finished}
    if not values:
        return {}
    low, best = float(np.quantile(list(values.values()), 0.25)), max(values.values())
    span = best - low
    return {name: max(0.0, (value - low) / span) ** 2 if span > 0 else 0.0 for name, value in values.items()}
