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
    ranked = results.ranked()
    found = [_best(results, ranked[0])]
    if len(ranked) > 1:
        found.append(_margin(results, ranked))
    place = next((number for number, row in enumerate(ranked, 1) if row.name == OURS), 1)
    if place > 1:
        found.append(_place_of_ours(results, ranked, place))
    named = ranked[:1] if place == 1 else [ranked[place - 1], ranked[0]]
    return found + _cost(results, named)


def _best(results: ResultTable, best: Row) -> Sentence:
    column = results.main_column
    value = results.value(best, column, "auroc")
    over = f"on average over {len(results.setting.ood)} OOD sets" if column == ALL else f"on {column}"
    return Sentence(
        best.name,
        f" separates ID from OOD best: AUROC {as_percent(value)} % {over} "
        f"(95 % interval {as_percent(value.low)} to {as_percent(value.high)}). Given one ID and one OOD sample, it "
        f"ranks the ID sample higher about {round(100 * value)} times in 100.",
    )


def _margin(results: ResultTable, ranked: list[Row]) -> Sentence:
    column, (best, second) = results.main_column, ranked[:2]
    points = 100 * (results.value(best, column, "auroc") - results.value(second, column, "auroc"))
    tied = [name for name, mark in results.standing(column, "auroc").items() if mark == "tied"]
    ahead = f" is next, {points:.2f} points behind"
    if second.name not in tied:
        return Sentence(second.name, f"{ahead}, more than chance explains.")
    count = "count the two as equal" if len(tied) == 1 else f"{len(tied)} detectors tie with the best"
    return Sentence(second.name, f"{ahead}, which these samples cannot tell from chance: {count}.")


def _place_of_ours(results: ResultTable, ranked: list[Row], place: int) -> Sentence:
    column, row = results.main_column, ranked[place - 1]
    value, best = results.value(row, column, "auroc"), results.value(ranked[0], column, "auroc")
    return Sentence(
        row.name,
        f" is {_ordinal(place)} of {len(ranked)} with {as_percent(value)} %, "
        f"{100 * (best - value):.2f} points behind the best.",
    )


def _cost(results: ResultTable, rows: list[Row]) -> list[Sentence]:
    """Microseconds of the score stage at the largest batch size; nothing where none was timed."""
    timed = [(row.name, max(row.latencies, key=lambda timing: timing.batch_size)) for row in rows if row.latencies]
    if not timed:
        return []
    (name, timing), *others = timed
    share = results.setting.share_of_forward(timing)
    of_forward = "" if share is None else f", {share:.2%} of the network's forward pass"
    against = "".join(f"; {other} {_micro(its)}" for other, its in others)
    return [
        Sentence(name, f" costs {_micro(timing)} per sample in batches of {timing.batch_size}{of_forward}{against}.")
    ]


def _micro(timing: Latency) -> str:
    return f"{number_text(timing.median * 1e6)} µs"


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
