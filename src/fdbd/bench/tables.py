"""Results as tables: for the terminal, Markdown and LaTeX. Percentages with two decimals; the best in bold, those that
cannot be told from it marked with a tilde."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fdbd.metrics import as_percent

if TYPE_CHECKING:
    from rich.table import Table

    from fdbd.bench.results import Results, Row

TITLES = {"auroc": "AUROC", "fpr95": "FPR95", "aupr_in": "AUPR-in", "aupr_out": "AUPR-out"}
ARROWS = {"auroc": "↑", "fpr95": "↓", "aupr_in": "↑", "aupr_out": "↑"}
TIED = "~"


def columns(results: Results, metrics: Sequence[str]) -> list[tuple[str, str]]:
    """(dataset or group, metric) of each column: averages first, since they are looked at first."""
    return [(column, metric) for column in [*reversed(results.groups), *results.setting.ood] for metric in metrics]


def caption(results: Results) -> list[str]:
    """Lines that make the table stand alone: data, accuracy, convention, marks."""
    from fdbd.bench.results import convention

    setting = results.setting
    accuracy = "" if setting.accuracy is None else f", classifier accuracy {as_percent(setting.accuracy)} %"
    sets = ", ".join(f"{name} ({count:,})" for name, count in setting.ood.items())
    return [
        f"ID {setting.test[0]} ({setting.test[1]:,}){accuracy}; OOD {sets}; fitted on {setting.num_train:,} samples.",
        f"Percent. {convention(setting.positive)}. Bold: best; {TIED}: not told from it at the 5 % level.",
        *setting.notes,
    ]


def latency_text(results: Results, row: Row) -> list[str]:
    """Microseconds a sample at each batch size, with the share of the forward pass where that is known."""
    texts = []
    for timing in row.latencies:
        text = f"{timing.median * 1e6:.3g}"
        if results.setting.forward_seconds:
            text += f" ({timing.median / results.setting.forward_seconds:.2%})"
        texts.append(text)
    return texts


def _latency_titles(results: Results) -> list[str]:
    sizes = next(([timing.batch_size for timing in row.latencies] for row in results.finished if row.latencies), [])
    return [f"µs/sample, batch {size}" for size in sizes]


def rich_table(results: Results, metrics: Sequence[str], width: int | None = None) -> Table:
    """For the terminal: the averages and each set, best first. Where that takes more than `width` characters, the sets
    are left to the files and the report."""
    from rich.markup import escape
    from rich.table import Table

    lines = [*caption(results), *(f"{row.name} failed: {row.error}" for row in results.failures)]
    title = escape(results.setting.title) or None
    table = Table(title=title, caption=escape("\n".join(lines)), caption_justify="left")
    table.add_column("detector", no_wrap=True)
    shown = columns(results, metrics)
    needed = 20 + sum(3 + max(8, len(column)) for column, _ in shown) + 22 * len(_latency_titles(results))
    if width is not None and needed > width and results.groups:
        shown = [key for key in shown if key[0] in results.groups]
    for column, metric in shown:
        table.add_column(f"{escape(column)}\n{TITLES[metric]} {ARROWS[metric]}", justify="right", no_wrap=True)
    for title in _latency_titles(results):
        table.add_column(title.replace(", ", "\n"), justify="right")
    marks = {key: results.standing(*key) for key in shown}
    for row in results.ranked():
        cells = [_marked(results, row, key, marks, "[bold]{}[/bold]") for key in shown]
        table.add_row(escape(row.name), *cells, *latency_text(results, row))
    return table


def _marked(
    results: Results, row: Row, key: tuple[str, str], marks: dict[tuple[str, str], dict[str, str]], bold: str
) -> str:
    text = as_percent(results.value(row, *key))
    mark = marks[key].get(row.name)
    return bold.format(text) if mark == "best" else f"{TIED}{text}" if mark == "tied" else text


def markdown(results: Results, metrics: Sequence[str]) -> str:
    """GitHub's table, with a caption below."""
    shown = columns(results, metrics)
    titles = ["detector", *(f"{column} {TITLES[metric]} {ARROWS[metric]}" for column, metric in shown)]
    titles += _latency_titles(results)
    marks = {key: results.standing(*key) for key in shown}
    lines = [f"**{results.setting.title}**", ""] if results.setting.title else []
    lines += ["| " + " | ".join(titles) + " |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    for row in results.ranked():
        cells = [_marked(results, row, key, marks, "**{}**") for key in shown]
        lines.append("| " + " | ".join([row.name, *cells, *latency_text(results, row)]) + " |")
    lines += ["", *(f"{line}  " for line in caption(results))]
    lines += [f"{row.name} failed: {row.error}  " for row in results.failures]
    return "\n".join(line.rstrip() if not line.endswith("  ") else line for line in lines) + "\n"


def latex(results: Results, metrics: Sequence[str]) -> str:
    """A booktabs table, one pair of columns a dataset."""
    datasets = [*reversed(results.groups), *results.setting.ood]
    marks = {key: results.standing(*key) for key in columns(results, metrics)}
    width = len(metrics)
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_tex(results.setting.title)} {_tex(' '.join(caption(results)))}}}",
        rf"\begin{{tabular}}{{l{'r' * (width * len(datasets))}}}",
        r"\toprule",
        " & ".join(["", *(rf"\multicolumn{{{width}}}{{c}}{{{_tex(name)}}}" for name in datasets)]) + r" \\",
        " & ".join(["Detector", *(f"{TITLES[m]}${_arrow(m)}$" for _ in datasets for m in metrics)]) + r" \\",
        r"\midrule",
    ]
    for row in results.ranked():
        cells = [_marked(results, row, (name, m), marks, r"\textbf{{{}}}") for name in datasets for m in metrics]
        lines.append(" & ".join([_tex(row.name), *(cell.replace(TIED, r"$\sim$") for cell in cells)]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def _arrow(metric: str) -> str:
    return r"\downarrow" if ARROWS[metric] == "↓" else r"\uparrow"


def _tex(text: str) -> str:
    for character in "&%$#_{}":
        text = text.replace(character, "\\" + character)
    return text.replace("~", r"$\sim$").replace("µ", r"$\mu$")
