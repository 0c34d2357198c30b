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
- ``ood_share`` (double), of a guard of maps: the share of the positions that are OOD; score,
  p-value and ``is_ood`` are then those of the image as a whole, and the label is the class of the
  most positions;
- ``is_ood`` (bool), true for every row that could not be read, and ``error`` (string), why it could
  not be read, else null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fdbd.data.features import RowBatch
from fdbd.decision.answers import Decision
from fdbd.decision.guard import Guard
from fdbd.decision.maps import MapDecision
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
    "ood_share": "double",
    "is_ood": "bool",
    "error": "string",
    "guard": "string",
    "discovery": "bool",
}
"""The Arrow type of each column."""

Decided = dict[str, Any]
"""Decisions on some rows, in order: arrays by column in the order of the output, masked where a row
has no value."""


class MapRows(NamedTuple):
    """Decisions on images by a guard of maps."""

    decided: Decided
    decision: MapDecision | None
    """The decision on the readable images, in order; None if there are none."""


def decide_rows(
    guard: Guard, batch: RowBatch, class_names: Sequence[str] = (), nearest: bool = False
) -> Decided:
    """The guard's decision on every row of the batch, in order; it fails closed row by row. With
    `nearest`, also the class behind the nearest decision boundary of each row."""
    rows = _Rows.unread(batch)
    neighbours = np.full(len(batch.names), -1, np.int64)
    # A model may not take a batch without rows.
    if rows.is_read.any():
        decision, found_neighbours = _ask(guard, batch, nearest)
        rows.fill(decision.labels, decision.scores, decision.p_values, decision.is_ood)
        neighbours[rows.is_read] = found_neighbours
    decided = rows.columns(batch, class_names)
    if not nearest:
        return decided
    if not class_names:
        class_names = [str(number) for number in range(neighbours.max(initial=0) + 1)]
    names = _names_of(neighbours, neighbours < 0, class_names)
    return _inserted(decided, "class", "nearest", names)


def decide_map_rows(guard: Guard, batch: RowBatch, class_names: Sequence[str] = ()) -> MapRows:
    """The decisions of a guard of maps, in order: each row is the decision on an image as a
    whole."""
    rows = _Rows.unread(batch)
    shares = np.full(len(batch.names), np.nan)
    decision = None
    if rows.is_read.any():
        with torch.inference_mode():
            decision = guard(batch.inputs)
        if not isinstance(decision, MapDecision):
            raise ValueError("the model gave one prediction per image, expected maps")
        rows.fill(
            decision.image_labels(),
            decision.image_scores,
            decision.image_p_values,
            decision.image_is_ood,
        )
        shares[rows.is_read] = decision.ood_share.cpu().numpy()
    decided = rows.columns(batch, class_names)
    column = np.ma.array(shares, mask=~rows.is_read)
    return MapRows(_inserted(decided, "p_value", "ood_share", column), decision)


class _Rows(NamedTuple):
    """Decisions as they are filled in. A row that cannot be read has no label and no score, and is
    OOD."""

    is_read: NDArray[np.bool_]
    labels: NDArray[np.int64]
    scores: NDArray[np.float64]
    p_values: NDArray[np.float64]
    is_ood: NDArray[np.bool_]

    @classmethod
    def unread(cls, batch: RowBatch) -> _Rows:
        count = len(batch.names)
        is_read = np.ones(count, bool)
        is_read[list(batch.errors)] = False
        labels = np.zeros(count, np.int64)
        scores = np.full(count, np.nan)
        p_values = np.full(count, np.nan)
        is_ood = np.ones(count, bool)
        return cls(is_read, labels, scores, p_values, is_ood)

    def fill(self, labels: Tensor, scores: Tensor, p_values: Tensor, is_ood: Tensor) -> None:
        """Write the decisions on the readable rows."""
        if len(labels) != self.is_read.sum():
            raise ValueError(
                f"{len(labels)} decisions on {self.is_read.sum()} readable rows of "
                f"{len(self.is_read)}"
            )
        self.labels[self.is_read] = labels.cpu().numpy()
        self.scores[self.is_read] = scores.cpu().numpy()
        self.p_values[self.is_read] = p_values.cpu().numpy()
        self.is_ood[self.is_read] = is_ood.cpu().numpy()

    def columns(self, batch: RowBatch, class_names: Sequence[str]) -> Decided:
        """The columns that every file of scores has."""
        is_unknown = ~np.isfinite(self.scores)
        decided: Decided = {}
        if isinstance(batch.names, range):
            decided["row"] = np.array(batch.names)
        else:
            decided["path"] = text_column(batch.names)
        decided["label"] = np.ma.array(self.labels, mask=is_unknown)
        if class_names:
            decided["class"] = _names_of(self.labels, is_unknown, class_names)
        else:
            decided["class"] = np.ma.array(np.full(len(batch.names), "", object), mask=True)
        decided["score"] = np.ma.array(self.scores, mask=~self.is_read)
        decided["p_value"] = np.ma.array(self.p_values, mask=~self.is_read)
        decided["is_ood"] = self.is_ood | is_unknown
        decided["error"] = _error_column(batch, is_unknown)
        return decided


def _inserted(decided: Decided, after: str, name: str, column: Any) -> Decided:
    """The columns with one more, which follows the column `after`."""
    columns: Decided = {}
    for each, values in decided.items():
        columns[each] = values
        if each == after:
            columns[name] = column
    return columns


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
