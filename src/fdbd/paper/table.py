"""A table of an experiment, as Markdown and as LaTeX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fdbd.results.text import LATEX, tex


@dataclass(frozen=True)
class Table:
    """Cells are texts, in which Markdown's ** marks bold; `notes` stand below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """A table for GitHub: numbers to the right, text to the left."""
        lines = [f"**{self.title}**", ""] if self.title else []
        rules = ["---:" if is_numeric else "---" for is_numeric in self._numeric()]
        for cells, ends in ((self.columns, " "), (rules, ""), *((row, " ") for row in self.rows)):
            lines.append(f"|{ends}" + f"{ends}|{ends}".join(cells) + f"{ends}|")
        return "\n".join([*lines, *(["", *(f"{note}  " for note in self.notes)] if self.notes else [])]) + "\n"

    def latex(self) -> str:
        """A table in the style of booktabs."""
        sides = "".join("r" if is_numeric else "l" for is_numeric in self._numeric())
        heading, *body = (" & ".join(map(_tex, cells)) + r" \\" for cells in (self.columns, *self.rows))
        return LATEX % (_tex(" ".join([self.title, *self.notes])), sides[1:], heading, "\n".join(body))

    def _numeric(self) -> list[bool]:
        """Whether each column holds numbers; the first one never counts as numeric."""
        return [bool(n) and all(_is_number(row[n]) for row in self.rows) for n in range(len(self.columns))]


def _is_number(cell: str) -> bool:
    """Whether a cell is empty or holds a number, perhaps bold, in percent or with thousands separators."""
    text = cell.strip("*% ").replace(",", "")
    try:
        return not text or math.isfinite(float(text))
    except ValueError:
        return False


def percent(value: float) -> str:
    """A fraction as a percentage with two decimals.

    >>> percent(0.98765)
    '98.77'
    """
    return f"{100 * value:.2f}"


def _tex(text: str) -> str:
    parts = [tex(part) for part in text.split("**")]
    return "".join(rf"\textbf{{{part}}}" if number % 2 else part for number, part in enumerate(parts))
