"""What a benchmark found: rows of evaluations, their averages, and every format that they are written in."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fdbd.bench.latency import Latency
from fdbd.detectors import Paper
from fdbd.metrics import Estimate, Evaluation
from fdbd.metrics.comparison import Placements, compare, placements

if TYPE_CHECKING:
    from rich.table import Table

PathLike = str | os.PathLike[str]

METRICS = ("auroc", "fpr95", "aupr_in", "aupr_out")
SHOWN = ("auroc", "fpr95")
"""Metrics of a table, where none are named."""
SMALLER_IS_BETTER = {"fpr95"}
ALL = "average"
"""The group of all OOD sets."""


@dataclass(frozen=True)
class Setting:
    """What the rows have in common."""

    title: str
    notes: tuple[str, ...]
    positive: Literal["id", "ood"]
    num_classes: int
    num_features: int
    num_train: int
    test: tuple[str, int]
    ood: Mapping[str, int]
    groups: Mapping[str, tuple[str, ...]]
    accuracy: float | None
    forward_seconds: float | None

    def members(self, group: str) -> tuple[str, ...]:
        """Names of the OOD sets of a group."""
        return tuple(self.ood) if group == ALL else tuple(self.groups[group])


@dataclass(frozen=True)
class Row:
    """One detector's results; `error` says why there are none."""

    name: str
    paper: Paper | None = None
    fit_seconds: float = math.nan
    evaluations: Mapping[str, Evaluation] = field(default_factory=dict)
    latencies: Sequence[Latency] = ()
    id_scores: Tensor = field(default_factory=lambda: torch.zeros(0))
    ood_scores: Mapping[str, Tensor] = field(default_factory=dict)
    error: str | None = None

    @classmethod
    def failed(cls, name: str, error: str) -> Row:
        return cls(name, error=error)

    def average(self, metric: str, members: Sequence[str]) -> Estimate:
        """Mean over OOD sets. The interval is the mean of the intervals: right if the sets' errors move together, as
        the shared ID samples make them do in part, too wide otherwise."""
        parts = [getattr(self.evaluations[name], metric) for name in members]
        mean = [sum(values) / len(parts) for values in zip(*((float(p), p.low, p.high) for p in parts))]
        return Estimate(*mean)


class Results:
    """Rows in the order they were run, with their common setting.

    ``print(results)`` shows the table; `table` gives it for rich, `to_json`, `to_csv`, `to_markdown`, `to_latex` and
    `to_html` write files, `to_pandas` gives one line a detector and dataset.

    Args:
        setting: what the rows have in common.
        rows: one a detector, each with a name of its own.
        figures: what `fdbd.report.figures` drew from the features, for the HTML report; None: no such figures.
    """

    def __init__(self, setting: Setting, rows: Sequence[Row], figures: Mapping[str, Any] | None = None) -> None:
        self.setting = setting
        self.rows = list(rows)
        self.figures = dict(figures or {})
        self._placements: dict[tuple[str, str], Placements] = {}

    @property
    def finished(self) -> list[Row]:
        """Rows with results."""
        return [row for row in self.rows if row.error is None]

    @property
    def failures(self) -> list[Row]:
        """Rows without."""
        return [row for row in self.rows if row.error is not None]

    def row(self, name: str) -> Row:
        """The row of a detector."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no detector {name!r} in these results; there are {', '.join(row.name for row in self.rows)}")

    @property
    def groups(self) -> list[str]:
        """The named groups, then the average of all where there is more than one set."""
        return [*self.setting.groups, *([ALL] if len(self.setting.ood) > 1 else [])]

    def value(self, row: Row, column: str, metric: str) -> Estimate:
        """A metric of a detector on a dataset or a group."""
        if column in self.setting.ood:
            estimate: Estimate = getattr(row.evaluations[column], metric)
            return estimate
        return row.average(metric, self.setting.members(column))

    def ranked(self, column: str | None = None, metric: str = "auroc") -> list[Row]:
        """Finished rows, best first."""
        column = column or (self.groups[-1] if self.groups else next(iter(self.setting.ood)))
        sign = 1 if metric in SMALLER_IS_BETTER else -1
        return sorted(self.finished, key=lambda row: sign * self.value(row, column, metric))

    def standing(self, column: str, metric: str) -> dict[str, str]:
        """ "best" and "tied" detectors of a column by name.

        Tied in AUROC: DeLong's paired test on the same samples finds no difference from the best at the 5 % level (for
        a group, with the standard errors of its sets averaged, as if their errors moved together). Tied in the other
        metrics: the intervals overlap with the best one's value.
        """
        if not self.finished:
            return {}
        best = self.ranked(column, metric)[0]
        marks = {best.name: "best"}
        members = [column] if column in self.setting.ood else self.setting.members(column)
        for row in self.finished:
            if row.name not in marks and self._tied(row, best, column, members, metric):
                marks[row.name] = "tied"
        return marks

    def _tied(self, row: Row, best: Row, column: str, members: Sequence[str], metric: str) -> bool:
        if metric != "auroc":
            mine = self.value(row, column, metric)
            return mine.low <= float(self.value(best, column, metric)) <= mine.high
        tests = [compare(self._placements_of(row, name), self._placements_of(best, name)) for name in members]
        difference = sum(test.difference for test in tests) / len(tests)
        error = sum(test.standard_error for test in tests) / len(tests)
        return abs(difference) <= 1.96 * error

    def _placements_of(self, row: Row, name: str) -> Placements:
        """A detector's part in DeLong's tests on one set, kept: it is compared in many columns and for every format."""
        key = (row.name, name)
        if key not in self._placements:
            self._placements[key] = placements(row.id_scores, row.ood_scores[name])
        return self._placements[key]

    # ── formats ────────────────────────────────────────────────────────────────────────────────────────────────────

    def table(self, metrics: Sequence[str] = SHOWN, width: int | None = None) -> Table:
        """A table for the terminal, best first; with a `width` in characters, averages alone where sets do not fit."""
        from fdbd.bench.tables import rich_table

        return rich_table(self, metrics, width)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=200)
        console.print(self.table())
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return text

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; scores themselves are left out."""
        return {
            "setting": {
                **asdict(self.setting),
                "test": {"name": self.setting.test[0], "count": self.setting.test[1]},
                "convention": convention(self.setting.positive),
            },
            "machine": machine(),
            "detectors": [self._row_dict(row) for row in self.rows],
        }

    def _row_dict(self, row: Row) -> dict[str, Any]:
        if row.error is not None:
            return {"name": row.name, "error": row.error}
        forward = self.setting.forward_seconds
        return {
            "name": row.name,
            "paper": None if row.paper is None else str(row.paper),
            "fit_seconds": row.fit_seconds,
            "latency": [
                {**timing.to_dict(), "of_forward": None if not forward else timing.median / forward}
                for timing in row.latencies
            ],
            "datasets": {name: evaluation.to_dict() for name, evaluation in row.evaluations.items()},
            "groups": {
                group: {metric: self.value(row, group, metric).to_dict() for metric in METRICS} for group in self.groups
            },
        }

    def to_json(self, path: PathLike) -> Path:
        """Everything but the scores."""
        return _write(path, json.dumps(self.to_dict(), indent=1, allow_nan=True) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """One flat record a detector and dataset or group."""
        found = []
        for row in self.finished:
            for column in [*self.setting.ood, *self.groups]:
                record: dict[str, Any] = {"detector": row.name, "dataset": column}
                for metric in METRICS:
                    estimate = self.value(row, column, metric)
                    record.update(
                        {metric: float(estimate), f"{metric}_low": estimate.low, f"{metric}_high": estimate.high}
                    )
                record["fit_seconds"] = row.fit_seconds
                for timing in row.latencies:
                    record[f"seconds_batch{timing.batch_size}"] = timing.median
                    record[f"seconds_batch{timing.batch_size}_p95"] = timing.p95
                found.append(record)
        return found

    def to_csv(self, path: PathLike) -> Path:
        """`records` as comma-separated values."""
        records = self.records()
        text = io.StringIO()
        writer = csv.DictWriter(text, list(records[0]) if records else ["detector", "dataset"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return _write(path, text.getvalue())

    def to_pandas(self) -> Any:
        """`records` as a DataFrame."""
        from fdbd.util.extras import require

        return require("pandas", "report").DataFrame(self.records())

    def to_markdown(self, path: PathLike | None = None, metrics: Sequence[str] = SHOWN) -> str:
        """The table in Markdown, with its convention and notes; also written to `path` where one is given."""
        from fdbd.bench.tables import markdown

        text = markdown(self, metrics)
        if path is not None:
            _write(path, text)
        return text

    def to_latex(self, path: PathLike | None = None, metrics: Sequence[str] = SHOWN) -> str:
        """The table in LaTeX (booktabs); also written to `path` where one is given."""
        from fdbd.bench.tables import latex

        text = latex(self, metrics)
        if path is not None:
            _write(path, text)
        return text

    def to_html(self, path: PathLike) -> Path:
        """The report, one self-contained page."""
        from fdbd.report import html

        return _write(path, html(self))


def convention(positive: str) -> str:
    """The FPR convention in words."""
    if positive == "id":
        return "FPR95: share of OOD samples accepted when 95 % of ID samples are (ID positive)"
    return "FPR95: share of ID samples flagged when 95 % of OOD samples are (OOD positive, as in OpenOOD)"


def machine() -> dict[str, Any]:
    """What the timings were taken on."""
    from fdbd.util.version import __version__

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fdbd": __version__,
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def _write(path: PathLike, text: str) -> Path:
    from fdbd.util.files import write_text

    return write_text(path, text)
