"""The page: template, style, script and data put together into one string that needs nothing else.
Its figures are drawn from plain JSON values: histograms, ROC curves, latencies; never the
scores."""

import math
from typing import Any

import numpy as np

from fdbd.bench.figures import Floats, accepting_score, bin_counts, short
from fdbd.bench.rows import METRICS, SMALLER_IS_BETTER, Row, convention, machine
from fdbd.bench.table import ResultTable
from fdbd.bench.text import TITLES, datasets, facts, number_text, verdict
from fdbd.metrics import as_percent, roc_curve
from fdbd.util.pages import asset, render, score_range

SCRIPTS = (
    "chart.js",
    "table.js",
    "histograms.js",
    "roc.js",
    "deviation.js",
    "samples.js",
    "latency.js",
    "main.js",
)
BINS = 48
RANK_BINS = (
    40  # a bin of ID ranks is 2.5 % wide, so that the threshold of FPR95 stands at the end of one
)
ROC_POINTS = 80
ROC_SCALE = 1000  # ROC rates are whole numbers of this: finer than a pixel


def html(results: ResultTable) -> str:
    """The report of a benchmark as one self-contained HTML page; `Results.to_html` writes it to a
    file."""
    papers = list(dict.fromkeys(row.paper for row in results.ranked() if row.paper is not None))
    made, setting = machine(), results.setting
    threads = f"{made['threads']} thread{'s' if made['threads'] != 1 else ''}"
    data = {
        "id": setting.test[0],
        "ood": list(setting.ood),
        "positive": setting.positive,
        "columns": datasets(results),
        "detectors": [
            _detector(results, row) for row in results.ranked()
        ],  # best first, as in the table
        "classes": list(setting.class_names),
        "figures": results.figures,
    }
    return render(
        "page.html",
        '"use strict";\n(() => {\n' + "\n".join(asset(name) for name in SCRIPTS) + "\n})();\n",
        data,
        images="; img-src data:",
        setting=setting,
        title=setting.title or "Out-of-distribution detection, compared",
        facts=facts(results),
        verdict=verdict(results),
        convention=convention(setting.positive),
        table=table(results),
        failures=results.failures,
        any_finished=bool(results.finished),
        papers=papers,
        machine=f"fdbd {made['fdbd']}, torch {made['torch']}, Python {made['python']}, {made['processor']}, {threads}",
    )


def _detector(results: ResultTable, row: Row) -> dict[str, Any]:
    setting = results.setting
    common = {
        "name": row.name,
        "auroc": {
            column: short(results.value(row, column, "auroc")) for column in datasets(results)
        },
        "fpr": [short(row.evaluations[name].fpr95) for name in setting.ood],
        "latency": {str(timing.batch_size): short(timing.median, 4) for timing in row.latencies},
        "share": {
            str(timing.batch_size): _number(setting.share_of_forward(timing))
            for timing in row.latencies
        },
    }
    if not row.has_scores:  # results from a file without them: no histograms and no curves
        return common
    sides = [row.id_scores, *(row.ood_scores[name] for name in setting.ood)]
    inside, *outside = (scores.detach().cpu().double().numpy() for scores in sides)
    low, high = score_range([inside, *outside])
    # Where FPR95 is read: the score that 95 % of ID reach, or that 95 % of OOD do not exceed.
    is_id = setting.positive == "id"
    thresholds = [
        accepting_score(inside, 0.95) if is_id else -accepting_score(-scores, 0.95)
        for scores in outside
    ]
    return {
        **common,
        "low": short(low, 7),
        "high": short(high, 7),
        "id": bin_counts(inside, low, high, BINS),
        "ood": [bin_counts(scores, low, high, BINS) for scores in outside],
        "thresholds": [_number(threshold) for threshold in thresholds],
        "ranks": [_rank_histogram(inside, scores) for scores in outside],
        "cuts": [short((inside < threshold).mean()) for threshold in thresholds],
        "roc": [_curve(inside, scores) for scores in outside],
    }


def _curve(inside: Floats, outside: Floats) -> list[int]:
    """OOD and ID accepted, in turns."""
    fpr, tpr, _ = roc_curve(inside, outside, points=ROC_POINTS)
    points = np.unique(np.rint(np.stack([fpr, tpr], axis=1) * ROC_SCALE).astype(np.int64), axis=0)
    flat: list[int] = points.ravel().tolist()
    return flat


def _rank_histogram(inside: Floats, outside: Floats) -> list[int]:
    """OOD samples, in 1/10,000 of all, by the share of ID scores below theirs. On this scale ID
    scores are spread evenly: those that tie are spread over the ranks they share, OOD scores that
    tie with them likewise."""
    fpr, tpr, _ = roc_curve(inside, outside, points=len(inside) + len(outside) + 2)
    rejected = np.interp(np.linspace(0, 1, RANK_BINS + 1), 1 - tpr[::-1], 1 - fpr[::-1])
    rejected[0], rejected[-1] = 0, 1
    counts: list[int] = np.rint(np.diff(rejected) * 10_000).astype(np.int64).tolist()
    return counts


def _number(value: float | None) -> float | None:
    return short(value, 7) if value is not None and math.isfinite(value) else None


def table(results: ResultTable) -> dict[str, Any]:
    """The table of the report as data for its template: headings, and rows with their cells, best
    average AUROC first.

    Every metric is in every cell, and the page shows one at a time: sorting and choosing a metric
    then need no drawing, and the table is whole without a script.
    """
    ranked, headings = results.ranked(), []
    rows: list[dict[str, Any]] = [
        {
            "row": row,
            "cells": [],
            "timings": [_timing(results, row, size) for size in results.batch_sizes],
        }
        for row in ranked
    ]
    for name in datasets(results):
        count, members = results.setting.ood.get(name), len(results.members(name))
        remark = f"{members} set{'s' if members != 1 else ''}" if count is None else f"{count:,}"
        headings.append(
            {"name": name, "kind": "group" if count is None else "set", "remark": remark}
        )
        for row, cell in zip(
            rows, zip(*(_cells(results, ranked, name, metric) for metric in METRICS))
        ):
            row["cells"].append(cell)
    better = {metric: "lower" if metric in SMALLER_IS_BETTER else "higher" for metric in METRICS}
    return {
        "metrics": [
            {"name": metric, "title": TITLES[metric], "better": better[metric]}
            for metric in METRICS
        ],
        "headings": headings,
        "sizes": results.batch_sizes,
        "rows": rows,
    }


def _cells(results: ResultTable, rows: list[Row], name: str, metric: str) -> list[dict[str, Any]]:
    """A column of one metric, with a tint of each cell, 0 to 1: from the column's lower quartile to
    its best."""
    marks = results.standing(name, metric)
    values = [results.value(row, name, metric) for row in rows]
    signed = [-float(value) if metric in SMALLER_IS_BETTER else float(value) for value in values]
    low, best = (float(np.quantile(signed, 0.25)), max(signed)) if signed else (0.0, 0.0)
    return [
        {
            "metric": metric,
            "mark": marks.get(row.name, ""),
            "spoken": {"best": "best", "tied": "tied with the best"}.get(marks.get(row.name, "")),
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
    median, low, high = (
        number_text(1e6 * seconds) for seconds in (timing.median, timing.low, timing.high)
    )
    share = results.setting.share_of_forward(timing)
    return {
        "value": f"{timing.median:.4g}",
        "text": median,
        "interval": f"{low}–{high}" if math.isfinite(timing.low) else "",
        "share": "" if share is None else f"{share:.2%} of the forward pass",
    }
