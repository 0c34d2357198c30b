"""Results as text: what was found in plain sentences, and tables for the terminal, Markdown and
LaTeX. Percentages with two decimals; the best in bold, those that cannot be told from it marked
with a tilde, those fitted on the bank alone with a dagger."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fdbd.bench.rows import ALL, Latency, Row, convention
from fdbd.metrics import as_percent

if TYPE_CHECKING:
    from rich.table import Table

    from fdbd.bench.table import ResultTable

SHOWN = ("auroc", "fpr95")  # metrics of a table, where none are named
TITLES = {"auroc": "AUROC", "fpr95": "FPR95", "aupr_in": "AUPR-in", "aupr_out": "AUPR-out"}
ARROWS = {"auroc": "↑", "fpr95": "↓", "aupr_in": "↑", "aupr_out": "↑"}
Rows = Iterable[Sequence[str]]
TIED, BANK = "~", "†"
OURS = "fdbd"  # the detector whose place is told even when it is not the best
SHORT_CAPTION = 2  # lines of a short caption: the data, and the conventions
LATEX_SETS, LATEX_ROWS = 3, 42
"""OOD sets and detectors per LaTeX table: what fits the text of a page of LaTeX's article class."""


class Column(NamedTuple):
    """A column of a table: what it belongs to, its heading of two lines, and one cell per ranked
    row."""

    about: str
    heading: str
    cells: list[tuple[str, str]]  #: text and "best", "tied" or ""

    @property
    def title(self) -> str:
        """The heading on one line."""
        return self.heading.replace("\n", " ")

    def marked(self, bold: str) -> list[str]:
        """The cells with their marks; `bold` is a format."""
        formats = {"best": bold, "tied": TIED + "{}", "": "{}"}
        return [formats[mark].format(text) for text, mark in self.cells]

    @property
    def width(self) -> int:
        return max(map(len, [*self.heading.split("\n"), *self.marked("{}")]))


def datasets(results: ResultTable) -> list[str]:
    """Groups and OOD sets in the order of the columns: averages first, since they are looked at
    first."""
    return [*reversed(results.groups), *results.setting.ood]


def caption(results: ResultTable) -> list[str]:
    """Lines that make the table stand alone: data, accuracy, convention, marks, failures."""
    setting = results.setting
    accuracy = (
        ""
        if setting.accuracy is None
        else f", classifier accuracy {as_percent(setting.accuracy)} %"
    )
    sets = ", ".join(f"{name} ({count:,})" for name, count in setting.ood.items())
    lines = [
        f"ID {setting.test[0]} ({setting.test[1]:,}){accuracy}; OOD {sets}; fitted on {setting.num_train:,} samples.",
        f"Percent. {convention(setting.positive)}. Bold: best; {TIED}: no significant difference at the 5 % level.",
    ]
    if setting.num_bank is not None and any(row.from_bank for row in results.finished):
        lines.append(
            f"{BANK}: fitted, at least in part, on the {setting.num_bank:,} of these samples that are available "
            "individually; what it learns does not follow from means and covariances."
        )
    if any(row.latencies for row in results.finished):
        times = ", ".join(f"{_micro(t)} µs in batches of {t.batch_size}" for t in setting.forward)
        share = f" (share of the network's forward pass, measured here: {times})" if times else ""
        lines.append(
            f"µs per sample of the score stage: median ± the reach of its 95 % interval{share}."
        )
    return [
        *lines,
        *setting.notes,
        *(f"{row.name} failed: {row.error}" for row in results.failures),
    ]


def number_text(value: float) -> str:
    """Three significant digits, never with an exponent.

    >>> number_text(1131.4), number_text(20.21), number_text(0.09174)
    ('1,131', '20.2', '0.0917')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _micro(timing: Latency) -> str:
    """Microseconds, with the reach of the interval to its farther side."""
    reach = max(timing.high - timing.median, timing.median - timing.low)
    text = number_text(timing.median * 1e6)
    return f"{text} ± {number_text(float(f'{reach * 1e6:.2g}'))}" if math.isfinite(reach) else text


def _metric_columns(results: ResultTable, about: str, metrics: Sequence[str]) -> list[Column]:
    found = []
    for metric in metrics:
        marks = results.standing(about, metric)
        cells = [
            (as_percent(results.value(row, about, metric)), marks.get(row.name, ""))
            for row in results.ranked()
        ]
        found.append(Column(about, f"{about}\n{TITLES[metric]} {ARROWS[metric]}", cells))
    return found


def _latency_columns(results: ResultTable) -> list[Column]:
    found = []
    for size in results.batch_sizes:
        cells = []
        for timing in (row.latency(size) for row in results.ranked()):
            share = None if timing is None else results.setting.share_of_forward(timing)
            text = "" if timing is None else _micro(timing)
            cells.append((text if share is None else f"{text} ({share:.2%})", ""))
        found.append(
            Column(f"µs per sample at batch {size}", f"µs per sample\nbatch {size}", cells)
        )
    return found


def row_name(row: Row) -> str:
    """The detector's name, with a dagger where it was fitted on the bank."""
    return f"{row.name} {BANK}" if row.from_bank else row.name


def rich_table(
    results: ResultTable, metrics: Sequence[str], width: int | None = None, top: int | None = None
) -> Table:
    """For the terminal, best first: averages, then latencies, then each OOD set, as far as `width`
    characters go; the caption names what is left out. With `top`: only the first `top` rows and
    fDBD's, and a short caption."""
    from rich.markup import escape
    from rich.table import Table

    names = [row_name(row) for row in results.ranked()]
    longest = max(map(len, ["detector", *names]))
    columns = [
        *(
            column
            for group in reversed(results.groups)
            for column in _metric_columns(results, group, metrics)
        ),
        *_latency_columns(results),
        *(
            column
            for name in results.setting.ood
            for column in _metric_columns(results, name, metrics)
        ),
    ]
    ends = itertools.accumulate(column.width + 3 for column in columns)
    count = (
        len(columns) if width is None else max(1, sum(end <= width - 4 - longest for end in ends))
    )
    shown, others = columns[:count], columns[count:]
    partly = {column.about for column in shown}
    left_out = dict.fromkeys(
        column.title if column.about in partly else column.about for column in others
    )
    kept = [
        k for k, row in enumerate(results.ranked()) if top is None or k < top or row.name == OURS
    ]
    lines = [f"Left out at this width: {', '.join(left_out)}."] if left_out and top is None else []
    if len(kept) < len(names):
        lines.append(
            f"{len(names) - len(kept)} further detectors are in the report and shown by --all."
        )
    lines += caption(results)[: None if top is None else SHORT_CAPTION]
    titles = [
        *(f"[bold red]{escape(text)}[/]" for text in results.setting.warnings),
        escape(results.setting.title),
    ]
    title = "\n".join(filter(None, titles))
    table = Table(title=title or None, caption=escape("\n".join(lines)), caption_justify="left")
    table.add_column("detector", no_wrap=True, min_width=longest)
    for column in shown:
        table.add_column(
            escape(column.heading), justify="right", no_wrap=True, min_width=column.width
        )
    cells = list(zip(map(escape, names), *(column.marked("[bold]{}[/bold]") for column in shown)))
    for number in kept:
        table.add_row(*cells[number])
    return table


def markdown_table(
    titles: Iterable[str], columns: Sequence[str], rows: Rows, sides: str, notes: Sequence[str]
) -> str:
    """GitHub's table with bold lines above and lines below; `sides` has "l" or "r" for each
    column."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (columns, *rows)]
    lines.insert(1, "|" + "|".join("---:" if side == "r" else "---" for side in sides) + "|")
    below = ["", *(f"{note}  " for note in notes)] if notes else []
    return "\n".join([*(f"**{title}**\n" for title in titles if title), *lines, *below]) + "\n"


def latex_table(caption: str, heading: Rows, body: Rows, sides: str) -> str:
    """A table for the booktabs package; all texts are LaTeX already."""
    parts = ("\n".join(" & ".join(cells) + r" \\" for cells in part) for part in (heading, body))
    return LATEX % (caption, sides, *parts)


def markdown(results: ResultTable, metrics: Sequence[str]) -> str:
    """GitHub's table, with a caption below."""
    shown = [
        column for name in datasets(results) for column in _metric_columns(results, name, metrics)
    ]
    shown += _latency_columns(results)
    columns = [["detector", *map(row_name, results.ranked())]]
    columns += [[column.title, *column.marked("**{}**")] for column in shown]
    first, *others = zip(*([cell.replace("|", "\\|") for cell in column] for column in columns))
    titles = (*results.setting.warnings, results.setting.title)
    return markdown_table(titles, first, others, "l" + "r" * len(shown), caption(results))


def latex(results: ResultTable, metrics: Sequence[str]) -> str:
    """Tables for the booktabs package, each with few enough columns and rows for a page of text."""
    names, detectors = datasets(results), [tex(row_name(row)) for row in results.ranked()]
    about = " ".join([*results.setting.warnings, results.setting.title, *caption(results)])
    tables: list[str] = []
    for first in range(0, len(names), LATEX_SETS):
        part = names[first : first + LATEX_SETS]
        shown = [column for name in part for column in _metric_columns(results, name, metrics)]
        groups = ["", *(rf"\multicolumn{{{len(metrics)}}}{{c}}{{{tex(name)}}}" for name in part)]
        heading = [
            "Detector",
            *(tex(f"{TITLES[metric]}{ARROWS[metric]}") for _ in part for metric in metrics),
        ]
        cells = [
            [text.replace(TIED, r"$\sim$") for text in column.marked(r"\textbf{{{}}}")]
            for column in shown
        ]
        body = list(zip(detectors, *cells))
        for top in range(0, max(len(body), 1), LATEX_ROWS):
            text = tex(results.setting.title + ", continued." if tables else about)
            rows = body[top : top + LATEX_ROWS]
            tables.append(latex_table(text, [groups, heading], rows, "l" + "r" * len(shown)))
    return "\n".join(tables)


LATEX = r"""\begin{table}
\centering\footnotesize\setlength{\tabcolsep}{4pt}
\caption{%s}
\begin{tabular}{%s}
\toprule
%s
\midrule
%s
\bottomrule
\end{tabular}
\end{table}
"""
TEX = str.maketrans(
    {
        **{character: "\\" + character for character in "&%$#_{}"},
        **{
            "\\": r"\textbackslash{}",
            "^": r"\textasciicircum{}",
            "~": r"$\sim$",
            "µ": r"$\mu$",
            "†": r"$\dagger$",
        },
        **{
            "±": r"$\pm$",
            "×": r"$\times$",
            "↑": r"$\uparrow$",
            "↓": r"$\downarrow$",
            "−": "$-$",
            "μ": r"$\mu$",
        },
        **{"σ": r"$\sigma$", "≤": r"$\leq$", "≥": r"$\geq$", "‖": r"$\|$"},
    }
)


def tex(text: str) -> str:
    """Text with the characters escaped that LaTeX reads as commands or does not have."""
    return text.translate(TEX)


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
    best, over = (
        values[0],
        f"on average over {len(results.setting.ood)} OOD sets" if column == ALL else f"on {column}",
    )
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
        count = (
            "count the two as equal"
            if len(tied) == 1
            else f"{len(tied)} detectors tie with the best"
        )
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
    timed = [
        (row.name, max(row.latencies, key=lambda timing: timing.batch_size))
        for row in rows
        if row.latencies
    ]
    if not timed:
        return []
    (name, timing), *others = timed
    share = results.setting.share_of_forward(timing)
    of_forward = "" if share is None else f", {share:.2%} of the network's forward pass"
    cost, *costs = (f"{number_text(each.median * 1e6)} µs" for _, each in timed)
    against = "".join(f"; {other} {text}" for (other, _), text in zip(others, costs))
    rest = f" costs {cost} per sample in batches of {timing.batch_size}{of_forward}{against}."
    return [Sentence(name, rest)]


def facts(results: ResultTable) -> list[tuple[str, str, str]]:
    """(what, number, remark) of the setting, as plain text."""
    setting, failed = results.setting, len(results.failures)
    accuracy = () if setting.accuracy is None else (f"{as_percent(setting.accuracy)} %",)
    head = f"{setting.num_classes:,} classes, {setting.num_features:,} features"
    return [
        *(("Classifier accuracy", text, "on ID test") for text in accuracy),
        ("ID test", f"{setting.test[1]:,}", setting.test[0]),
        (
            "OOD",
            f"{sum(setting.ood.values()):,}",
            f"{len(setting.ood)} set{'s' if len(setting.ood) != 1 else ''}",
        ),
        ("Fitted on", f"{setting.num_train:,}", head),
        (
            "Detectors",
            f"{len(results.finished)}",
            f"{failed} could not run" if failed else "all ran",
        ),
    ]


def _ordinal(number: int) -> str:
    last = (
        "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    )
    return f"{number}{last}"
