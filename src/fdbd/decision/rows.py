"""A guard's decisions on rows of a file or of a table, as columns. One row for each row of the
input:

- ``path`` (string), below the folder, where bytes that are not UTF-8 are escaped; or ``row``
  (int64), from 0, if the rows are not files;
- ``label`` (int64), the predicted class, and ``class`` (string), its name if the names are known;
  null if the row could not be read;
- ``nearest`` (string), on request: the class behind the nearest decision boundary, by its name or
  else its number;
- ``score`` (double), −inf if a number was not finite, and ``p_value`` (double); null if the row
  could not be read;
- ``is_ood`` (bool), true for every row that could not be read, and ``error`` (string), why it could
  not be read, else null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fdbd.data.features import RowBatch
from fdbd.decision.answers import Decision
from fdbd.decision.guard import Guard
from fdbd.util.extras import require

NOT_FINITE = "its features or logits hold NaN or infinity"
COLUMNS = ("label", "class", "score", "p_value", "is_ood", "error")
"""What every row of decisions has, after ``path`` or ``row``."""
FILE_COLUMNS = (*COLUMNS, "guard")
"""What every row of a file of scores has: ``guard`` (string) is the id of the guard."""
TYPES = {
    "path": "string",
    "row": "int64",
    "label": "int64",
    "class": "string",
    "nearest": "string",
    "score": "double",
    "p_value": "double",
    "is_ood": "bool",
    "error": "string",
    "guard": "string",
    "discovery": "bool",
}
"""The Arrow type of each column."""

Decided = dict[str, Any]
"""Decisions on some rows, in order: arrays by column in the order of the output, masked where a row
has no value."""


def decide_rows(
    guard: Guard, batch: RowBatch, class_names: Sequence[str] = (), nearest: bool = False
) -> Decided:
    """The guard's decision on every row of the batch, in order; it fails closed row by row. With
    `nearest`, also the class behind the nearest decision boundary of each row."""
    count = len(batch.names)
    is_read = np.ones(count, bool)
    is_read[list(batch.errors)] = False

    # A row that cannot be read has no label and no score, and is OOD.
    labels = np.zeros(count, np.int64)
    scores = np.full(count, np.nan)
    p_values = np.full(count, np.nan)
    is_ood = np.ones(count, bool)
    neighbours = np.full(count, -1, np.int64)
    # A model may not take a batch without rows.
    if is_read.any():
        decision, found_neighbours = _ask(guard, batch, nearest)
        if len(decision.labels) != is_read.sum():
            raise ValueError(
                f"{len(decision.labels)} decisions on {is_read.sum()} readable rows of {count}"
            )
        labels[is_read] = decision.labels.cpu().numpy()
        scores[is_read] = decision.scores.cpu().numpy()
        p_values[is_read] = decision.p_values.cpu().numpy()
        is_ood[is_read] = decision.is_ood.cpu().numpy()
        neighbours[is_read] = found_neighbours
    is_unknown = ~np.isfinite(scores)
    is_ood |= is_unknown

    decided: Decided = {}
    if isinstance(batch.names, range):
        decided["row"] = np.array(batch.names)
    else:
        decided["path"] = text_column(batch.names)
    decided["label"] = np.ma.array(labels, mask=is_unknown)
    if class_names:
        decided["class"] = _names_of(labels, is_unknown, class_names)
    else:
        decided["class"] = np.ma.array(text_column([""] * count), mask=True)
    if nearest:
        numbers = [str(number) for number in range(neighbours.max(initial=0) + 1)]
        decided["nearest"] = _names_of(neighbours, neighbours < 0, class_names or numbers)
    decided["score"] = np.ma.array(scores, mask=~is_read)
    decided["p_value"] = np.ma.array(p_values, mask=~is_read)
    decided["is_ood"] = is_ood
    decided["error"] = _error_column(batch, is_unknown)
    return decided


def _ask(guard: Guard, batch: RowBatch, nearest: bool) -> tuple[Decision, NDArray[np.int64]]:
    """The decisions on the readable rows, and the class behind the nearest boundary of each; −1 if
    there is none, or if it was not asked for."""
    with torch.inference_mode():
        if not nearest:
            decision = guard(batch.inputs)
            return decision, np.full(len(decision.labels), -1, np.int64)
        explanation = guard.explain(batch.inputs)
    decision = explanation.decision
    has_boundary = torch.isfinite(explanation.nearest_distance) & torch.isfinite(decision.scores)
    neighbours = torch.where(has_boundary, explanation.nearest, -1)
    return decision, neighbours.cpu().numpy()


def _names_of(numbers: NDArray[np.int64], absent: NDArray[np.bool_], names: Sequence[str]) -> Any:
    """The names of these numbers, masked where `absent`."""
    texts = text_column(names)
    return np.ma.array(texts[np.where(absent, 0, numbers)], mask=absent)


def _error_column(batch: RowBatch, is_unknown: NDArray[np.bool_]) -> Any:
    """Why each row could not be read or scored, masked if it could."""
    errors = np.ma.array(np.empty(len(batch.names), object), mask=True)
    for place in np.flatnonzero(is_unknown).tolist():
        errors[place] = as_utf8(batch.errors.get(place, NOT_FINITE))
    return errors


def to_arrow(decided: Decided, types: Mapping[str, str] = TYPES) -> Any:
    """Decisions as a `pyarrow.Table`; `types` are the Arrow types of its columns by name."""
    pa = require("pyarrow", "report")
    columns = []
    for name, column in decided.items():
        kind = pa.type_for_alias(types[name])
        columns.append(pa.array(np.ma.getdata(column), kind, mask=np.ma.getmaskarray(column)))
    return pa.table(columns, names=list(decided))


def text_column(values: Sequence[Any]) -> NDArray[np.object_]:
    """(N,) texts, which are all valid UTF-8."""
    array = np.empty(len(values), object)
    array[:] = [as_utf8(str(value)) for value in values]
    return array


def as_utf8(text: str) -> str:
    """The text, with bytes that are not UTF-8 escaped: a file may have any bytes for a name."""
    return text.encode("utf-8", "backslashreplace").decode()
