"""Several results in one: the mean over runs with their standard deviation; and two results side by
side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from fdbd.bench.measures import MEASURES, Spread
from fdbd.bench.rows import Row, Setting
from fdbd.metrics import Comparison, Estimate
from fdbd.metrics.comparison import Influences, compare, standard_error
from fdbd.metrics.evaluation import mean_estimate
from fdbd.metrics.selective import Decisions, augrc_influences, aurc_influences

if TYPE_CHECKING:
    from fdbd.bench.results import Results

# Half the width of a 95 % interval in standard errors.
NORMAL_REACH = 1.959964


def merged(runs: Sequence[Results]) -> Results:
    """The mean over several runs of the same benchmark: see `Results.merge`."""
    from fdbd.bench.results import Results

    if not runs:
        raise ValueError("there are no results to merge")
    first = runs[0]
    if len(runs) == 1 and first.setting.runs > 1:
        return first
    for run in runs:
        if run.setting.runs > 1:
            raise ValueError(
                f"one of the results is a mean over {run.setting.runs} runs, expected single runs: "
                "a mean of means would weigh the runs differently; merge all runs at once"
            )
    for other in runs[1:]:
        _check_alike(first.setting, other.setting)
    rows = [_merged_row(runs, row.name) for row in first.rows]
    return Results(_merged_setting(runs), rows)


def _check_alike(one: Setting, other: Setting) -> None:
    """ValueError unless both are of the same benchmark; their networks may differ."""
    if (one.test, dict(one.ood)) != (other.test, dict(other.ood)):
        raise ValueError(
            f"results of other sets, or sets of other sizes, cannot be merged: one is of "
            f"{one.test[0]} with {', '.join(one.ood)}, another of {other.test[0]} with "
            f"{', '.join(other.ood)}"
        )
    if one.positive != other.positive:
        raise ValueError(
            "the results follow different FPR conventions: run all with the same --positive"
        )
    if dict(one.groups) != dict(other.groups):
        raise ValueError("the results have different groups of OOD sets")


def _merged_setting(runs: Sequence[Results]) -> Setting:
    settings = [run.setting for run in runs]
    notes = list(_distinct(each.notes for each in settings))
    count = len(settings)
    notes.append(
        f"Means over {count} runs ± their standard deviation; intervals are Student's for the mean."
    )
    return replace(
        settings[0],
        notes=tuple(notes),
        warnings=_distinct(each.warnings for each in settings),
        accuracy=_mean_of([setting.accuracy for setting in settings]),
        collapse=_mean_of([setting.collapse for setting in settings]),
        correct=None,
        samples={},
        runs=count,
    )


def _distinct(lists: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Every text that occurs in some lists, once, in the order of first occurrence."""
    found: list[str] = []
    for texts in lists:
        found.extend(texts)
    return tuple(dict.fromkeys(found))


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return sum(known) / len(known)


def _merged_row(runs: Sequence[Results], name: str) -> Row:
    """The row of one detector; a row with an error if it did not finish in every run."""
    rows = []
    for run in runs:
        by_name = {row.name: row for row in run.rows}
        if name not in by_name:
            return Row(name, error="it is not among the detectors of every run")
        if by_name[name].error is not None:
            return by_name[name]
        rows.append(by_name[name])
    tuned = [row.tuned for row in rows if row.tuned]
    chosen = [row.chosen for row in rows if row.chosen]
    return Row(
        name,
        paper=rows[0].paper,
        fit_seconds=sum(row.fit_seconds for row in rows) / len(rows),
        latencies=rows[0].latencies,
        from_bank=any(row.from_bank for row in rows),
        warnings=_distinct(row.warnings for row in rows),
        tuned="; ".join(_distinct([tuned])),
        chosen="; ".join(_distinct([chosen])),
        measured=_merged_measures(runs, rows),
    )


def _merged_measures(
    runs: Sequence[Results], rows: Sequence[Row]
) -> dict[str, dict[str, Estimate]]:
    """The measures that all runs have, by column: OOD sets and their groups, then the test set."""
    first_run = runs[0]
    metrics = _common([run.metrics for run in runs])
    id_metrics = _common([run.id_metrics for run in runs])
    measured = {}
    for column in [*first_run.setting.ood, *first_run.groups]:
        measured[column] = _merged_column(runs, rows, column, metrics)
    if id_metrics:
        test = first_run.setting.test[0]
        measured[test] = _merged_column(runs, rows, test, id_metrics)
    return measured


def _common(lists: Sequence[Sequence[str]]) -> list[str]:
    """The names that are in all lists, in the order of the first."""
    found = []
    for name in lists[0]:
        if all(name in names for names in lists):
            found.append(name)
    return found


def _merged_column(
    runs: Sequence[Results], rows: Sequence[Row], column: str, metrics: Sequence[str]
) -> dict[str, Estimate]:
    found: dict[str, Estimate] = {}
    for metric in metrics:
        values = [float(run.value(row, column, metric)) for run, row in zip(runs, rows)]
        found[metric] = Spread.from_values(values)
    return found


class DetectorComparison(NamedTuple):
    """One detector in two results, over the OOD sets that both have."""

    detector: str
    first: Estimate
    second: Estimate
    comparison: Comparison
    """The second minus the first: positive if the second is better."""
    paired: bool
    """Whether both scored the same samples, so that the errors that they share cancel."""


def compare_results(
    first: Results, second: Results, metric: str = "auroc"
) -> tuple[list[str], list[DetectorComparison]]:
    """The OOD sets that both results have, and a line for each detector that finished in both, the
    second's best first.

    A pair of detectors is compared by a test on the same samples (DeLong's for AUROC) if both files
    hold scores and the keys of their samples agree on all these sets, and as two independent
    results otherwise.
    """
    sets = [name for name in first.setting.ood if name in second.setting.ood]
    if not sets:
        of_first = ", ".join(first.setting.ood)
        of_second = ", ".join(second.setting.ood)
        raise ValueError(f"the results have no OOD set in common: {of_first} against {of_second}")
    is_same = _have_same_samples(first.setting, second.setting, sets)
    rows_of_first = {row.name: row for row in first.finished}
    found = []
    for other in second.finished:
        if other.name in rows_of_first:
            one = rows_of_first[other.name]
            found.append(_compare_rows((first, one), (second, other), sets, metric, is_same))
    if not found:
        raise ValueError("the results have no detector in common")
    found.sort(key=lambda each: each.second, reverse=not MEASURES[metric].smaller_is_better)
    return sets, found


def _have_same_samples(first: Setting, second: Setting, sets: Sequence[str]) -> bool:
    """Whether the keys of all samples are known and equal."""
    keys_of_first = [first.samples.get(name) for name in (first.test[0], *sets)]
    keys_of_second = [second.samples.get(name) for name in (second.test[0], *sets)]
    return None not in keys_of_first and keys_of_first == keys_of_second


def _compare_rows(
    first: tuple[Results, Row],
    second: tuple[Results, Row],
    sets: Sequence[str],
    metric: str,
    is_same: bool,
) -> DetectorComparison:
    one = _mean_on(*first, sets, metric)
    other = _mean_on(*second, sets, metric)
    name = first[1].name
    of_first = _influences(*first, sets, metric)
    of_second = _influences(*second, sets, metric)
    is_paired = is_same and bool(of_first) and bool(of_second)
    if is_paired and metric == "auroc":
        return DetectorComparison(name, one, other, compare(of_second, of_first), True)
    if is_paired:
        differences = []
        for a, b in zip(of_second, of_first):
            differences.append(Influences(a.of_id - b.of_id, a.of_ood - b.of_ood))
        error = standard_error(differences)
    else:
        error = math.hypot(_error_of(one, of_first), _error_of(other, of_second))
    comparison = Comparison.from_difference(float(other) - float(one), error)
    return DetectorComparison(name, one, other, comparison, is_paired)


def _mean_on(results: Results, row: Row, sets: Sequence[str], metric: str) -> Estimate:
    """The mean over the sets, with a joint interval if the scores are known."""
    if row.has_scores or all(name in row.evaluations for name in sets):
        return row.measure_on(sets, metric, results.setting)
    return mean_estimate([results.value(row, name, metric) for name in sets])


def _influences(results: Results, row: Row, sets: Sequence[str], metric: str) -> list[Influences]:
    """What each sample adds to the measure on each set; empty if that is not known."""
    if not row.has_scores:
        return []
    if metric == "auroc":
        return [row.placements[name] for name in sets]
    if metric not in ("aurc", "augrc") or results.setting.correct is None:
        return []
    found = []
    for name in sets:
        decisions = Decisions.from_scores(
            row.id_scores, list(results.setting.correct), row.ood_scores[name]
        )
        if metric == "aurc":
            found.append(aurc_influences(decisions))
        else:
            found.append(augrc_influences(decisions))
    return found


def _error_of(value: Estimate, influences: Sequence[Influences]) -> float:
    """The standard error of a measure: from influences, or from the width of its interval."""
    if influences:
        return standard_error(influences)
    return (value.high - value.low) / 2 / NORMAL_REACH
