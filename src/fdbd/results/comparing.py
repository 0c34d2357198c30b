"""Two results side by side: each detector's AUROC in both, paired where the samples are the same."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fdbd.metrics import Comparison, Estimate
from fdbd.metrics.comparison import compare, standard_error
from fdbd.results.rows import Row
from fdbd.results.table import ResultTable


@dataclass(frozen=True)
class Compared:
    """One detector in two results, over the OOD sets that both have."""

    detector: str
    first: Estimate
    second: Estimate
    comparison: Comparison
    """Of the second with the first: positive where the second is better."""
    paired: bool
    """Whether both scored the same samples, so that the errors that they share cancel."""


def compare_results(first: ResultTable, second: ResultTable) -> tuple[list[str], list[Compared]]:
    """The OOD sets that both results have, and a line for each detector that finished in both, the second's best first.

    A pair of detectors is compared by DeLong's test on the same samples where both files hold scores and the keys of
    their samples agree on all these sets, and as two independent results elsewhere.
    """
    sets = [name for name in first.setting.ood if name in second.setting.ood]
    if not sets:
        names = [", ".join(table.setting.ood) for table in (first, second)]
        raise ValueError(f"the results have no OOD set in common: {names[0]} against {names[1]}")
    if first.setting.positive != second.setting.positive:
        raise ValueError("the results follow different FPR conventions: run both with the same --positive")
    keys = [[table.setting.samples.get(name) for name in (table.setting.test[0], *sets)] for table in (first, second)]
    agree = None not in keys[0] and keys[0] == keys[1]
    mine = {row.name: row for row in first.finished}
    found = [_compared(mine[row.name], row, sets, agree) for row in second.finished if row.name in mine]
    if not found:
        raise ValueError("the results have no detector in common")
    return sets, sorted(found, key=lambda each: -each.second)


def _compared(first: Row, second: Row, sets: list[str], agree: bool) -> Compared:
    one, other = first.average(sets, "auroc"), second.average(sets, "auroc")
    paired = agree and first.has_scores and second.has_scores
    if paired:
        comparison = compare(*([row.placements[name] for name in sets] for row in (second, first)))
    else:
        error = math.hypot(_error(first, one, sets), _error(second, other, sets))
        comparison = Comparison.of(float(other) - float(one), error)
    return Compared(second.name, one, other, comparison, paired)


def _error(row: Row, value: Estimate, sets: list[str]) -> float:
    if row.has_scores:
        return standard_error([row.placements[name] for name in sets])
    return (value.high - value.low) / 2 / 1.96
