"""The table of the report. Every metric is in every cell, and the page shows one at a time: sorting and choosing a
metric then need no drawing, and the table is whole without a script."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

import numpy as np

from fdbd.bench.results import METRICS, SMALLER_IS_BETTER, Results, Row
from fdbd.bench.tables import TITLES, columns
from fdbd.metrics import Estimate, as_percent

Marks = Mapping[tuple[str, str], Mapping[str, str]]
SPOKEN = {"best": "best", "tied": "tied with the best"}


def table(results: Results, references: Mapping[str, int]) -> str:
    """The <table>, best average AUROC first.

    Args:
        results: what to show.
        references: number of the footnote of each detector's paper, by the detector's name.
    """
    if not results.finished:
        return ""
    shown = [column for column, _ in columns(results, ["auroc"])]
    keys = [(column, metric) for column in shown for metric in METRICS]
    marks = {key: results.standing(*key) for key in keys}
    warmth = {key: _warmth(results, *key) for key in keys}
    sizes = _batch_sizes(results)
    head = "".join(_heading(results, column, number == 0) for number, column in enumerate(shown))
    head += "".join(_timing_heading(size) for size in sizes)
    body = "".join(
        f'<tr data-detector="{number}">{_name_cell(row, references)}'
        + "".join(_cell(results, row, column, marks, warmth) for column in shown)
        + "".join(_timing_cell(results, row, size) for size in sizes)
        + "</tr>\n"
        for number, row in enumerate(results.ranked())
    )
    return (
        '<table id="results" data-metric="auroc">'
        '<caption class="unseen">Detectors by metric and OOD set, percent</caption>'
        f'<thead><tr><th scope="col" data-kind="name"><button type="button">Detector</button></th>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table>"
    )


def _heading(results: Results, column: str, sorted_by: bool) -> str:
    count = results.setting.ood.get(column)
    members = results.setting.members(column) if count is None else ()
    remark = f"{count:,}" if count is not None else f"{len(members)} set{'s' if len(members) != 1 else ''}"
    kind = "set" if count is not None else "group"
    order = ' aria-sort="descending"' if sorted_by else ""
    return (
        f'<th scope="col" class="{kind}" data-kind="metric"{order} title="{escape(column)}">'
        f'<button type="button">{escape(column)}<small>{remark}</small></button></th>'
    )


def _timing_heading(size: int) -> str:
    return (
        f'<th scope="col" class="time" data-kind="time"><button type="button">batch {size:,}'
        "<small>µs a sample</small></button></th>"
    )


def _name_cell(row: Row, references: Mapping[str, int]) -> str:
    number = references.get(row.name)
    note = "" if number is None else f'<sup><a href="#paper-{number}" aria-label="paper {number}">{number}</a></sup>'
    return f'<th scope="row"><button type="button" class="pick">{escape(row.name)}</button>{note}</th>'


def _cell(
    results: Results, row: Row, column: str, marks: Marks, warmth: Mapping[tuple[str, str], Mapping[str, float]]
) -> str:
    spans = []
    for metric in METRICS:
        value, mark = results.value(row, column, metric), marks[column, metric].get(row.name, "")
        heat = warmth[column, metric].get(row.name, 0.0)
        spoken = f'<span class="unseen"> {SPOKEN[mark]}</span>' if mark else ""
        spans.append(
            f'<span class="v {metric} {mark}" data-v="{float(value):.6g}" style="--h:{heat:.2f}">'
            f"{as_percent(value)}{spoken}<small>{_interval(value)}</small></span>"
        )
    kind = "set" if column in results.setting.ood else "group"
    return f'<td class="{kind}">{"".join(spans)}</td>'


def _timing_cell(results: Results, row: Row, size: int) -> str:
    timing = next((timing for timing in row.latencies if timing.batch_size == size), None)
    if timing is None:
        return '<td class="time"><span class="v" data-v="">–</span></td>'
    forward = results.setting.forward_seconds
    share = f"{timing.median / forward:.2%} of the forward pass" if forward else ""
    return (
        f'<td class="time"><span class="v" data-v="{timing.median:.4g}" data-share="{share}">'
        f"{_microseconds(timing.median)}<small>p95 {_microseconds(timing.p95)}</small></span></td>"
    )


def _warmth(results: Results, column: str, metric: str) -> dict[str, float]:
    """Tint of each detector's cell, 0 to 1: from the column's lower quartile to its best."""
    sign = -1 if metric in SMALLER_IS_BETTER else 1
    values = {row.name: sign * float(results.value(row, column, metric)) for row in results.finished}
    low, best = float(np.quantile(list(values.values()), 0.25)), max(values.values())
    span = best - low
    return {name: max(0.0, (value - low) / span) ** 2 if span > 0 else 0.0 for name, value in values.items()}


def _batch_sizes(results: Results) -> list[int]:
    return sorted({timing.batch_size for row in results.finished for timing in row.latencies})


def _interval(value: Estimate) -> str:
    return f"{as_percent(value.low)}–{as_percent(value.high)}"


def _microseconds(seconds: float) -> str:
    micro = seconds * 1e6
    if micro <= 0 or not math.isfinite(micro):
        return "–"
    return (
        f"{micro:,.0f}"
        if micro >= 100
        else f"{micro:.1f}"
        if micro >= 10
        else f"{micro:.2f}"
        if micro >= 1
        else f"{micro:.3f}"
    )


def metric_choices(results: Results) -> str:
    """Radio buttons, one a metric."""
    better = {metric: "lower is better" if metric in SMALLER_IS_BETTER else "higher is better" for metric in METRICS}
    return "".join(
        f'<label title="{better[metric]}"><input type="radio" name="metric" value="{metric}"'
        f"{' checked' if metric == 'auroc' else ''}><span>{TITLES[metric]}</span></label>"
        for metric in METRICS
    )
