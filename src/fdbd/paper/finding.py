"""What an experiment found: tables, a figure, and for each statement whether it holds here; and the files of it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fdbd.util.files import beside, write_text

if TYPE_CHECKING:
    from fdbd.paper.experiment import Experiment

Verdict = Literal["holds", "does not hold", "undecided"]


@dataclass(frozen=True)
class Check:
    """One statement, whether our numbers bear it out, and these numbers."""

    statement: str
    verdict: Verdict
    measured: str


def check(statement: str, holds: bool, measured: str) -> Check:
    """A statement that a comparison of numbers decides."""
    return Check(statement, "holds" if holds else "does not hold", measured)


@dataclass(frozen=True)
class Table:
    """Cells as texts; `notes` stand below. Cells may carry Markdown's ** for bold."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """GitHub's table: numbers to the right, texts to the left."""
        lines = [f"**{self.title}**", ""] if self.title else []
        lines += [
            "| " + " | ".join(self.columns) + " |",
            "|" + "|".join(map(self._rule, range(len(self.columns)))) + "|",
        ]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, *(["", *(f"{note}  " for note in self.notes)] if self.notes else [])]) + "\n"

    def _rule(self, column: int) -> str:
        return "---:" if column and all(_is_number(row[column]) for row in self.rows) else "---"

    def latex(self) -> str:
        """A booktabs table."""
        caption = " ".join([self.title, *self.notes])
        sides = "".join("r" if self._rule(column) == "---:" else "l" for column in range(len(self.columns)))
        lines = [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_tex(caption)}}}",
            rf"\begin{{tabular}}{{{sides}}}",
            r"\toprule",
            " & ".join(map(_tex, self.columns)) + r" \\",
            r"\midrule",
            *(" & ".join(map(_tex, row)) + r" \\" for row in self.rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
        return "\n".join(lines) + "\n"


@dataclass
class Finding:
    """What a kind returns.

    Attributes:
        tables: the first is the one to look at first.
        checks: the claim, statement by statement.
        notes: what a reader must know: which stand-in, which convention.
        missing: what could not be had, one line each with the way to get it.
        data: numbers for the JSON file.
        figure: a matplotlib Figure.
        more: further tables as (Markdown, LaTeX) texts, such as those of `Results`.
    """

    tables: list[Table] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    figure: Any = None
    more: list[tuple[str, str]] = field(default_factory=list)

    def to_dict(self, experiment: Experiment, seconds: float) -> dict[str, Any]:
        """Everything but the figure, ready for JSON."""
        from fdbd.bench.results import machine

        about = {key: getattr(experiment, key) for key in ("name", "kind", "title", "place", "claim", "scale")}
        return {
            **about,
            "seconds": round(seconds, 2),
            "machine": machine(),
            "checks": [asdict(item) for item in self.checks],
            "notes": self.notes,
            "missing": self.missing,
            "tables": [asdict(table) for table in self.tables],
            "data": _plain(self.data),
        }


def write(finding: Finding, record: dict[str, Any], folder: Path) -> list[Path]:
    """NAME.png, .svg, .md, .tex and, last, .json, whose presence says that the others are whole."""
    name = record["name"]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    if finding.figure is not None:
        for suffix, options in (("png", {"dpi": 110}), ("svg", {"metadata": {"Date": None}})):
            path = folder / f"{name}.{suffix}"
            with beside(path) as temporary:
                finding.figure.savefig(temporary, format=suffix, **options)
            written.append(path)
    latex = "\n".join([*(table.latex() for table in finding.tables), *(tex for _, tex in finding.more)])
    written.append(write_text(folder / f"{name}.md", markdown(record, [text for text, _ in finding.more])))
    written.append(write_text(folder / f"{name}.tex", latex))
    written.append(write_text(folder / f"{name}.json", json.dumps(record, indent=1) + "\n"))
    return written


def markdown(record: dict[str, Any], more: Sequence[str] = ()) -> str:
    """The page of one result."""
    lines = [f"# {record['name']}: {record['title']}", "", f"**The paper** ({record['place']}): {record['claim']}", ""]
    lines += [*verdict_lines(record), ""]
    for table in record["tables"]:
        lines += [Table(**table).markdown(), ""]
    lines += [*more]
    lines += [f"{note}  " for note in [*record["notes"], *(f"Missing: {line}" for line in record["missing"])]]
    return "\n".join(lines).rstrip() + "\n"


def verdict_lines(record: dict[str, Any]) -> list[str]:
    """One Markdown item a statement."""
    signs = {"holds": "✓ holds", "does not hold": "✗ does not hold", "undecided": "~ undecided"}
    return [f"- **{signs[item['verdict']]}**: {item['statement']}. {item['measured']}" for item in record["checks"]]


def verdict(record: dict[str, Any]) -> str:
    """All statements of an experiment in two or three words."""
    count = [item["verdict"] for item in record["checks"]]
    held = count.count("holds")
    if not count:
        return "not run"
    return "holds" if held == len(count) else f"{held} of {len(count)} statements hold"


def _is_number(cell: str) -> bool:
    """Whether a cell holds a number, perhaps bold, in percent or with thousands set apart; an empty one may."""
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


def _plain(value: Any) -> Any:
    """The value with plain numbers, short enough to read: six digits, None for what is not finite."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _tex(text: str) -> str:
    parts = text.split("**")
    text = "".join(rf"\textbf{{{_escape(part)}}}" if index % 2 else _escape(part) for index, part in enumerate(parts))
    for sign, command in {"µ": r"\mu", "≤": r"\leq", "≥": r"\geq", "‖": r"\|", "μ": r"\mu", "σ": r"\sigma"}.items():
        text = text.replace(sign, f"${command}$")
    return text.replace("×", r"$\times$").replace("−", "$-$").replace("†", r"$\dagger$").replace("~", r"$\sim$")


def _escape(text: str) -> str:
    for character in "&%$#_{}":
        text = text.replace(character, "\\" + character)
    return text
