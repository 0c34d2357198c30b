"""Results as tables of text: for the terminal, Markdown and LaTeX. Percentages with two decimals; the best in bold,
those that cannot be told from it marked with a tilde, those fitted on the bank alone with a dagger."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    def width(self) -> int:
        texts = [f"{TIED}{text}" if mark == "tied" else text for text, mark in self.cells]
        return max(map(len, [*self.heading.split("\n"), *texts]))


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
        lines.append("µs per sample of the score stage: median ± the reach of its 95 % interval" + _of_forward(results))
    return [*lines, *setting.notes, *(f"{row.name} failed: {row.error}" for row in results.failures)]


def _of_forward(results: ResultTable) -> str:
    forward = results.setting.forward
    if not forward:
        return "."
    times = ", ".join(f"{_micro(t)} µs in batches of {t.batch_size}" for t in forward)
    return f" (share of the network's forward pass, measured here: {times})."


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


def _latency_text(results: ResultTable, timing: Latency) -> str:
    text = _micro(timing)
    share = results.setting.share_of_forward(timing)
    return text if share is None else f"{text} ({share:.2%})"


def _metric_columns(results: ResultTable, about: str, metrics: Sequence[str]) -> list[Column]:
    found = []
    for metric in metrics:
        marks = results.standing(about, metric)
        cells = [(as_percent(results.value(row, about, metric)), marks.get(row.name, "")) for row in results.ranked()]
        found.append(Column(about, f"{about}\n{TITLES[metric]} {ARROWS[metric]}", cells))
    return found


def _latency_columns(results: ResultTable) -> list[Column]:
    sizes = sorted({timing.batch_size for row in results.finished for timing in row.latencies})
    found = []
    for size in sizes:
        timings = [[t for t in row.latencies if t.batch_size == size] for row in results.ranked()]
        cells = [(_latency_text(results, timing[0]) if timing else "", "") for timing in timings]
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
    blocks = [_metric_columns(results, group, metrics) for group in reversed(results.groups)]
    blocks += [[column] for column in _latency_columns(results)]
    blocks += [_metric_columns(results, name, metrics) for name in results.setting.ood]
    room = math.inf if width is None else width - 4 - max(map(len, ["detector", *names]))
    shown, left_out = _fitting(blocks, room)
    kept = [k for k, row in enumerate(results.ranked()) if top is None or k < top or row.name == OURS]
    lines = [f"Left out at this width: {', '.join(left_out)}."] if left_out and top is None else []
    if len(kept) < len(names):
        lines.append(f"{len(names) - len(kept)} further detectors are in the report and shown by --all.")
    lines += caption(results)[: None if top is None else SHORT_CAPTION]
    title = "\n".join(filter(None, [*(f"[bold red]{escape(w)}[/]" for w in results.setting.warnings), _title(results)]))
    table = Table(title=title or None, caption=escape("\n".join(lines)), caption_justify="left")
    table.add_column("detector", no_wrap=True, min_width=max(map(len, ["detector", *names])))
    for column in shown:
        table.add_column(escape(column.heading), justify="right", no_wrap=True, min_width=column.width)
    for number in kept:
        cells = [_marked(*column.cells[number], "[bold]{}[/bold]") for column in shown]
        table.add_row(escape(names[number]), *cells)
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
                left_out += [column.heading.replace("\n", " ") for column in block[len(part) :]]
                break
        else:
            left_out.append(block[0].about)
    return shown, list(dict.fromkeys(left_out))


def _title(results: ResultTable) -> str:
    from rich.markup import escape

    return escape(results.setting.title)


def _marked(text: str, mark: str, bold: str) -> str:
    return bold.format(text) if mark == "best" else f"{TIED}{text}" if mark == "tied" else text


def markdown(results: ResultTable, metrics: Sequence[str]) -> str:
    """GitHub's table, with a caption below."""
    shown = [column for name in datasets(results) for column in _metric_columns(results, name, metrics)]
    shown += _latency_columns(results)
    setting = results.setting
    lines = [part for warning in setting.warnings for part in (f"**{warning}**", "")]
    lines += [f"**{setting.title}**", ""] if setting.title else []
    titles = ["detector", *(column.heading.replace("\n", " ") for column in shown)]
    lines += [_line(titles), "|---" + "|---:" * len(shown) + "|"]
    for number, row in enumerate(results.ranked()):
        lines.append(_line([row_name(row), *(_marked(*column.cells[number], "**{}**") for column in shown)]))
    return "\n".join([*lines, "", *(f"{line}  " for line in caption(results))]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def latex(results: ResultTable, metrics: Sequence[str]) -> str:
    """Tables for the booktabs package, each with few enough columns and rows for a page of text."""
    names, rows = datasets(results), results.ranked()
    about = " ".join([*results.setting.warnings, results.setting.title, *caption(results)])
    tables: list[str] = []
    for first in range(0, len(names), LATEX_SETS):
        part = names[first : first + LATEX_SETS]
        shown = [column for name in part for column in _metric_columns(results, name, metrics)]
        for top in range(0, max(len(rows), 1), LATEX_ROWS):
            text = _tex(results.setting.title + ", continued." if tables else about)
            body = [
                " & ".join([_tex(row_name(row)), *(_tex_cell(*column.cells[top + k]) for column in shown)]) + r" \\"
                for k, row in enumerate(rows[top : top + LATEX_ROWS])
            ]
            tables.append(_latex_table(text, part, metrics, body))
    return "\n".join(tables)


def _latex_table(about: str, names: Sequence[str], metrics: Sequence[str], body: Sequence[str]) -> str:
    count = len(metrics)
    lines = [
        r"\begin{table}",
        r"\centering\footnotesize\setlength{\tabcolsep}{4pt}",
        rf"\caption{{{about}}}",
        rf"\begin{{tabular}}{{l{'r' * (count * len(names))}}}",
        r"\toprule",
        " & ".join(["", *(rf"\multicolumn{{{count}}}{{c}}{{{_tex(name)}}}" for name in names)]) + r" \\",
        " & ".join(["Detector", *(_tex(f"{TITLES[m]}{ARROWS[m]}") for _ in names for m in metrics)]) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _tex_cell(text: str, mark: str) -> str:
    return _marked(text, mark, r"\textbf{{{}}}").replace(TIED, r"$\sim$")


_TEX = str.maketrans(
    {
        **{character: "\\" + character for character in "&%$#_{}"},
        **{"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"$\sim$", "µ": r"$\mu$", "†": r"$\dagger$"},
        **{"±": r"$\pm$", "×": r"$\times$", "↑": r"$\uparrow$", "↓": r"$\downarrow$"},
    }
)


def _tex(text: str) -> str:
    return text.translate(_TEX)
