"""What a comparison found, in plain sentences: the best detector and its margin, where fDBD stands, what it costs. The
first lines of the terminal and of the report."""

from __future__ import annotations

from typing import NamedTuple

from fdbd.metrics import as_percent
from fdbd.results.rows import ALL, Latency, Row
from fdbd.results.table import ResultTable
from fdbd.results.text import OURS, number_text


class Sentence(NamedTuple):
    """What it is about, to be printed in bold, and the rest."""

    subject: str
    rest: str


def verdict(results: ResultTable) -> list[Sentence]:
    """The best detector, its margin, where fDBD stands, and the cost of both."""
    if not results.finished:
        return [Sentence("No detector gave a result", "; the reasons are below.")]
    ranked, column = results.ranked(), results.main_column
    values = [results.value(row, column, "auroc") for row in ranked]
    best, over = values[0], f"on average over {len(results.setting.ood)} OOD sets" if column == ALL else f"on {column}"
    found = [
        Sentence(
            ranked[0].name,
            f" separates ID from OOD best: AUROC {as_percent(best)} % {over} "
            f"(95 % interval {as_percent(best.low)} to {as_percent(best.high)}). Given one ID and one OOD sample, it "
            f"ranks the ID sample higher about {round(100 * best)} times in 100.",
        )
    ]
    behind = [f"{100 * (best - value):.2f} points behind" for value in values]
    if len(ranked) > 1:
        tied = [name for name, mark in results.standing(column, "auroc").items() if mark == "tied"]
        count = "count the two as equal" if len(tied) == 1 else f"{len(tied)} detectors tie with the best"
        chance = f"which these samples cannot tell from chance: {count}"
        sure = chance if ranked[1].name in tied else "more than chance explains"
        found.append(Sentence(ranked[1].name, f" is next, {behind[1]}, {sure}."))
    place = next((number for number, row in enumerate(ranked) if row.name == OURS), 0)
    if place:
        where = f" is {_ordinal(place + 1)} of {len(ranked)} with {as_percent(values[place])} %"
        found.append(Sentence(OURS, f"{where}, {behind[place]} the best."))
    return found + _cost(results, [ranked[place], *ranked[: min(place, 1)]])


def _cost(results: ResultTable, rows: list[Row]) -> list[Sentence]:
    """Microseconds of the score stage at the largest batch size; nothing where none was timed."""
    timed = [(row.name, max(row.latencies, key=lambda timing: timing.batch_size)) for row in rows if row.latencies]
    if not timed:
        return []
    (name, timing), *others = timed
    share = results.setting.share_of_forward(timing)
    of_forward = "" if share is None else f", {share:.2%} of the network's forward pass"
    against = "".join(f"; {other} {_micro(its)}" for other, its in others)
    rest = f" costs {_micro(timing)} per sample in batches of {timing.batch_size}{of_forward}{against}."
    return [Sentence(name, rest)]


def _micro(timing: Latency) -> str:
    return f"{number_text(timing.median * 1e6)} µs"


def facts(results: ResultTable) -> list[tuple[str, str, str]]:
    """(what, number, remark) of the setting, as plain text."""
    setting, failed = results.setting, len(results.failures)
    accuracy = () if setting.accuracy is None else (f"{as_percent(setting.accuracy)} %",)
    head = f"{setting.num_classes:,} classes, {setting.num_features:,} features"
    return [
        *(("Classifier accuracy", text, "on ID test") for text in accuracy),
        ("ID test", f"{setting.test[1]:,}", setting.test[0]),
        ("OOD", f"{sum(setting.ood.values()):,}", f"{len(setting.ood)} set{'s' if len(setting.ood) != 1 else ''}"),
        ("Fitted on", f"{setting.num_train:,}", head),
        ("Detectors", f"{len(results.finished)}", f"{failed} could not run" if failed else "all ran"),
    ]


def _ordinal(number: int) -> str:
    last = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{last}"
