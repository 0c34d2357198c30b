"""The result of an experiment. Its program fills in a `Finding`: tables, a figure, and a verdict on
each statement."""

import json
import math
from collections.abc import Callable, Sequence
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
Verdict = Literal["holds", "does not hold", "undecided", "not tested"]
SIGNS: dict[str, str] = {"holds": "✓", "does not hold": "✗", "undecided": "~", "not tested": "–"}
Outcome = bool | Comparison | list[Comparison]
"""Decides a statement: a comparison of numbers, a test that a difference is above 0, or several
tests, one of which can refute. Tests that do not tell at the 5 % level leave the statement
undecided."""


@dataclass(frozen=True)
class TextTable:
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
        caption = " ".join([self.title, *self.notes])
        head = [[_tex(cell) for cell in self.columns]]
        body = []
        for row in self.rows:
            body.append([_tex(cell) for cell in row])
        return latex_table(_tex(caption), head, body, self._sides())

    def _sides(self) -> str:
        """ "r" for each column of numbers, "l" for others and for the first."""
        sides = "l"
        for column in range(1, len(self.columns)):
            side = "l"
            if all(_is_number(row[column]) for row in self.rows):
                side = "r"
            sides += side
        return sides


def _is_number(cell: str) -> bool:
    """Whether a cell is empty or holds a number, perhaps bold, in percent or with thousands
    separators."""
    text = cell.strip("*% ").replace(",", "")
    if not text:
        return True
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _tex(text: str) -> str:
    """The text for LaTeX; what stands between two ** becomes bold."""
    found = ""
    for number, part in enumerate(text.split("**")):
        is_bold = number % 2 == 1
        if is_bold:
            found += rf"\textbf{{{tex(part)}}}"
        else:
            found += tex(part)
    return found


@dataclass(frozen=True)
class Statement:
    """One statement, the verdict on it, and the numbers behind the verdict.

    A statement of the paper is counted; one that is `ours` is a question that the paper does not
    ask, and is counted apart.
    """

    statement: str
    verdict: Verdict
    measured: str
    ours: bool = False

    @classmethod
    def from_outcome(
        cls, statement: str, outcome: Outcome, measured: str, ours: bool = False
    ) -> Self:
        """A statement that the outcome decides."""
        verdict = verdict_of(outcome)
        if verdict == "undecided" and isinstance(outcome, Comparison):
            measured += " The difference is within its error."
        return cls(statement, verdict, measured, ours)


def verdict_of(outcome: Outcome) -> Verdict:
    """What an outcome says: a refuting test outweighs any number of others, and a statement on
    several differences holds only if each of them is told."""
    if not isinstance(outcome, (Comparison, list)):
        return "holds" if outcome else "does not hold"
    tests = outcome if isinstance(outcome, list) else [outcome]
    found = {test.verdict() for test in tests}
    if "lower" in found:
        return "does not hold"
    return "holds" if found == {"higher"} else "undecided"


def tally(statements: Sequence[Statement]) -> str:
    """The verdicts on the paper's statements in words, and apart from them those on our own
    questions.

    >>> tally([Statement("a", "holds", ""), Statement("b", "not tested", "")])
    '1 holds, 1 not tested'
    >>> tally([Statement("a", "holds", ""), Statement("b", "holds", "")])
    'holds'
    """
    if not statements:
        return "not run"
    own = [item.verdict for item in statements if item.ours]
    papers = [item.verdict for item in statements if not item.ours]
    parts = []
    if papers:
        parts.append(_counts(papers))
    if own:
        noun = "question" if len(own) == 1 else "questions"
        parts.append(f"of {len(own)} {noun} of our own: {_counts(own)}")
    return "; ".join(parts)


_OF_SEVERAL = {"holds": "hold", "does not hold": "do not hold"}


def _counts(verdicts: Sequence[Verdict]) -> str:
    if set(verdicts) == {"holds"}:
        return "holds"
    words = []
    for verdict in SIGNS:
        count = sum(found == verdict for found in verdicts)
        if count == 0:
            continue
        text: str = verdict
        if count > 1:
            text = _OF_SEVERAL.get(verdict, verdict)
        words.append(f"{count} {text}")
    return ", ".join(words)


def difference(first: Estimate, second: Estimate) -> Comparison:
    """First minus second, of estimates on different samples: the errors are those of their 95 %
    intervals."""
    width_of_both = math.hypot(first.high - first.low, second.high - second.low)
    return Comparison.from_difference(float(first) - float(second), width_of_both / (2 * 1.96))


def difference_of_means(first: Floats, second: Floats) -> Comparison:
    """Mean of the first sample minus mean of the second (Welch's test, normal approximation)."""
    variance = first.var(ddof=1) / len(first) + second.var(ddof=1) / len(second)
    return Comparison.from_difference(float(first.mean() - second.mean()), math.sqrt(variance))


@dataclass
class Finding:
    """An experiment and what its program has found so far."""

    experiment: Experiment
    #: called with a few words on what is being done
    say: Callable[[str], None] = lambda text: None
    #: the most important one first
    tables: list[TextTable] = field(default_factory=list)
    #: the claim, one by one
    statements: list[Statement] = field(default_factory=list)
    #: what a reader must know, such as stand-ins and conventions
    notes: list[str] = field(default_factory=list)
    #: what was not available, with the way to get it
    missing: list[str] = field(default_factory=list)
    #: numbers for the JSON file
    data: dict[str, Any] = field(default_factory=dict)
    #: a Figure of matplotlib
    figure: Any = None
    #: further tables as pairs of Markdown and LaTeX
    more: list[tuple[str, str]] = field(default_factory=list)

    def decide(
        self, statement: str, outcome: Outcome, measured: str, *, ours: bool = False
    ) -> None:
        """Add a statement and what decides it; `ours` marks a question that the paper does not
        ask."""
        self.statements.append(Statement.from_outcome(statement, outcome, measured, ours))

    def leave_untested(self, statement: str, why: str) -> None:
        """Add a statement of the paper that nothing here can decide."""
        self.statements.append(Statement(statement, "not tested", why))

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], *notes: str, title: str = ""
    ) -> None:
        """Add a table, by default with the experiment's title."""
        self.tables.append(TextTable(title or self.experiment.title, columns, rows, notes))

    def axes(self, width: float, height: float, rows: int = 1, columns: int = 1) -> NDArray[Any]:
        """An array (rows, columns) of axes of the experiment's figure, whose size is in inches."""
        matplotlib_figure = require("matplotlib.figure", "report")
        self.figure = matplotlib_figure.Figure(figsize=(width, height), layout="constrained")
        axes: NDArray[Any] = self.figure.subplots(rows, columns, squeeze=False)
        for axis in axes.flat:
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=8)
        return axes

    def record(self, seconds: float = 0.0, made_from: str = "") -> Record:
        """Everything but the figure, ready for JSON."""
        experiment = self.experiment
        return {
            "name": experiment.name,
            "kind": experiment.kind,
            "title": experiment.title,
            "place": experiment.place,
            "claim": experiment.claim,
            "question": experiment.question,
            "scale": experiment.scale,
            "seconds": round(seconds, 2),
            "machine": machine(),
            "checks": [asdict(item) for item in self.statements],
            "notes": self.notes,
            "missing": self.missing,
            "tables": [asdict(table) for table in self.tables],
            "data": _plain(self.data),
            "made_from": made_from,
            "verdict": tally(self.statements),
        }

    def write(self, record: Record, folder: Path) -> None:
        """NAME.png, .svg, .md, .tex and last .json, whose presence says that the others are
        complete."""
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / record["name"]
        if self.figure is not None:
            self._save_figure(target.with_suffix(".png"), dpi=110)
            # Without its date a figure of the same numbers is the same file.
            self._save_figure(target.with_suffix(".svg"), metadata={"Date": None})
        own_tables = [table.latex() for table in self.tables]
        further_tables = [latex for _, latex in self.more]
        write_text(target.with_suffix(".md"), self._markdown())
        write_text(target.with_suffix(".tex"), "\n".join(own_tables + further_tables))
        write_text(target.with_suffix(".json"), json.dumps(record, indent=1) + "\n")

    def _save_figure(self, path: Path, **options: Any) -> None:
        with beside(path) as temporary:
            self.figure.savefig(temporary, format=path.suffix[1:], **options)

    def _markdown(self) -> str:
        about = self.experiment
        lines = [f"# {about.name}: {about.title}", ""]
        lines += [f"**The paper** ({about.place}): {about.claim}", ""]
        if about.question:
            lines += [f"**Our question**: {about.question}", ""]
        for item in self.statements:
            asked_by = " (our question)" if item.ours else ""
            sign = SIGNS[item.verdict]
            text = f"{item.statement}{asked_by}. {item.measured}"
            lines.append(f"- **{sign} {item.verdict}**: {text}")
        lines.append("")
        for table in self.tables:
            lines.append(f"{table.markdown()}\n")
        for markdown, _ in self.more:
            lines.append(markdown)
        for note in self.notes:
            lines.append(f"{note}  ")
        for line in self.missing:
            lines.append(f"Missing: {line}  ")
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
