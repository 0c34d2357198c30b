"""What an experiment found: tables, a figure, and a verdict for each statement of the paper; and the files of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fdbd.metrics.comparison import Comparison
from fdbd.metrics.evaluation import Estimate
from fdbd.paper.experiment import Experiment
from fdbd.paper.plot import Floats
from fdbd.paper.table import Table
from fdbd.results.rows import machine
from fdbd.util.files import beside, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Verdict = Literal["holds", "does not hold", "undecided"]
Record = dict[str, Any]
"""What NAME.json holds."""


@dataclass(frozen=True)
class Check:
    """One statement of the paper, the verdict on it, and the numbers behind the verdict."""

    statement: str
    verdict: Verdict
    measured: str


def check(statement: str, holds: bool, measured: str) -> Check:
    """A statement that a comparison of numbers decides."""
    return Check(statement, "holds" if holds else "does not hold", measured)


def check_difference(statement: str, comparison: Comparison, measured: str) -> Check:
    """A statement that one number is higher than another; undecided where a test at the 5 % level does not tell."""
    verdicts: dict[str, Verdict] = {"higher": "holds", "lower": "does not hold", "undecided": "undecided"}
    found = verdicts[comparison.verdict()]
    return Check(statement, found, measured + " The difference is within its error." * (found == "undecided"))


def difference(first: Estimate, second: Estimate) -> Comparison:
    """First minus second, of estimates on different samples: the errors are those of their 95 % intervals."""
    error = math.hypot(first.high - first.low, second.high - second.low) / (2 * 1.96)
    return Comparison.of(float(first) - float(second), error)


def difference_of_means(first: Floats, second: Floats) -> Comparison:
    """Mean of the first sample minus mean of the second (Welch's test, normal approximation)."""
    error = math.sqrt(first.var(ddof=1) / len(first) + second.var(ddof=1) / len(second))
    return Comparison.of(float(first.mean() - second.mean()), error)


@dataclass
class Result:
    """What the program of an experiment returns.

    Attributes:
        tables: the most important one first.
        checks: the claim, statement by statement.
        notes: what a reader must know, such as stand-ins and conventions.
        missing: what was not available, one line each, with the way to get it.
        data: numbers for the JSON file.
        figure: the figure of the experiment.
        more: further tables as pairs of Markdown and LaTeX.
    """

    tables: list[Table] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    figure: Figure | None = None
    more: list[tuple[str, str]] = field(default_factory=list)

    def record(self, experiment: Experiment, seconds: float, made_from: str = "") -> Record:
        """Everything but the figure, ready for JSON."""
        return {
            **{key: getattr(experiment, key) for key in ("name", "kind", "title", "place", "claim", "scale")},
            "seconds": round(seconds, 2),
            "machine": machine(),
            "checks": [asdict(item) for item in self.checks],
            "notes": self.notes,
            "missing": self.missing,
            "tables": [asdict(table) for table in self.tables],
            "data": _plain(self.data),
            "made_from": made_from,
            "verdict": _summary([item.verdict for item in self.checks]),
        }

    def write(self, record: Record, folder: Path) -> None:
        """NAME.png, .svg, .md, .tex and last .json, whose presence says that the others are complete."""
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / record["name"]
        if self.figure is not None:
            for suffix, options in (("png", {"dpi": 110}), ("svg", {"metadata": {"Date": None}})):
                with beside(target.with_suffix(f".{suffix}")) as temporary:
                    self.figure.savefig(temporary, format=suffix, **options)
        latex = "\n".join([*(table.latex() for table in self.tables), *(tex for _, tex in self.more)])
        write_text(target.with_suffix(".md"), _markdown(record, [text for text, _ in self.more]))
        write_text(target.with_suffix(".tex"), latex)
        write_text(target.with_suffix(".json"), json.dumps(record, indent=1) + "\n")


def _markdown(record: Record, more: Iterable[str]) -> str:
    """The page of one result."""
    lines = [f"# {record['name']}: {record['title']}", "", f"**The paper** ({record['place']}): {record['claim']}", ""]
    lines += [*verdict_lines(record), ""]
    for table in record["tables"]:
        lines += [Table(**table).markdown(), ""]
    lines += more
    lines += [f"{note}  " for note in [*record["notes"], *(f"Missing: {line}" for line in record["missing"])]]
    return "\n".join(lines).rstrip() + "\n"


def verdict_lines(record: Record) -> list[str]:
    """One Markdown item per statement."""
    signs = {"holds": "✓ holds", "does not hold": "✗ does not hold", "undecided": "~ undecided"}
    return [f"- **{signs[item['verdict']]}**: {item['statement']}. {item['measured']}" for item in record["checks"]]


def _summary(verdicts: list[Verdict]) -> str:
    """All verdicts of an experiment in a few words."""
    held = verdicts.count("holds")
    if not verdicts:
        return "not run"
    return "holds" if held == len(verdicts) else f"{held} of {len(verdicts)} statements hold"


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
