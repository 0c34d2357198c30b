"""The report: template, style, script and data put together into one page that needs nothing else.
Its figures are drawn from plain JSON values: histograms, curves, latencies; never the scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fdbd.bench.figures import Floats, accepting_score, bin_counts, short
from fdbd.bench.measures import MEASURES
from fdbd.bench.rows import Row, machine
from fdbd.bench.text import (
    cell_text,
    collapse_line,
    datasets,
    explanations,
    number_text,
    row_name,
    share_text,
)
from fdbd.bench.verdict import facts, verdict
from fdbd.metrics import as_percent, risk_coverage, roc_curve
from fdbd.metrics.selective import as_flags
from fdbd.util.pages import asset, render, score_range

if TYPE_CHECKING:
    from fdbd.bench.results import Results

SCRIPTS = (
    "chart.js",
    "scroller.js",
    "table.js",
    "histograms.js",
    "roc.js",
    "risk.js",
    "deviation.js",
    "samples.js",
    "latency.js",
    "theme.js",
    "main.js",
)
BINS = 48
# A bin of ID ranks is 2.5 % wide, so that the threshold of FPR95 stands at the end of one.
RANK_BINS = 40
ROC_POINTS = 80
ROC_SCALE = 1000
"""Rates of curves are whole numbers of this: finer than a pixel."""
RISK_POINTS = 60


def html(results: Results) -> str:
    """The report of a benchmark as one self-contained HTML page; `Results.to_html` writes it to a
    file."""
    setting = results.setting
    papers = [row.paper for row in results.ranked() if row.paper is not None]
    # Best first, as in the table.
    detectors = [_detector(results, row) for row in results.ranked()]
    data = {
        "id": setting.test[0],
        "ood": list(setting.ood),
        "positive": setting.positive,
        "columns": datasets(results),
        "detectors": detectors,
        "classes": list(setting.class_names),
        "figures": results.figures,
    }
    return render(
        "page.html",
        _script(),
        data,
        images="; img-src data:",
        setting=setting,
        title=setting.title or "Out-of-distribution detection, compared",
        facts=facts(results),
        verdict=verdict(results),
        explanations=[*explanations(results, results.metrics), *_lines(collapse_line(results))],
        table=table(results),
        has_risk=any("risk" in detector for detector in detectors),
        failures=results.failures,
        any_finished=bool(results.finished),
        papers=list(dict.fromkeys(papers)),
        machine=_machine_line(),
    )


def _script() -> str:
    parts = "\n".join(asset(name) for name in SCRIPTS)
    return '"use strict";\n(() => {\n' + parts + "\n})();\n"


def _lines(text: str) -> list[str]:
    return [text] if text else []


def _machine_line() -> str:
    made = machine()
    plural = "" if made["threads"] == 1 else "s"
    return (
        f"fdbd {made['fdbd']}, torch {made['torch']}, Python {made['python']}, "
        f"{made['processor']}, {made['threads']} thread{plural}"
    )


def _detector(results: Results, row: Row) -> dict[str, Any]:
    """One detector's part of the page's data."""
    setting = results.setting
    found: dict[str, Any] = {"name": row.name, "auroc": {}, "fpr": [], "latency": {}, "share": {}}
    for column in datasets(results):
        found["auroc"][column] = short(results.value(row, column, "auroc"))
    for name in setting.ood:
        found["fpr"].append(short(results.value(row, name, "fpr95")))
    for timing in row.latencies:
        size = str(timing.batch_size)
        found["latency"][size] = short(timing.median, 4)
        found["share"][size] = _number(setting.share_of_forward(timing))
    if row.has_scores:
        found |= _curves(results, row)
    # Results from a file without scores, and merged ones, have no histograms and no curves.
    return found


def _curves(results: Results, row: Row) -> dict[str, Any]:
    """What is drawn from the scores of single samples."""
    setting = results.setting
    inside = _array(row.id_scores)
    outside = [_array(row.ood_scores[name]) for name in setting.ood]
    low, high = score_range([inside, *outside])
    thresholds = [_fpr_threshold(inside, scores, setting.positive) for scores in outside]
    found: dict[str, Any] = {
        "low": short(low, 7),
        "high": short(high, 7),
        "id": bin_counts(inside, low, high, BINS),
        "ood": [bin_counts(scores, low, high, BINS) for scores in outside],
        "thresholds": [_number(threshold) for threshold in thresholds],
        "ranks": [_rank_histogram(inside, scores) for scores in outside],
        "cuts": [short((inside < threshold).mean()) for threshold in thresholds],
        "roc": [_roc(inside, scores) for scores in outside],
    }
    if setting.correct is not None:
        right = as_flags(list(setting.correct), len(inside))
        found["risk"] = [_risk(inside, right, None)]
        found["risk"] += [_risk(inside, right, scores) for scores in outside]
    return found


def _array(scores: Any) -> Floats:
    values: Floats = scores.detach().cpu().double().numpy()
    return values


def _fpr_threshold(inside: Floats, outside: Floats, positive: str) -> float:
    """Where FPR95 is read: the score that 95 % of ID reach, or that 95 % of OOD do not exceed."""
    if positive == "id":
        return accepting_score(inside, 0.95)
    return -accepting_score(-outside, 0.95)


def _roc(inside: Floats, outside: Floats) -> list[int]:
    """OOD and ID accepted, in turns."""
    fpr, tpr, _ = roc_curve(inside, outside, points=ROC_POINTS)
    return _scaled_points(fpr, tpr)


def _risk(inside: Floats, right: Floats, outside: Floats | None) -> list[int]:
    """Coverage and risk, in turns."""
    coverage, risk = risk_coverage(inside, right, outside, points=RISK_POINTS)
    return _scaled_points(coverage, risk)


def _scaled_points(x: Floats, y: Floats) -> list[int]:
    """Two rates in turns, as whole numbers; points that fall together are one."""
    points = np.rint(np.stack([x, y], axis=1) * ROC_SCALE).astype(np.int64)
    flat: list[int] = np.unique(points, axis=0).ravel().tolist()
    return flat


def _rank_histogram(inside: Floats, outside: Floats) -> list[int]:
    """OOD samples, in 1/10,000 of all, by the share of ID scores below theirs. On this scale ID
    scores are spread evenly: those that tie are spread over the ranks they share, OOD scores that
    tie with them likewise."""
    # The whole curve: at each threshold the shares of OOD (fpr) and of ID (tpr) that are accepted.
    fpr, tpr, _ = roc_curve(inside, outside, points=len(inside) + len(outside) + 2)
    id_rejected = 1 - tpr[::-1]
    ood_rejected = 1 - fpr[::-1]
    # Between two points of the curve, scores tie: there the line spreads them.
    ends_of_bins = np.linspace(0, 1, RANK_BINS + 1)
    rejected = np.interp(ends_of_bins, id_rejected, ood_rejected)
    rejected[0] = 0
    rejected[-1] = 1
    counts: list[int] = np.rint(np.diff(rejected) * 10_000).astype(np.int64).tolist()
    return counts


def _number(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return short(value, 7)


def table(results: Results) -> dict[str, Any]:
    """The table of the report as data for its template: headings, and rows with their cells, best
    average AUROC first.

    Every metric is in every cell, and the page shows one at a time: sorting and choosing a metric
    then need no drawing, and the table is whole without a script.
    """
    ranked = results.ranked()
    rows: list[dict[str, Any]] = []
    for row in ranked:
        timings = [_timing(results, row, size) for size in results.batch_sizes]
        rows.append({"row": row, "name": row_name(row), "cells": [], "timings": timings})
    headings = []
    for name in datasets(results):
        headings.append(_heading(results, name))
        by_metric = [_cells(results, ranked, name, metric) for metric in results.metrics]
        for place, entry in enumerate(rows):
            entry["cells"].append([cells[place] for cells in by_metric])
    return {
        "metrics": [_metric(name) for name in results.metrics],
        "headings": headings,
        "sizes": results.batch_sizes,
        "rows": rows,
        "selective": _selective(results, ranked),
    }


def _metric(name: str) -> dict[str, str]:
    better = "lower" if MEASURES[name].smaller_is_better else "higher"
    return {"name": name, "title": MEASURES[name].title, "better": better}


def _heading(results: Results, name: str) -> dict[str, str]:
    if name in results.setting.ood:
        return {"name": name, "kind": "set", "remark": f"{results.setting.ood[name]:,}"}
    members = len(results.members(name))
    plural = "" if members == 1 else "s"
    return {"name": name, "kind": "group", "remark": f"{members} set{plural}"}


def _selective(results: Results, ranked: Sequence[Row]) -> dict[str, Any] | None:
    """The measures of ID samples alone, as a table of their own."""
    if not results.id_metrics:
        return None
    test = results.setting.test[0]
    columns = [_cells(results, ranked, test, metric) for metric in results.id_metrics]
    rows = []
    for place, row in enumerate(ranked):
        rows.append({"name": row_name(row), "cells": [cells[place] for cells in columns]})
    titles = [MEASURES[metric].title for metric in results.id_metrics]
    notes = [MEASURES[metric].explanation for metric in results.id_metrics]
    return {"titles": titles, "notes": notes, "rows": rows}


def _cells(results: Results, rows: Sequence[Row], name: str, metric: str) -> list[dict[str, Any]]:
    """A column of one metric, with a tint of each cell, 0 to 1: from the column's lower quartile to
    its best."""
    marks = results.standing(name, metric)
    values = [results.value(row, name, metric) for row in rows]
    tints = _tints([float(value) for value in values], MEASURES[metric].smaller_is_better)
    # For those who listen to the page.
    spoken = {"best": "best", "tied": "tied with the best"}
    found = []
    for row, value, tint in zip(rows, values, tints):
        mark = marks.get(row.name, "")
        published = _published_auroc(results, row, name)
        published_text = None
        if published is not None and metric == "auroc":
            published_text = _published_text(value, published)
        found.append(
            {
                "metric": metric,
                "mark": mark,
                "spoken": spoken.get(mark),
                "value": f"{float(value):.6g}",
                "tint": f"{tint:.2f}",
                "text": cell_text(value),
                "interval": f"{as_percent(value.low)}–{as_percent(value.high)}",
                "published": published_text,
            }
        )
    return found


def _published_auroc(results: Results, row: Row, name: str) -> float | None:
    """What others have published of a detector on a set or group; None: nothing is known."""
    published = results.setting.published
    if published is None:
        return None
    return published.auroc.get(row.name, {}).get(name)


def _published_text(value: float, theirs: float) -> str:
    return f"published {as_percent(theirs)} ({100 * (float(value) - theirs):+.2f})"


def _tints(values: Sequence[float], smaller_is_better: bool) -> list[float]:
    if not values:
        return []
    goodness = np.array(values)
    if smaller_is_better:
        goodness = -goodness
    low = float(np.quantile(goodness, 0.25))
    best = float(goodness.max())
    if best <= low:
        return [0.0] * len(values)
    return [max(0.0, (each - low) / (best - low)) ** 2 for each in goodness.tolist()]


def _timing(results: Results, row: Row, size: int) -> dict[str, str]:
    timing = row.latency(size)
    if timing is None or not timing.median > 0:
        return {"value": "", "text": "–", "interval": "", "share": ""}
    interval = ""
    if math.isfinite(timing.low):
        interval = f"{number_text(1e6 * timing.low)}–{number_text(1e6 * timing.high)}"
    share = results.setting.share_of_forward(timing)
    share_of = "" if share is None else f"{share_text(share)} of the forward pass"
    return {
        "value": f"{timing.median:.4g}",
        "text": number_text(1e6 * timing.median),
        "interval": interval,
        "share": share_of,
    }
