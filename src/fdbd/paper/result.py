"""What an experiment finds. Its program fills in a `Result`: tables, a figure, and a verdict for
each statement."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray
from typing_extensions import Self

from fdbd.bench.figures import Floats
from fdbd.bench.rows import machine
from fdbd.bench.text import latex_table, markdown_table, tex
from fdbd.metrics import Comparison, Estimate
from fdbd.paper.experiment import Experiment
from fdbd.util.extras import require
from fdbd.util.files import beside, write_text

Record = dict[str, Any]
"""What NAME.json holds."""
SIGNS = {"holds": "✓", "does not hold": "✗", "undecided": "~"}
Outcome = bool | Comparison | list[Comparison]
"""Decides a statement: a comparison of numbers, a test that a difference is above 0, or several
tests, one of which can refute. Tests that do not tell at the 5 % level leave the statement
undecided."""


@dataclass(frozen=True)
class Table:
    """Cells are texts, in which Markdown's ** marks bold; `notes` stand below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """A table for GitHub: numbers to the right, text to the left."""
        return markdown_table([self.title], self.columns, self.rows, self._sides(), self.notes)

    def latex(self) -> str:
        """A table in the style of booktabs."""
        cells = [[_tex(cell) for cell in row] for row in (self.columns, *self.rows)]
        return latex_table(
            _tex(" ".join([self.title, *self.notes])), cells[:1], cells[1:], self._sides()
        )

    def _sides(self) -> str:
        """ "r" for each column of numbers, "l" for others and for the first."""
        columns = range(1, len(self.columns))
        return "l" + "".join(
            "r" if all(_is_number(row[n]) for row in self.rows) else "l" for n in columns
        )


def _is_number(cell: str) -> bool:
    """Whether a cell is empty or holds a number, perhaps bold, in percent or with thousands
    separators."""
    text = cell.strip("*% ").replace(",", "")
    try:
        return not text or math.isfinite(float(text))
    except ValueError:
        return False


def _tex(text: str) -> str:
    parts = [tex(part) for part in text.split("**")]
    return "".join(
        rf"\textbf{{{part}}}" if number % 2 else part for number, part in enumerate(parts)
    )


@dataclass(frozen=True)
class Check:
    """One statement of the paper, the verdict on it, and the numbers behind the verdict."""

    statement: str
    verdict: Literal["holds", "does not hold", "undecided"]
    measured: str

    @classmethod
    def of(cls, statement: str, outcome: Outcome, measured: str) -> Self:
        """A statement that the outcome decides."""
        if not isinstance(outcome, (Comparison, list)):
            return cls(statement, "holds" if outcome else "does not hold", measured)
        found = {
            test.verdict() for test in ([outcome] if isinstance(outcome, Comparison) else outcome)
        }
        if "lower" in found:
            return cls(statement, "does not hold", measured)
        if found == {"higher"}:
            return cls(statement, "holds", measured)
        within = " The difference is within its error." if isinstance(outcome, Comparison) else ""
        return cls(statement, "undecided", measured + within)


def difference(first: Estimate, second: Estimate) -> Comparison:
    """First minus second, of estimates on different samples: the errors are those of their 95 %
    intervals."""
    error = math.hypot(first.high - first.low, second.high - second.low) / (2 * 1.96)
    return Comparison.of(float(first) - float(second), error)


def difference_of_means(first: Floats, second: Floats) -> Comparison:
    """Mean of the first sample minus mean of the second (Welch's test, normal approximation)."""
    error = math.sqrt(first.var(ddof=1) / len(first) + second.var(ddof=1) / len(second))
    return Comparison.of(float(first.mean() - second.mean()), error)


@dataclass
class Result:
    """An experiment and what its program has found so far."""

    experiment: Experiment
    say: Callable[[str], None] = lambda text: None  #: called with a few words on what is being done
    tables: list[Table] = field(default_factory=list)  #: the most important one first
    checks: list[Check] = field(default_factory=list)  #: the claim, statement by statement
    notes: list[str] = field(
        default_factory=list
    )  #: what a reader must know, such as stand-ins and conventions
    missing: list[str] = field(
        default_factory=list
    )  #: what was not available, with the way to get it
    data: dict[str, Any] = field(default_factory=dict)  #: numbers for the JSON file
    figure: Any = None  #: a Figure of matplotlib
    more: list[tuple[str, str]] = field(
        default_factory=list
    )  #: further tables as pairs of Markdown and LaTeX

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.experiment.settings

    def check(self, statement: str, outcome: Outcome, measured: str) -> None:
        """Add a statement and what decides it."""
        self.checks.append(Check.of(statement, outcome, measured))

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], *notes: str, title: str = ""
    ) -> None:
        """Add a table, by default with the experiment's title."""
        self.tables.append(Table(title or self.experiment.title, columns, rows, notes))

    def axes(self, width: float, height: float, rows: int = 1, columns: int = 1) -> NDArray[Any]:
        """An array (rows, columns) of axes of the experiment's figure, whose size is in inches."""
        self.figure = require("matplotlib.figure", "report").Figure(
            figsize=(width, height), layout="constrained"
        )
        axes: NDArray[Any] = self.figure.subplots(rows, columns, squeeze=False)
        for axis in axes.flat:
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=8)
        return axes

    def record(self, seconds: float = 0.0, made_from: str = "") -> Record:
        """Everything but the figure, ready for JSON."""
        held, count = sum(item.verdict == "holds" for item in self.checks), len(self.checks)
        verdict = "holds" if held == count else f"{held} of {count} statements hold"
        return {
            **{
                key: getattr(self.experiment, key)
                for key in ("name", "kind", "title", "place", "claim", "scale")
            },
            "seconds": round(seconds, 2),
            "machine": machine(),
            "checks": [asdict(item) for item in self.checks],
            "notes": self.notes,
            "missing": self.missing,
            "tables": [asdict(table) for table in self.tables],
            "data": _plain(self.data),
            "made_from": made_from,
            "verdict": verdict if count else "not run",
        }

    def write(self, record: Record, folder: Path) -> None:
        """NAME.png, .svg, .md, .tex and last .json, whose presence says that the others are
        complete."""
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / record["name"]
        if self.figure is not None:
            for suffix, options in (("png", {"dpi": 110}), ("svg", {"metadata": {"Date": None}})):
                with beside(target.with_suffix(f".{suffix}")) as temporary:
                    self.figure.savefig(temporary, format=suffix, **options)
        latex = "\n".join(
            [*(table.latex() for table in self.tables), *(text for _, text in self.more)]
        )
        write_text(target.with_suffix(".md"), self._markdown())
        write_text(target.with_suffix(".tex"), latex)
        write_text(target.with_suffix(".json"), json.dumps(record, indent=1) + "\n")

    def _markdown(self) -> str:
        about = self.experiment
        lines = [
            f"# {about.name}: {about.title}",
            "",
            f"**The paper** ({about.place}): {about.claim}",
            "",
        ]
        lines += [
            f"- **{SIGNS[c.verdict]} {c.verdict}**: {c.statement}. {c.measured}"
            for c in self.checks
        ]
        lines += [
            "",
            *(f"{table.markdown()}\n" for table in self.tables),
            *(text for text, _ in self.more),
        ]
        lines += [
            f"{note}  " for note in [*self.notes, *(f"Missing: {line}" for line in self.missing)]
        ]
        return "\n".join(lines).rstrip() + "\n"


def _plain(value: Any) -> Any:
    """The value with plain numbers, short enough to read: six digits, None for what is not
    finite."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
