"""Results: the rows of a benchmark, what can be asked of them, and the files they are written
to."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from fdbd.bench.measures import MEASURES, METRICS, Spread, available, available_on_id
from fdbd.bench.rows import ALL, Row, Setting, machine
from fdbd.bench.text import SHOWN, latex, markdown, rich_table
from fdbd.metrics import Comparison, Estimate
from fdbd.metrics.comparison import compare
from fdbd.util.extras import require
from fdbd.util.files import write_text
from fdbd.util.terminal import one_line

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.table import Table

PathLike = str | os.PathLike[str]
Figures = Mapping[str, object]


class Results:
    """What `Benchmark.run` returns: rows in the order they were run, with their common setting.

    ``print(results)`` shows the table; `table` gives it for rich, `to_json`, `to_csv`,
    `to_markdown`, `to_latex` and `to_html` write files, `from_json` reads one, `to_pandas` gives
    one line per detector and dataset, `compare` tells whether two detectors differ, and `merge`
    makes one table of several runs.

    Args:
        setting: what all rows have in common.
        rows: one row per detector, each with a name of its own.
        figures: the figures of the HTML report that are drawn from features; or a function that
            draws them, which is called when a page or a file first asks for them; None: no such
            figures.

    >>> from fdbd.bench import load_bundle
    >>> results = load_bundle("cifar10-ce").run(["fdbd", "msp"], latency=False)
    >>> results.value(results.row("fdbd"), "average", "auroc")
    Estimate(0.92..., low=0.92..., high=0.93...)
    >>> results.compare("fdbd", "msp").verdict()
    'higher'
    """

    def __init__(
        self,
        setting: Setting,
        rows: Sequence[Row],
        figures: Figures | Callable[[], Figures] | None = None,
    ) -> None:
        self.setting = setting
        self.rows = list(rows)
        self._figures = figures
        self._values: dict[tuple[str, str, str], Estimate] = {}

    @property
    def figures(self) -> dict[str, object]:
        """The figures that are drawn from features, by name."""
        if self._figures is None:
            return {}
        if callable(self._figures):
            self._figures = self._figures()
        return dict(self._figures)

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
        by_name = {row.name: row for row in self.rows}
        if name not in by_name:
            raise KeyError(f"no detector {name!r} in these results; there are {', '.join(by_name)}")
        return by_name[name]

    @property
    def groups(self) -> list[str]:
        """The named groups, then the average of all if there is more than one set."""
        names = list(self.setting.groups)
        if len(self.setting.ood) > 1:
            names.append(ALL)
        return names

    @property
    def main_column(self) -> str:
        """The column that detectors are ranked by: the average, or the only OOD set."""
        if len(self.setting.ood) > 1:
            return ALL
        return next(iter(self.setting.ood))

    @property
    def metrics(self) -> list[str]:
        """Metrics per OOD set that these results have."""
        if any(row.has_scores for row in self.finished):
            return available(self._can_be_right, bool(self.setting.shifted))
        known = set(METRICS)
        for row in self.finished:
            for values in row.measured.values():
                known |= set(values)
        return [name for name, each in MEASURES.items() if name in known and not each.of_id_alone]

    @property
    def id_metrics(self) -> list[str]:
        """Metrics of the ID samples alone that these results have."""
        if any(row.has_scores for row in self.finished):
            return available_on_id(self._can_be_right)
        known: set[str] = set()
        for row in self.finished:
            known |= set(row.measured.get(self.setting.test[0], {}))
        return [name for name, each in MEASURES.items() if name in known and each.of_id_alone]

    @property
    def _can_be_right(self) -> bool:
        """Whether it is known which predictions are right, and some are: else there is nothing that
        a score should accept."""
        return self.setting.correct is not None and any(self.setting.correct)

    @property
    def batch_sizes(self) -> list[int]:
        """Batch sizes at which scores were timed."""
        sizes = set()
        for row in self.finished:
            for timing in row.latencies:
                sizes.add(timing.batch_size)
        return sorted(sizes)

    def members(self, column: str) -> tuple[str, ...]:
        """The OOD sets behind a column: itself, or those of a group."""
        if column in self.setting.ood:
            return (column,)
        if column == ALL:
            return tuple(self.setting.ood)
        return self.setting.groups[column]

    def value(self, row: Row, column: str, metric: str) -> Estimate:
        """A metric of a detector on an OOD set; its mean over a group, with a joint interval; or,
        for a metric of ID samples alone, its value on the ID set, which is the column then."""
        measured = row.measured.get(column, {}).get(metric)
        if measured is not None:
            return measured
        key = (row.name, column, metric)
        if key not in self._values:
            if MEASURES[metric].of_id_alone:
                self._values[key] = row.measure_on_id(metric, self.setting)
            elif column in self.setting.ood and metric in METRICS:
                self._values[key] = getattr(row.evaluations[column], metric)
            else:
                self._values[key] = row.measure_on(self.members(column), metric, self.setting)
        return self._values[key]

    def ranked(self, column: str | None = None, metric: str = "auroc") -> list[Row]:
        """Finished rows, best first."""
        chosen = column or self.main_column

        def badness(row: Row) -> float:
            value = float(self.value(row, chosen, metric))
            return value if MEASURES[metric].smaller_is_better else -value

        return sorted(self.finished, key=badness)

    def compare(self, first: str, second: str, column: str | None = None) -> Comparison:
        """The difference in AUROC of two detectors on an OOD set or a group (default: all sets), by
        DeLong's paired test on the samples that both scored; ``.verdict()`` says which is higher,
        or "undecided"."""
        members = self.members(column or self.main_column)
        of_first = [self.row(first).placements[member] for member in members]
        of_second = [self.row(second).placements[member] for member in members]
        return compare(of_first, of_second)

    def standing(self, column: str, metric: str) -> dict[str, str]:
        """ "best" and "tied" detectors of a column by name.

        Tied in AUROC: `compare` with the best is undecided at the 5 % level. Tied in the other
        metrics, and if the scores are not known: the interval holds the best one's value.
        """
        ranked = self.ranked(column, metric)
        if not ranked:
            return {}
        best = ranked[0]
        marks = {best.name: "best"}
        for row in ranked[1:]:
            if self._is_tied(row, best, column, metric):
                marks[row.name] = "tied"
        return marks

    def _is_tied(self, row: Row, best: Row, column: str, metric: str) -> bool:
        if metric == "auroc" and row.has_scores and best.has_scores:
            return self.compare(row.name, best.name, column).verdict() == "undecided"
        value = self.value(row, column, metric)
        return value.low <= float(self.value(best, column, metric)) <= value.high

    def table(
        self, metrics: Sequence[str] = SHOWN, width: int | None = None, top: int | None = None
    ) -> Table:
        """A table for the terminal, best first. With a `width` in characters, the columns that fit;
        its caption names those that do not. With `top`, only that many detectors and fDBD, and a
        short caption."""
        return rich_table(self, metrics, width, top)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=200).print(self.table(width=200))
        return text.getvalue()

    @classmethod
    def merge(cls, runs: Sequence[Results]) -> Results:
        """One table of several runs of the same benchmark, such as networks trained from other
        seeds: each number is the mean over the runs, with their standard deviation.

        The runs have the same sets, groups and convention; detectors that are missing or failed in
        one of them are rows with that reason.
        """
        from fdbd.bench.merging import merged

        return merged(runs)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON, without the scores."""
        return self._plain_values()

    def _plain_values(self) -> dict[str, Any]:
        detectors = []
        for row in self.rows:
            entry = row.to_dict(self.setting)
            if row.error is None:
                entry["groups"] = {name: self._measures_of(row, name) for name in self.groups}
                entry["measured"] = self._further_measures(row)
            detectors.append(entry)
        return {"setting": self.setting.to_dict(), "machine": machine(), "detectors": detectors}

    def _measures_of(self, row: Row, column: str) -> dict[str, dict[str, float]]:
        return {metric: self.value(row, column, metric).to_dict() for metric in self.metrics}

    def _further_measures(self, row: Row) -> dict[str, Any]:
        """Measures that stand neither among the groups nor in an Evaluation: those of the ID set,
        and of each OOD set those beyond the usual four."""
        found: dict[str, Any] = {}
        test = self.setting.test[0]
        if self.id_metrics:
            found[test] = {
                metric: self.value(row, test, metric).to_dict() for metric in self.id_metrics
            }
        for name in self.setting.ood:
            values = self._measures_of(row, name)
            if name in row.evaluations:
                values = {key: value for key, value in values.items() if key not in METRICS}
            if values:
                found[name] = values
        return found

    def to_json(self, path: PathLike) -> Path:
        """Everything, with the scores of each sample (about 5 bytes each), so that results can be
        compared in pairs."""
        values = self._plain_values()
        for entry, row in zip(values["detectors"], self.rows):
            if row.has_scores:
                entry["scores"] = row.scores_to_dict()
        values["figures"] = self.figures
        return write_text(path, json.dumps(values, indent=1, allow_nan=True) + "\n")

    @classmethod
    def from_json(cls, path: PathLike) -> Self:
        """Results that `to_json` wrote, by this version or an earlier one (0.1.0 kept no
        scores)."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            setting = Setting.from_dict(values["setting"])
            rows = [Row.from_dict(entry) for entry in values["detectors"]]
            _check(setting, rows)
            return cls(setting, rows, values.get("figures"))
        except (
            KeyError,
            TypeError,
            ValueError,
            OverflowError,
            AttributeError,
            RecursionError,
        ) as error:
            reason = f"{type(error).__name__}: {one_line(error)}"[:200]
            raise ValueError(
                f"{str(path)!r} is not a results.json of `fdbd bench` ({reason})"
            ) from None

    def records(self) -> list[dict[str, object]]:
        """One flat record per detector and OOD set or group."""
        found = []
        for row in self.finished:
            for column in [*self.setting.ood, *self.groups]:
                found.append(self._record(row, column))
        return found

    def _record(self, row: Row, column: str) -> dict[str, object]:
        record: dict[str, object] = {"detector": row.name, "dataset": column}
        for metric in self.metrics:
            _add_estimate(record, metric, self.value(row, column, metric))
        for metric in self.id_metrics:
            _add_estimate(record, metric, self.value(row, self.setting.test[0], metric))
        record["fit_seconds"] = row.fit_seconds
        record["from_bank"] = row.from_bank
        for timing in row.latencies:
            start = f"seconds_batch{timing.batch_size}"
            record[start] = timing.median
            record[f"{start}_low"] = timing.low
            record[f"{start}_high"] = timing.high
            record[f"{start}_p95"] = timing.p95
        return record

    def to_csv(self, path: PathLike) -> Path:
        """`records` as comma-separated values."""
        records = self.records()
        columns = ["detector", "dataset"]
        if records:
            columns = list(records[0])
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(records)
        return write_text(path, text.getvalue())

    def to_pandas(self) -> DataFrame:
        """`records` as a DataFrame."""
        return require("pandas", "report").DataFrame(self.records())

    def to_markdown(self, path: PathLike | None = None, metrics: Sequence[str] = SHOWN) -> str:
        """The table in Markdown, with its convention and notes; also written to `path` if one is
        given."""
        text = markdown(self, metrics)
        if path is not None:
            write_text(path, text)
        return text

    def to_latex(self, path: PathLike | None = None, metrics: Sequence[str] = SHOWN) -> str:
        """The table in LaTeX (booktabs), in pieces that fit a page; also written to `path` if one
        is given."""
        text = latex(self, metrics)
        if path is not None:
            write_text(path, text)
        return text

    def to_html(self, path: PathLike) -> Path:
        """The report, one self-contained page."""
        from fdbd.bench.page import html

        return write_text(path, html(self))


def _add_estimate(record: dict[str, object], metric: str, value: Estimate) -> None:
    record[metric] = float(value)
    record[f"{metric}_low"] = value.low
    record[f"{metric}_high"] = value.high
    if isinstance(value, Spread):
        record[f"{metric}_std"] = value.std


def _check(setting: Setting, rows: Sequence[Row]) -> None:
    """ValueError if rows and setting, which come from a file, do not belong together."""
    if setting.positive not in ("id", "ood"):
        raise ValueError(f"'positive' is {setting.positive!r}, expected 'id' or 'ood'")
    if len({row.name for row in rows}) < len(rows):
        raise ValueError("two detectors have the same name")
    for group, members in setting.groups.items():
        unknown = [name for name in members if name not in setting.ood]
        if unknown:
            raise ValueError(f"the group {group!r} names {unknown[0]!r}, which is not an OOD set")
    count = setting.test[1]
    if setting.correct is not None and len(setting.correct) != count:
        raise ValueError(
            f"{len(setting.correct)} predictions are marked as right or wrong, not {count}"
        )
    for row in rows:
        if row.error is not None:
            continue
        if setting.runs == 1 and not set(setting.ood) <= set(row.evaluations):
            raise ValueError(f"{row.name} was not evaluated on every OOD set")
        if row.has_scores and not _has_scores_of(row, setting):
            raise ValueError(f"the scores of {row.name} are not those of the sets")


def _has_scores_of(row: Row, setting: Setting) -> bool:
    """Whether a row has one score per sample of each set."""
    ood_sizes = {name: len(scores) for name, scores in row.ood_scores.items()}
    shifted_sizes = {name: len(scores) for name, scores in row.shifted_scores.items()}
    return (
        len(row.id_scores) == setting.test[1]
        and ood_sizes == dict(setting.ood)
        and shifted_sizes == dict(setting.shifted)
    )
