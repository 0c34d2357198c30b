"""ResultTable: the rows of a benchmark with what can be asked of them, and every format that needs
no report."""

import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import Self

from fdbd.bench.rows import ALL, METRICS, SMALLER_IS_BETTER, Row, Setting, machine
from fdbd.bench.text import SHOWN, latex, markdown, rich_table
from fdbd.metrics import Comparison, Estimate
from fdbd.metrics.comparison import compare, standard_error
from fdbd.util.extras import require
from fdbd.util.files import write_text

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.table import Table

PathLike = str | os.PathLike[str]


class ResultTable:
    """Rows in the order they were run, with their common setting.

    Args:
        setting, rows: one row per detector, each with a name of its own, and what they have in
            common.
        figures: what `fdbd.bench.figures` drew from the features, for the HTML report; None: no
            such figures.

    >>> from fdbd.bench import load_bundle
    >>> results = load_bundle("cifar10-ce").run(["fdbd", "msp"], latency=False)
    >>> results.value(results.row("fdbd"), "average", "auroc")
    Estimate(0.92..., low=0.92..., high=0.93...)
    """

    def __init__(
        self, setting: Setting, rows: Sequence[Row], figures: Mapping[str, object] | None = None
    ) -> None:
        self.setting = setting
        self.rows = list(rows)
        self.figures = dict(figures or {})
        self._averages: dict[tuple[str, str, str], Estimate] = {}

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
        """The named groups, then the average of all where there is more than one set."""
        return [*self.setting.groups, *([ALL] if len(self.setting.ood) > 1 else [])]

    @property
    def main_column(self) -> str:
        """The column that detectors are ranked by: the average, or the only OOD set."""
        return ALL if ALL in self.groups else next(iter(self.setting.ood))

    @property
    def batch_sizes(self) -> list[int]:
        """Batch sizes at which scores were timed."""
        return sorted({timing.batch_size for row in self.finished for timing in row.latencies})

    def members(self, column: str) -> tuple[str, ...]:
        """The OOD sets behind a column: itself, or those of a group."""
        if column in self.setting.ood:
            return (column,)
        return tuple(self.setting.ood) if column == ALL else self.setting.groups[column]

    def value(self, row: Row, column: str, metric: str) -> Estimate:
        """A metric of a detector on an OOD set, or its mean over a group with a joint interval."""
        if column in self.setting.ood:
            estimate: Estimate = getattr(row.evaluations[column], metric)
            return estimate
        if not row.has_scores and metric in row.averages.get(column, {}):
            return row.averages[column][metric]
        key = (row.name, column, metric)
        if key not in self._averages:
            self._averages[key] = row.average(self.members(column), metric)
        return self._averages[key]

    def ranked(self, column: str | None = None, metric: str = "auroc") -> list[Row]:
        """Finished rows, best first."""
        sign = 1 if metric in SMALLER_IS_BETTER else -1
        return sorted(
            self.finished,
            key=lambda row: sign * self.value(row, column or self.main_column, metric),
        )

    def compare(self, first: str, second: str, column: str | None = None) -> Comparison:
        """The difference in AUROC of two detectors on an OOD set or a group (default: all sets), by
        DeLong's paired test on the samples that both scored; ``.verdict()`` says which is higher,
        or "undecided"."""
        members, rows = (
            self.members(column or self.main_column),
            (self.row(first), self.row(second)),
        )
        return compare(*([row.placements[member] for member in members] for row in rows))

    def standing(self, column: str, metric: str) -> dict[str, str]:
        """ "best" and "tied" detectors of a column by name.

        Tied in AUROC: `compare` with the best is undecided at the 5 % level. Tied in the other
        metrics, and where the scores are not known: the interval holds the best one's value.
        """
        ranked = self.ranked(column, metric)
        marks = {row.name: "best" for row in ranked[:1]}
        for row in ranked[1:]:
            if metric == "auroc" and row.has_scores and ranked[0].has_scores:
                is_tied = self.compare(row.name, ranked[0].name, column).verdict() == "undecided"
            else:
                mine = self.value(row, column, metric)
                is_tied = mine.low <= float(self.value(ranked[0], column, metric)) <= mine.high
            if is_tied:
                marks[row.name] = "tied"
        return marks

    def table(
        self, metrics: Sequence[str] = SHOWN, width: int | None = None, top: int | None = None
    ) -> "Table":
        """A table for the terminal, best first. With a `width` in characters, the columns that fit;
        its caption names those that do not. With `top`, only that many detectors and fDBD, and a
        short caption."""
        return rich_table(self, metrics, width, top)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=200).print(self.table(width=200))
        return text.getvalue()

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON, without the scores."""
        detectors = [row.to_dict(self.setting) for row in self.rows]
        for entry, row in zip(detectors, self.rows):
            if row.error is None:
                entry["groups"] = {
                    group: {metric: self.value(row, group, metric).to_dict() for metric in METRICS}
                    for group in self.groups
                }
        return {"setting": self.setting.to_dict(), "machine": machine(), "detectors": detectors}

    def to_json(self, path: PathLike) -> Path:
        """Everything, with the scores of each sample (about 5 bytes each), so that results can be
        compared in pairs."""
        values: dict[str, Any] = self.to_dict()
        for entry, row in zip(values["detectors"], self.rows):
            if row.has_scores:
                entry["scores"] = row.scores_to_dict()
        values["figures"] = self.figures
        return write_text(path, json.dumps(values, indent=1, allow_nan=True) + "\n")

    @classmethod
    def from_json(cls, path: PathLike) -> Self:
        """Results that `to_json` wrote, by this version or by 0.1.0 (which kept no scores)."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            rows = [Row.from_dict(entry) for entry in values["detectors"]]
            setting = Setting.from_dict(values["setting"])
            if setting.positive not in ("id", "ood"):
                raise ValueError(f"'positive' is {setting.positive!r}, expected 'id' or 'ood'")
            if len({row.name for row in rows}) < len(rows):
                raise ValueError("two detectors have the same name")
            for row in rows:
                if row.error is None and not set(setting.ood) <= set(row.evaluations):
                    raise ValueError(f"{row.name} was not evaluated on every OOD set")
                sizes = {setting.test[0]: len(row.id_scores)} | {
                    k: len(part) for k, part in row.ood_scores.items()
                }
                if row.has_scores and sizes != dict([setting.test, *setting.ood.items()]):
                    raise ValueError(f"the scores of {row.name} are not those of the sets")
            return cls(setting, rows, values.get("figures"))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise ValueError(
                f"{str(path)!r} is not a results.json of `fdbd bench` ({reason})"
            ) from None

    def records(self) -> list[dict[str, object]]:
        """One flat record per detector and OOD set or group."""
        found = []
        for row in self.finished:
            for column in [*self.setting.ood, *self.groups]:
                record: dict[str, object] = {"detector": row.name, "dataset": column}
                for metric in METRICS:
                    estimate = self.value(row, column, metric)
                    record |= {
                        metric: float(estimate),
                        f"{metric}_low": estimate.low,
                        f"{metric}_high": estimate.high,
                    }
                record |= {"fit_seconds": row.fit_seconds, "from_bank": row.from_bank}
                for timing in row.latencies:
                    times = {
                        "": timing.median,
                        "_low": timing.low,
                        "_high": timing.high,
                        "_p95": timing.p95,
                    }
                    record |= {
                        f"seconds_batch{timing.batch_size}{end}": value
                        for end, value in times.items()
                    }
                found.append(record)
        return found

    def to_csv(self, path: PathLike) -> Path:
        """`records` as comma-separated values."""
        records, text = self.records(), io.StringIO()
        writer = csv.DictWriter(
            text, list(records[0]) if records else ["detector", "dataset"], lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(records)
        return write_text(path, text.getvalue())

    def to_pandas(self) -> "DataFrame":
        """`records` as a DataFrame."""
        return require("pandas", "report").DataFrame(self.records())

    def to_markdown(self, path: PathLike | None = None, metrics: Sequence[str] = SHOWN) -> str:
        """The table in Markdown, with its convention and notes; also written to `path` where one is
        given."""
        return _kept(markdown(self, metrics), path)

    def to_latex(self, path: PathLike | None = None, metrics: Sequence[str] = SHOWN) -> str:
        """The table in LaTeX (booktabs), in pieces that fit a page; also written to `path` where
        one is given."""
        return _kept(latex(self, metrics), path)


class Compared(NamedTuple):
    """One detector in two results, over the OOD sets that both have."""

    detector: str
    first: Estimate
    second: Estimate
    comparison: Comparison  #: of the second with the first: positive where the second is better
    paired: bool  #: whether both scored the same samples, so that the errors that they share cancel


def compare_results(first: ResultTable, second: ResultTable) -> tuple[list[str], list[Compared]]:
    """The OOD sets that both results have, and a line for each detector that finished in both, the
    second's best first.

    A pair of detectors is compared by DeLong's test on the same samples where both files hold
    scores and the keys of their samples agree on all these sets, and as two independent results
    elsewhere.
    """
    sets = [name for name in first.setting.ood if name in second.setting.ood]
    if not sets:
        names = [", ".join(table.setting.ood) for table in (first, second)]
        raise ValueError(f"the results have no OOD set in common: {names[0]} against {names[1]}")
    if first.setting.positive != second.setting.positive:
        raise ValueError(
            "the results follow different FPR conventions: run both with the same --positive"
        )
    keys = [
        [table.setting.samples.get(name) for name in (table.setting.test[0], *sets)]
        for table in (first, second)
    ]
    is_same = None not in keys[0] and keys[0] == keys[1]
    found, mine = [], {row.name: row for row in first.finished}
    for row in second.finished:
        if row.name in mine:
            pair = mine[row.name], row
            one, other = values = [each.average(sets, "auroc") for each in pair]
            influences = [
                [each.placements[name] for name in sets] if each.has_scores else [] for each in pair
            ]
            if paired := is_same and all(influences):
                comparison = compare(*reversed(influences))
            else:
                known = ((value.high - value.low) / 2 / 1.96 for value in values)
                errors = (
                    standard_error(part) if part else wide for part, wide in zip(influences, known)
                )
                comparison = Comparison.of(float(other) - float(one), math.hypot(*errors))
            found.append(Compared(row.name, one, other, comparison, paired))
    if not found:
        raise ValueError("the results have no detector in common")
    return sets, sorted(found, key=lambda each: -each.second)


def _kept(text: str, path: PathLike | None) -> str:
    if path is not None:
        write_text(path, text)
    return text
