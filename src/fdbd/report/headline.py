"""The first lines of the report: what was compared, which detector came out best, and by how much, in plain words."""

from __future__ import annotations

from typing import Any

from fdbd.metrics import as_percent
from fdbd.results.rows import ALL, Row
from fdbd.results.table import ResultTable
from fdbd.results.text import number_text
from fdbd.util.extras import require

OURS = "fdbd"
"""The detector whose place is told even when it is not the best."""


def verdict(results: ResultTable) -> list[Any]:
    """Sentences of safe markup: the best detector, its margin, and where fDBD stands."""
    text = require("markupsafe", "report").Markup
    if not results.finished:
        return ["No detector gave a result; the reasons are below."]
    column = results.main_column
    ranked = results.ranked(column)
    best, value = ranked[0], results.value(ranked[0], column, "auroc")
    over = f"on average over {len(results.setting.ood)} OOD sets" if column == ALL else f"on {column}"
    sentences = [
        text("<strong>{}</strong> separates ID from OOD best: AUROC <strong>{} %</strong> ").format(
            best.name, as_percent(value)
        )
        + f"{over} (95 % interval {as_percent(value.low)} to {as_percent(value.high)}). Given one ID and one OOD "
        f"sample, it ranks the ID sample higher about {round(100 * value)} times in 100."
    ]
    if len(ranked) > 1:
        sentences.append(_margin(results, column, ranked))
    place = next((number for number, row in enumerate(ranked, 1) if row.name == OURS), 1)
    if place > 1:
        sentences.append(text("<strong>{}</strong>").format(OURS) + _place_of_ours(results, column, ranked, place))
    return sentences


def _margin(results: ResultTable, column: str, ranked: list[Row]) -> str:
    best, second = ranked[:2]
    points = 100 * (results.value(best, column, "auroc") - results.value(second, column, "auroc"))
    tied = [name for name, mark in results.standing(column, "auroc").items() if mark == "tied"]
    ahead = f"The next, {second.name}, is {points:.2f} points behind"
    if second.name not in tied:
        return f"{ahead}, more than chance explains."
    if len(tied) == 1:
        return f"{ahead}, which these samples cannot tell from chance: count the two as equal."
    return f"{ahead}, which these samples cannot tell from chance: {len(tied)} detectors tie with the best."


def _place_of_ours(results: ResultTable, column: str, ranked: list[Row], place: int) -> str:
    row = ranked[place - 1]
    value, best = results.value(row, column, "auroc"), results.value(ranked[0], column, "auroc")
    text = (
        f" is {_ordinal(place)} of {len(ranked)} with {as_percent(value)} %, "
        f"{100 * (best - value):.2f} points behind the best"
    )
    if row.latencies:
        fastest = min(row.latencies, key=lambda timing: timing.median)
        text += f", at {number_text(fastest.median * 1e6)} µs per sample in batches of {fastest.batch_size}"
    return text + "."


def facts(results: ResultTable) -> list[tuple[str, str, str]]:
    """(what, number, remark) of the setting, as plain text."""
    setting = results.setting
    found = (
        [] if setting.accuracy is None else [("Classifier accuracy", f"{as_percent(setting.accuracy)} %", "on ID test")]
    )
    sets, samples = len(setting.ood), sum(setting.ood.values())
    head = f"{setting.num_classes:,} classes, {setting.num_features:,} features"
    return [
        *found,
        ("ID test", f"{setting.test[1]:,}", setting.test[0]),
        ("OOD", f"{samples:,}", f"{sets} set{'s' if sets != 1 else ''}"),
        ("Fitted on", f"{setting.num_train:,}", head),
        ("Detectors", f"{len(results.finished)}", _failed(len(results.failures))),
    ]


def _failed(count: int) -> str:
    return f"{count} could not run" if count else "all ran"


def _ordinal(number: int) -> str:
    last = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{last}"
