"""Results as tables for the terminal, Markdown and LaTeX. Percentages with two decimals; the best
in bold. Every mark in a table is explained below it, in the same words in every format.

pandas was tried and writes none of these tables. Its Markdown needs a further package (tabulate)
and leaves a "|" in a dataset's name as it is. Its LaTeX leaves ↑, ±, µ and † as they are, which
LaTeX's own fonts lack, and splits a long table by its rows but not a wide one by its columns. And
pandas is an extra, while these tables are for everyone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fdbd.bench.measures import MEASURES, Spread
from fdbd.bench.rows import Latency, Row, convention
from fdbd.metrics import Estimate, as_percent

if TYPE_CHECKING:
    from rich.table import Table

    from fdbd.bench.results import Results

Rows = Iterable[Sequence[str]]

SHOWN = ("auroc", "fpr95")
"""Metrics of a table, if none are named."""
TIED = "~"
BANK = "†"
TUNED = "‡"
WARNED = "!"
OURS = "fdbd"
"""The detector that is always shown, even if it is not among the best."""

# OOD sets and detectors per LaTeX table: what fits the text of a page of LaTeX's article class.
LATEX_SETS = 3
LATEX_ROWS = 42


class Column(NamedTuple):
    """A column of a table: what it belongs to, its heading of two lines, and one cell per ranked
    row."""

    about: str
    heading: str
    cells: list[tuple[str, str]]
    """Text and "best", "tied" or ""."""

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
        """Characters of the widest line."""
        lines = [*self.heading.split("\n"), *self.marked("{}")]
        return max(len(line) for line in lines)


def heading_of(metric: str) -> str:
    """A metric's title with an arrow to the better side.

    >>> heading_of("fpr95")
    'FPR95 ↓'
    """
    arrow = "↓" if MEASURES[metric].smaller_is_better else "↑"
    return f"{MEASURES[metric].title} {arrow}"


def cell_text(value: Estimate) -> str:
    """Percent; of several runs with their standard deviation.

    >>> cell_text(Spread.from_values([0.5, 0.6]))
    '55.00 ± 5.00'
    """
    if isinstance(value, Spread):
        return f"{as_percent(value)} ± {as_percent(value.std)}"
    return as_percent(value)


def datasets(results: Results) -> list[str]:
    """Groups and OOD sets in the order of the columns: averages first, since they are looked at
    first."""
    return [*reversed(results.groups), *results.setting.ood]


def data_line(results: Results) -> str:
    """What was scored, and what the detectors were fitted on."""
    setting = results.setting
    parts = [f"ID {setting.test[0]} ({setting.test[1]:,})"]
    if setting.accuracy is not None:
        parts[0] += f", classifier accuracy {as_percent(setting.accuracy)} %"
    sets = [f"{name} ({count:,})" for name, count in setting.ood.items()]
    parts.append(f"OOD {', '.join(sets)}")
    if setting.shifted:
        sets = [f"{name} ({count:,})" for name, count in setting.shifted.items()]
        parts.append(f"covariate-shifted ID {', '.join(sets)}")
    parts.append(f"fitted on {setting.num_train:,} samples")
    return "; ".join(parts) + "."


def collapse_line(results: Results) -> str:
    """How far the features have collapsed, which the choice of a detector depends on; "" if that is
    not known."""
    if results.setting.collapse is None:
        return ""
    return (
        f"Collapse ratio {number_text(results.setting.collapse)}: variance of the training "
        "features within classes over that between them; 0 is complete neural collapse."
    )


def explanations(results: Results, metrics: Sequence[str] = SHOWN) -> list[str]:
    """What the numbers and marks of a table mean: the convention, each metric that not everyone
    knows, and each mark that occurs."""
    lines = [
        f"Percent. {convention(results.setting.positive)}. Bold: best; {TIED}: no significant "
        "difference from the best at the 5 % level."
    ]
    for metric in metrics:
        if MEASURES[metric].explanation:
            lines.append(f"{MEASURES[metric].title}: {MEASURES[metric].explanation}.")
    if results.setting.runs > 1:
        lines.append(f"±: standard deviation over {results.setting.runs} runs.")
    if any(row.from_bank for row in results.finished):
        lines.append(_bank_line(results))
    for row in results.finished:
        if row.tuned:
            lines.append(f"{TUNED}: {row.name}: tuned on OOD validation data ({row.tuned}).")
    for row in results.finished:
        if row.chosen:
            lines.append(f"{row.name} (experimental) keeps {row.chosen}.")
    for row in results.finished:
        for text in row.warnings:
            lines.append(f"{WARNED}: {row.name}: {text}.".replace("..", "."))
    published = results.setting.published
    if published is not None:
        note = f"; {published.note}" if published.note else ""
        lines.append(
            f"Published: {published.source}, {published.date}{note}. In brackets: ours minus "
            "theirs."
        )
    return lines


def _bank_line(results: Results) -> str:
    if results.setting.num_bank is None:
        return f"{BANK}: fitted, at least in part, on a bank of samples alone."
    return (
        f"{BANK}: fitted, at least in part, on the {results.setting.num_bank:,} of these samples "
        "that are available individually; what it learns does not follow from means and "
        "covariances."
    )


def caption(results: Results, metrics: Sequence[str] = SHOWN) -> list[str]:
    """Lines that make a table stand alone: data, conventions, marks, times, notes, failures."""
    lines = [data_line(results), *explanations(results, metrics)]
    if collapse_line(results):
        lines.append(collapse_line(results))
    if any(row.latencies for row in results.finished):
        lines.append(_latency_line(results))
    lines += results.setting.notes
    lines += [f"{row.name} failed: {row.error}" for row in results.failures]
    return lines


def _latency_line(results: Results) -> str:
    times = []
    for timing in results.setting.forward:
        times.append(f"{_microseconds(timing)} µs in batches of {timing.batch_size}")
    share = ""
    if times:
        share = f" (share of the network's forward pass, measured here: {', '.join(times)})"
    return f"µs per sample of the score stage: median ± the reach of its 95 % interval{share}."


def number_text(value: float) -> str:
    """Three significant digits, never with an exponent.

    >>> number_text(1131.4), number_text(20.21), number_text(0.09174)
    ('1,131', '20.2', '0.0917')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def share_text(share: float) -> str:
    """A share of the forward pass, in words if it is too small for two decimals.

    >>> share_text(0.0312), share_text(0.00002)
    ('3.12%', 'under 0.01%')
    """
    if share < 0.0001:
        return "under 0.01%"
    return f"{share:.2%}"


def _microseconds(timing: Latency) -> str:
    """Microseconds, with the larger distance from the median to an end of its interval."""
    text = number_text(timing.median * 1e6)
    reach = max(timing.high - timing.median, timing.median - timing.low)
    if not math.isfinite(reach):
        return text
    two_digits = float(f"{reach * 1e6:.2g}")
    return f"{text} ± {number_text(two_digits)}"


def row_name(row: Row) -> str:
    """The detector's name with its marks: fitted on the bank, tuned, warned of."""
    marks = ""
    if row.from_bank:
        marks += BANK
    if row.tuned:
        marks += TUNED
    if row.warnings:
        marks += WARNED
    return f"{row.name} {marks}" if marks else row.name


def metric_columns(results: Results, about: str, metrics: Sequence[str]) -> list[Column]:
    """The columns of an OOD set, a group or the ID set: one per metric."""
    found = []
    for metric in metrics:
        marks = _standing(results, about, metric)
        cells = []
        for row in results.ranked():
            cells.append((cell_text(results.value(row, about, metric)), marks.get(row.name, "")))
        found.append(Column(about, f"{about}\n{heading_of(metric)}", cells))
    return found


def _standing(results: Results, about: str, metric: str) -> dict[str, str]:
    if MEASURES[metric].of_id_alone and about != results.setting.test[0]:
        raise ValueError(f"{metric} is a metric of {results.setting.test[0]}, not of {about}")
    return results.standing(about, metric)


def published_columns(results: Results, about: str) -> list[Column]:
    """The published AUROC of a group with the difference from ours; nothing if none is known."""
    published = results.setting.published
    if published is None:
        return []
    cells = []
    for row in results.ranked():
        theirs = published.auroc.get(row.name, {}).get(about)
        if theirs is None:
            cells.append(("", ""))
        else:
            difference = float(results.value(row, about, "auroc")) - theirs
            cells.append((f"{as_percent(theirs)} ({100 * difference:+.2f})", ""))
    if not any(text for text, _ in cells):
        return []
    return [Column(about, f"{about}\npublished", cells)]


def latency_columns(results: Results) -> list[Column]:
    """Microseconds per sample, one column per batch size."""
    found = []
    for size in results.batch_sizes:
        cells = []
        for row in results.ranked():
            timing = row.latency(size)
            text = ""
            if timing is not None:
                text = _latency_cell(results, timing)
            cells.append((text, ""))
        title = f"µs per sample at batch {size}"
        found.append(Column(title, f"µs per sample\nbatch {size}", cells))
    return found


def _latency_cell(results: Results, timing: Latency) -> str:
    share = results.setting.share_of_forward(timing)
    text = _microseconds(timing)
    return text if share is None else f"{text} ({share_text(share)})"


def all_columns(results: Results, metrics: Sequence[str]) -> list[Column]:
    """Every column: averages, the ID set's own metrics, latencies, then each OOD set."""
    of_ood = [metric for metric in metrics if not MEASURES[metric].of_id_alone]
    of_id = [metric for metric in metrics if MEASURES[metric].of_id_alone]
    columns: list[Column] = []
    for group in reversed(results.groups):
        columns += metric_columns(results, group, of_ood)
        columns += published_columns(results, group)
    columns += metric_columns(results, results.setting.test[0], of_id)
    columns += latency_columns(results)
    for name in results.setting.ood:
        columns += metric_columns(results, name, of_ood)
    return columns


def rich_table(
    results: Results, metrics: Sequence[str], width: int | None = None, top: int | None = None
) -> Table:
    """The table for the terminal, best detector first, with as many columns as fit into `width`
    characters; the caption names the others. With `top`: only the first `top` rows and fDBD's, and
    a short caption."""
    from rich.markup import escape
    from rich.table import Table

    names = [row_name(row) for row in results.ranked()]
    longest = max(len(name) for name in ["detector", *names])
    columns = all_columns(results, metrics)
    count = len(columns)
    if width is not None:
        # Two characters of frame, and two of padding, around the names of the detectors.
        count = max(1, _count_that_fit(columns, width - 4 - longest))
    shown = columns[:count]
    kept = _kept_rows(results, top)
    lines = _table_caption(results, metrics, columns, count, top, len(names) - len(kept))
    table = Table(
        title=_table_title(results) or None,
        caption=escape("\n".join(lines)),
        caption_justify="left",
    )
    table.add_column("detector", no_wrap=True, min_width=longest)
    for column in shown:
        heading = escape(column.heading)
        table.add_column(heading, justify="right", no_wrap=True, min_width=column.width)
    cells = [column.marked("[bold]{}[/bold]") for column in shown]
    for number in kept:
        table.add_row(escape(names[number]), *(column[number] for column in cells))
    return table


def _count_that_fit(columns: Sequence[Column], room: int) -> int:
    """How many of the first columns fit into `room` characters, three of which separate two."""
    for count, column in enumerate(columns):
        room -= column.width + 3
        if room < 0:
            return count
    return len(columns)


def _kept_rows(results: Results, top: int | None) -> list[int]:
    """Places of the rows to show: all, or the first `top` and fDBD's."""
    kept = []
    for place, row in enumerate(results.ranked()):
        if top is None or place < top or row.name == OURS:
            kept.append(place)
    return kept


def _table_caption(
    results: Results,
    metrics: Sequence[str],
    columns: Sequence[Column],
    count: int,
    top: int | None,
    hidden: int,
) -> list[str]:
    lines = []
    if count < len(columns):
        lines.append(f"Left out at this width: {', '.join(_left_out(columns, count))}.")
    if hidden:
        lines.append(f"{hidden} further detectors are in the report and shown by --all.")
    if top is None:
        return lines + caption(results, metrics)
    lines += [data_line(results), *explanations(results, metrics)]
    return lines


def _left_out(columns: Sequence[Column], count: int) -> list[str]:
    """Names of the columns from `count` on: whole sets and groups by their name alone."""
    partly_shown = {column.about for column in columns[:count]}
    names = []
    for column in columns[count:]:
        name = column.title if column.about in partly_shown else column.about
        if name not in names:
            names.append(name)
    return names


def _table_title(results: Results) -> str:
    from rich.markup import escape

    titles = [f"[bold red]{escape(text)}[/]" for text in results.setting.warnings]
    if results.setting.title:
        titles.append(escape(results.setting.title))
    return "\n".join(titles)


def markdown_table(
    titles: Iterable[str], columns: Sequence[str], rows: Rows, sides: str, notes: Sequence[str]
) -> str:
    """GitHub's table with bold lines above and lines below; `sides` has "l" or "r" for each
    column."""
    lines = []
    for title in titles:
        if title:
            lines.append(f"**{title}**\n")
    lines.append("| " + " | ".join(columns) + " |")
    rules = {"l": "---", "r": "---:"}
    lines.append("|" + "|".join(rules[side] for side in sides) + "|")
    for cells in rows:
        lines.append("| " + " | ".join(cells) + " |")
    if notes:
        lines.append("")
        # Two spaces end a line in Markdown.
        lines += [f"{note}  " for note in notes]
    return "\n".join(lines) + "\n"


def markdown(results: Results, metrics: Sequence[str]) -> str:
    """GitHub's table, with a caption below."""
    columns = _in_reading_order(results, metrics)
    header = ["detector", *(column.title for column in columns)]
    cells = [column.marked("**{}**") for column in columns]
    rows = []
    for place, row in enumerate(results.ranked()):
        texts = [row_name(row), *(column[place] for column in cells)]
        rows.append(_without_pipes(texts))
    titles = (*results.setting.warnings, results.setting.title)
    sides = "l" + "r" * len(columns)
    notes = caption(results, metrics)
    return markdown_table(titles, _without_pipes(header), rows, sides, notes)


def _in_reading_order(results: Results, metrics: Sequence[str]) -> list[Column]:
    """The columns for formats in which the width does not matter: averages, OOD sets, the ID set,
    latencies."""
    of_ood = [metric for metric in metrics if not MEASURES[metric].of_id_alone]
    of_id = [metric for metric in metrics if MEASURES[metric].of_id_alone]
    columns: list[Column] = []
    for name in datasets(results):
        columns += metric_columns(results, name, of_ood)
        columns += published_columns(results, name)
    columns += metric_columns(results, results.setting.test[0], of_id)
    return columns + latency_columns(results)


def _without_pipes(texts: Iterable[str]) -> list[str]:
    """Texts as cells of a table in Markdown, in which a pipe would end the cell."""
    return [text.replace("|", "\\|") for text in texts]


def latex_table(caption: str, heading: Rows, body: Rows, sides: str) -> str:
    """A table for the booktabs package; all texts are LaTeX already."""
    heading_lines = "\n".join(" & ".join(cells) + r" \\" for cells in heading)
    body_lines = "\n".join(" & ".join(cells) + r" \\" for cells in body)
    return LATEX % (caption, sides, heading_lines, body_lines)


def latex(results: Results, metrics: Sequence[str]) -> str:
    """Tables for the booktabs package, each with few enough columns and rows for a page of text."""
    setting = results.setting
    about = [*setting.warnings, setting.title, *caption(results, metrics)]
    text = tex(" ".join(about))
    of_ood = [metric for metric in metrics if not MEASURES[metric].of_id_alone]
    names = datasets(results)
    tables: list[str] = []
    for first in range(0, len(names), LATEX_SETS):
        heading, columns = _latex_columns(results, names[first : first + LATEX_SETS], of_ood)
        body = _latex_body(results, columns)
        sides = "l" + "r" * len(columns)
        for top in range(0, max(len(body), 1), LATEX_ROWS):
            tables.append(latex_table(text, heading, body[top : top + LATEX_ROWS], sides))
            # Only the first table has the caption in full.
            text = tex(setting.title + ", continued.")
    return "\n".join(tables)


def _latex_columns(
    results: Results, names: Sequence[str], metrics: Sequence[str]
) -> tuple[list[list[str]], list[Column]]:
    """The two lines of a heading, and the columns below it."""
    groups = [""]
    titles = ["Detector"]
    columns: list[Column] = []
    for name in names:
        own = [*metric_columns(results, name, metrics), *published_columns(results, name)]
        groups.append(rf"\multicolumn{{{len(own)}}}{{c}}{{{tex(name)}}}")
        for column in own:
            title = column.heading.split("\n")[1]
            titles.append(tex(title.replace(" ↑", "↑").replace(" ↓", "↓")))
        columns += own
    return [groups, titles], columns


def _latex_body(results: Results, columns: Sequence[Column]) -> list[list[str]]:
    cells = []
    for column in columns:
        texts = column.marked(r"\textbf{{{}}}")
        cells.append([text.replace(TIED, r"$\sim$").replace("±", r"$\pm$") for text in texts])
    rows = []
    for place, row in enumerate(results.ranked()):
        rows.append([tex(row_name(row)), *(column[place] for column in cells)])
    return rows


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
_TEX_SYMBOLS = {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"$\sim$",
    "µ": r"$\mu$",
    "μ": r"$\mu$",
    "σ": r"$\sigma$",
    "†": r"$\dagger$",
    "‡": r"$\ddagger$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "−": "$-$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "‖": r"$\|$",
}
_TEX_ESCAPED = {character: "\\" + character for character in "&%$#_{}"}
TEX = str.maketrans({**_TEX_ESCAPED, **_TEX_SYMBOLS})


def tex(text: str) -> str:
    """Text with the characters escaped that LaTeX reads as commands or does not have."""
    return text.translate(TEX)
