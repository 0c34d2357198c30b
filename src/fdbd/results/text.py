"""Results as tables of text: for the terminal, Markdown and LaTeX. Percentages with two decimals; the best in bold,
those that cannot be told from it marked with a tilde, those fitted on the bank alone with a dagger."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fdbd.metrics import as_percent
from fdbd.results.rows import Latency, Row, convention

if TYPE_CHECKING:
    from rich.table import Table

    from fdbd.results.table import ResultTable

SHOWN = ("auroc", "fpr95")
"""Metrics of a table, where none are named."""
TITLES = {"auroc": "AUROC", "fpr95": "FPR95", "aupr_in": "AUPR-in", "aupr_out": "AUPR-out"}
ARROWS = {"auroc": "↑", "fpr95": "↓", "aupr_in": "↑", "aupr_out": "↑"}
Rows = Iterable[Sequence[str]]
TIED, BANK = "~", "†"
OURS = "fdbd"
"""The detector whose place is told even when it is not the best."""
SHORT_CAPTION = 2
"""Lines of a short caption: the data, and the conventions."""
LATEX_SETS, LATEX_ROWS = 3, 42
"""OOD sets and detectors per LaTeX table: what fits the text of a page of LaTeX's article class."""


class Column(NamedTuple):
    """A column of a table: what it belongs to, its heading, and one cell per ranked row with its mark."""

    about: str
    heading: str
    cells: list[tuple[str, str]]
    """Text and "best", "tied" or ""."""

    @property
    def title(self) -> str:
        """The heading on one line."""
        return self.heading.replace("\n", " ")

    @property
    def width(self) -> int:
        return max(map(len, [*self.heading.split("\n"), *(self.cell(row, "{}") for row in range(len(self.cells)))]))

    def cell(self, row: int, bold: str) -> str:
        """The text of a cell with its mark; `bold` is a format."""
        text, mark = self.cells[row]
        return bold.format(text) if mark == "best" else f"{TIED}{text}" if mark == "tied" else text


def datasets(results: ResultTable) -> list[str]:
    """Groups and OOD sets in the order of the columns: averages first, since they are looked at first."""
    return [*reversed(results.groups), *results.setting.ood]


def caption(results: ResultTable) -> list[str]:
    """Lines that make the table stand alone: data, accuracy, convention, marks, failures."""
    setting = results.setting
    accuracy = "" if setting.accuracy is None else f", classifier accuracy {as_percent(setting.accuracy)} %"
    sets = ", ".join(f"{name} ({count:,})" for name, count in setting.ood.items())
    lines = [
        f"ID {setting.test[0]} ({setting.test[1]:,}){accuracy}; OOD {sets}; fitted on {setting.num_train:,} samples.",
        f"Percent. {convention(setting.positive)}. Bold: best; {TIED}: not told from it at the 5 % level.",
    ]
    if setting.num_bank is not None and any(row.from_bank for row in results.finished):
        lines.append(
            f"{BANK}: fitted, at least in part, on the {setting.num_bank:,} of these samples that are at hand one by "
            "one; what it learns does not follow from means and covariances."
        )
    if any(row.latencies for row in results.finished):
        times = ", ".join(f"{_micro(t)} µs in batches of {t.batch_size}" for t in setting.forward)
        share = f" (share of the network's forward pass, measured here: {times})" if times else ""
        lines.append(f"µs per sample of the score stage: median ± the reach of its 95 % interval{share}.")
    return [*lines, *setting.notes, *(f"{row.name} failed: {row.error}" for row in results.failures)]


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
        cells = [(as_percent(results.value(row, about, metric)), marks.get(row.name, "")) for row in results.ranked()]
        found.append(Column(about, f"{about}\n{TITLES[metric]} {ARROWS[metric]}", cells))
    return found


def _latency_columns(results: ResultTable) -> list[Column]:
    found = []
    for size in results.batch_sizes:
        cells = []
        for row in results.ranked():
            timing = row.latency(size)
            share = None if timing is None else results.setting.share_of_forward(timing)
            text = "" if timing is None else _micro(timing)
            cells.append((text if share is None else f"{text} ({share:.2%})", ""))
        found.append(Column(f"µs per sample at batch {size}", f"µs per sample\nbatch {size}", cells))
    return found


def row_name(row: Row) -> str:
    """The detector's name, with a dagger where it was fitted on the bank."""
    return f"{row.name} {BANK}" if row.from_bank else row.name


def rich_table(results: ResultTable, metrics: Sequence[str], width: int | None = None, top: int | None = None) -> Table:
    """For the terminal, best first: averages, then latencies, then each OOD set, as far as `width` characters go; the
    caption names what is left out. With `top`: the first so many rows and fDBD's, and a short caption."""
    from rich.markup import escape
    from rich.table import Table

    names = [row_name(row) for row in results.ranked()]
    longest = max(map(len, ["detector", *names]))
    blocks = [_metric_columns(results, group, metrics) for group in reversed(results.groups)]
    blocks += [[column] for column in _latency_columns(results)]
    blocks += [_metric_columns(results, name, metrics) for name in results.setting.ood]
    shown, left_out = _fitting(blocks, math.inf if width is None else width - 4 - longest)
    kept = [k for k, row in enumerate(results.ranked()) if top is None or k < top or row.name == OURS]
    lines = [f"Left out at this width: {', '.join(left_out)}."] if left_out and top is None else []
    if len(kept) < len(names):
        lines.append(f"{len(names) - len(kept)} further detectors are in the report and shown by --all.")
    lines += caption(results)[: None if top is None else SHORT_CAPTION]
    titles = [
        *(f"[bold red]{escape(warning)}[/]" for warning in results.setting.warnings),
        escape(results.setting.title),
    ]
    title = "\n".join(filter(None, titles))
    table = Table(title=title or None, caption=escape("\n".join(lines)), caption_justify="left")
    table.add_column("detector", no_wrap=True, min_width=longest)
    for column in shown:
        table.add_column(escape(column.heading), justify="right", no_wrap=True, min_width=column.width)
    for number in kept:
        table.add_row(escape(names[number]), *(column.cell(number, "[bold]{}[/bold]") for column in shown))
    return table


def _fitting(blocks: list[list[Column]], room: float) -> tuple[list[Column], list[str]]:
    """Columns that fit side by side, each three characters wider than its text, and the names of the others. The first
    column is always shown."""
    shown: list[Column] = []
    left_out: list[str] = []
    for block in blocks:
        for part in (block, block[:1]) if not shown else (block,):
            needed = sum(column.width + 3 for column in part)
            if needed <= room or (not shown and len(part) == 1):
                shown += part
                room -= needed
                left_out += [column.title for column in block[len(part) :]]
                break
        else:
            left_out.append(block[0].about)
    return shown, list(dict.fromkeys(left_out))


def markdown_table(titles: Iterable[str], columns: Sequence[str], rows: Rows, sides: str, notes: Sequence[str]) -> str:
    """GitHub's table with bold lines above and lines below; `sides` has "l" or "r" for each column."""
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
    shown = [column for name in datasets(results) for column in _metric_columns(results, name, metrics)]
    shown += _latency_columns(results)
    rows = [["detector", *(column.title for column in shown)]]
    for number, row in enumerate(results.ranked()):
        rows.append([row_name(row), *(column.cell(number, "**{}**") for column in shown)])
    first, *others = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    titles = (*results.setting.warnings, results.setting.title)
    return markdown_table(titles, first, others, "l" + "r" * len(shown), caption(results))


def latex(results: ResultTable, metrics: Sequence[str]) -> str:
    """Tables for the booktabs package, each with few enough columns and rows for a page of text."""
    names, rows = datasets(results), results.ranked()
    about = " ".join([*results.setting.warnings, results.setting.title, *caption(results)])
    tables: list[str] = []
    for first in range(0, len(names), LATEX_SETS):
        part = names[first : first + LATEX_SETS]
        shown = [column for name in part for column in _metric_columns(results, name, metrics)]
        groups = ["", *(rf"\multicolumn{{{len(metrics)}}}{{c}}{{{tex(name)}}}" for name in part)]
        heading = ["Detector", *(tex(f"{TITLES[metric]}{ARROWS[metric]}") for _ in part for metric in metrics)]
        for top in range(0, max(len(rows), 1), LATEX_ROWS):
            body = []
            for k, row in enumerate(rows[top : top + LATEX_ROWS], top):
                cells = [column.cell(k, r"\textbf{{{}}}").replace(TIED, r"$\sim$") for column in shown]
                body.append([tex(row_name(row)), *cells])
            text = tex(results.setting.title + ", continued." if tables else about)
            tables.append(latex_table(text, [groups, heading], body, "l" + "r" * len(shown)))
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
        **{"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"$\sim$", "µ": r"$\mu$", "†": r"$\dagger$"},
        **{"±": r"$\pm$", "×": r"$\times$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "−": "$-$", "μ": r"$\mu$"},
        **{"σ": r"$\sigma$", "≤": r"$\leq$", "≥": r"$\geq$", "‖": r"$\|$"},
    }
)


def tex(text: str) -> str:
    """Text with what LaTeX would read as a command, or lacks, written out."""
    return text.translate(TEX)
