"""What a benchmark found, in a few plain sentences: the best detector, its margin, where fDBD
stands, and what both cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fdbd.bench.rows import ALL, Latency, Row
from fdbd.bench.text import OURS, number_text, share_text
from fdbd.metrics import as_percent

if TYPE_CHECKING:
    from fdbd.bench.results import Results


class Sentence(NamedTuple):
    """What it is about, to be printed in bold, and the rest."""

    subject: str
    rest: str


class Fact(NamedTuple):
    """A number of the setting: what it is, the number, a remark."""

    what: str
    number: str
    remark: str


def verdict(results: Results) -> list[Sentence]:
    """The best detector, its margin, where fDBD stands, and the cost of both."""
    if not results.finished:
        return [Sentence("No detector gave a result", "; the reasons are below.")]
    ranked = results.ranked()
    found = [_about_best(results, ranked[0])]
    if len(ranked) > 1:
        found.append(_about_second(results, ranked))
    costs = [ranked[0]]
    for place, row in enumerate(ranked):
        if row.name == OURS and place > 0:
            found.append(_about_ours(results, ranked, place))
            costs.insert(0, row)
    return found + _about_cost(results, costs)


def _about_best(results: Results, best: Row) -> Sentence:
    column = results.main_column
    value = results.value(best, column, "auroc")
    over = f"on {column}"
    if column == ALL:
        over = f"on average over {len(results.setting.ood)} OOD sets"
    limits = f"95 % interval {as_percent(value.low)} to {as_percent(value.high)}"
    return Sentence(
        best.name,
        f" separates ID from OOD best: AUROC {as_percent(value)} % {over} ({limits}). Given one ID "
        f"and one OOD sample, it ranks the ID sample higher about {round(100 * value)} times in "
        "100.",
    )


def _about_second(results: Results, ranked: list[Row]) -> Sentence:
    second = ranked[1]
    standing = results.standing(results.main_column, "auroc")
    tied = [name for name, mark in standing.items() if mark == "tied"]
    if second.name not in tied:
        how_sure = "more than chance explains"
    elif len(tied) == 1:
        how_sure = "which these samples cannot tell from chance: count the two as equal"
    else:
        how_sure = (
            f"which these samples cannot tell from chance: {len(tied)} detectors tie with the best"
        )
    return Sentence(second.name, f" is next, {_behind(results, ranked, 1)}, {how_sure}.")


def _about_ours(results: Results, ranked: list[Row], place: int) -> Sentence:
    value = results.value(ranked[place], results.main_column, "auroc")
    where = f" is {ordinal(place + 1)} of {len(ranked)} with {as_percent(value)} %"
    return Sentence(OURS, f"{where}, {_behind(results, ranked, place)} the best.")


def _behind(results: Results, ranked: list[Row], place: int) -> str:
    best = results.value(ranked[0], results.main_column, "auroc")
    value = results.value(ranked[place], results.main_column, "auroc")
    return f"{100 * (best - value):.2f} points behind"


def _about_cost(results: Results, rows: list[Row]) -> list[Sentence]:
    """Microseconds of the score stage at the largest batch size; nothing if none was timed."""
    timed = []
    for row in rows:
        if row.latencies:
            largest = max(row.latencies, key=lambda timing: timing.batch_size)
            timed.append((row.name, largest))
    if not timed:
        return []
    first, timing = timed[0]
    text = f" costs {_microseconds(timing)} per sample in batches of {timing.batch_size}"
    share = results.setting.share_of_forward(timing)
    if share is not None:
        text += f", {share_text(share)} of the network's forward pass"
    for other, other_timing in timed[1:]:
        text += f"; {other} {_microseconds(other_timing)}"
    return [Sentence(first, text + ".")]


def _microseconds(timing: Latency) -> str:
    return f"{number_text(timing.median * 1e6)} µs"


def facts(results: Results) -> list[Fact]:
    """The setting in a few numbers."""
    setting = results.setting
    found = []
    if setting.accuracy is not None:
        found.append(Fact("Classifier accuracy", f"{as_percent(setting.accuracy)} %", "on ID test"))
    found.append(Fact("ID test", f"{setting.test[1]:,}", setting.test[0]))
    plural = "" if len(setting.ood) == 1 else "s"
    total = sum(setting.ood.values())
    found.append(Fact("OOD", f"{total:,}", f"{len(setting.ood)} set{plural}"))
    head = f"{setting.num_classes:,} classes, {setting.num_features:,} features"
    found.append(Fact("Fitted on", f"{setting.num_train:,}", head))
    failed = len(results.failures)
    outcome = f"{failed} could not run" if failed else "all ran"
    found.append(Fact("Detectors", f"{len(results.finished)}", outcome))
    if setting.collapse is not None:
        remark = "variance within classes over between"
        found.append(Fact("Collapse ratio", number_text(setting.collapse), remark))
    if setting.runs > 1:
        found.append(Fact("Runs", f"{setting.runs}", "mean ± standard deviation"))
    return found


def ordinal(number: int) -> str:
    """
    >>> ordinal(1), ordinal(12), ordinal(23)
    ('1st', '12th', '23rd')
    """
    last = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    if number % 100 in (11, 12, 13):
        last = "th"
    return f"{number}{last}"
