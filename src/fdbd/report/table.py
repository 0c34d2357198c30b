"""The table of the report as data for its template. Every metric is in every cell, and the page shows one at a time:
sorting and choosing a metric then need no drawing, and the table is whole without a script."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fdbd.metrics import as_percent
from fdbd.results.rows import METRICS, SMALLER_IS_BETTER, Row
from fdbd.results.table import ResultTable
from fdbd.results.text import TITLES, datasets, number_text

SPOKEN = {"best": "best", "tied": "tied with the best"}


def table(results: ResultTable) -> dict[str, Any]:
    """Headings, and rows with their cells, best average AUROC first."""
    ranked, headings = results.ranked(), []
    rows: list[dict[str, Any]] = [{"row": row, "cells": []} for row in ranked]
    for name in datasets(results):
        count, members = results.setting.ood.get(name), len(results.members(name))
        remark = f"{members} set{'s' if members != 1 else ''}" if count is None else f"{count:,}"
        headings.append({"name": name, "kind": "group" if count is None else "set", "remark": remark})
        for row, cell in zip(rows, zip(*(_cells(results, ranked, name, metric) for metric in METRICS))):
            row["cells"].append(cell)
    for row in rows:
        row["timings"] = [_timing(results, row["row"], size) for size in results.batch_sizes]
    better = {metric: "lower" if metric in SMALLER_IS_BETTER else "higher" for metric in METRICS}
    return {
        "metrics": [{"name": metric, "title": TITLES[metric], "better": better[metric]} for metric in METRICS],
        "headings": headings,
        "sizes": results.batch_sizes,
        "rows": rows,
    }


def _cells(results: ResultTable, rows: list[Row], name: str, metric: str) -> list[dict[str, Any]]:
    """A column of one metric, with a tint of each cell, 0 to 1: from the column's lower quartile to its best."""
    marks = results.standing(name, metric)
    values = [results.value(row, name, metric) for row in rows]
    signed = [-float(value) if metric in SMALLER_IS_BETTER else float(value) for value in values]
    low, best = (float(np.quantile(signed, 0.25)), max(signed)) if signed else (0.0, 0.0)
    return [
        {
            "metric": metric,
            "mark": marks.get(row.name, ""),
            "spoken": SPOKEN.get(marks.get(row.name, "")),
            "value": f"{float(value):.6g}",
            "tint": f"{max(0.0, (quality - low) / (best - low)) ** 2 if best > low else 0.0:.2f}",
            "text": as_percent(value),
            "interval": f"{as_percent(value.low)}–{as_percent(value.high)}",
        }
        for row, value, quality in zip(rows, values, signed)
    ]


def _timing(results: ResultTable, row: Row, size: int) -> dict[str, str]:
    timing = row.latency(size)
    if timing is None or not timing.median > 0:
        return {"value": "", "text": "–", "interval": "", "share": ""}
    median, low, high = (number_text(1e6 * seconds) for seconds in (timing.median, timing.low, timing.high))
    share = results.setting.share_of_forward(timing)
    return {
        "value": f"{timing.median:.4g}",
        "text": median,
        "interval": f"{low}–{high}" if math.isfinite(timing.low) else "",
        "share": "" if share is None else f"{share:.2%} of the forward pass",
    }
