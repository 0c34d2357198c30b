"""One row of output for each row of input: what a guard says of a batch, as an Arrow table. Every engine ends here.

`decide_rows(guard, RowBatch(names, inputs, errors), class_names)` gives a `pyarrow.Table` of `schema(names)`:

=========  =======  ====================================================================================
path, row  string,  the image's path below its folder, with bytes that are no UTF-8 escaped; or, where rows
           int64    have no files, their number from 0
label      int64    predicted class; null where the row could not be read
class      string   its name, where names are known
score      double   higher is more in-distribution; −inf where a number was not finite; null if unread
p_value    double   share of calibration scores at or below; null if unread
is_ood     bool     true for every row that could not be read
error      string   why the row could not be read or scored, else null
=========  =======  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Union

import numpy as np
import torch
from torch import Tensor

from fdbd.core.batch import Batch
from fdbd.decision.guard import Guard
from fdbd.util.extras import require

NOT_FINITE = "its features or logits hold NaN or infinity"

Names = Union[range, Sequence[str]]


class RowBatch(NamedTuple):
    """Some rows of the input, in order; those that could not be read are named in `errors`."""

    names: Names
    """Of all rows: a range of row numbers, or paths."""
    inputs: Tensor | Batch
    """Of the readable rows, in order: images ready for the model, or features."""
    errors: Mapping[int, str]
    """Why a row could not be read, by its position in `names`."""


def schema(names: Names) -> Any:
    """The `pyarrow.Schema` of the output: it depends on whether rows have paths or numbers."""
    pa = require("pyarrow", "report")
    key = ("row", pa.int64()) if isinstance(names, range) else ("path", pa.string())
    fields = [("label", pa.int64()), ("class", pa.string()), ("score", pa.float64()), ("p_value", pa.float64())]
    return pa.schema([key, *fields, ("is_ood", pa.bool_()), ("error", pa.string())])


def decide_rows(guard: Guard, batch: RowBatch, class_names: Sequence[str] = ()) -> Any:
    """The guard's decision on every row of the batch as a `pyarrow.Table`, in order; it fails closed row by row."""
    pa = require("pyarrow", "report")
    names, count = batch.names, len(batch.names)
    read = np.ones(count, bool)
    read[list(batch.errors)] = False
    labels, scores, p_values, is_ood = _decide(guard, batch.inputs)
    if len(labels) != read.sum():
        raise ValueError(f"{len(labels)} decisions on {read.sum()} readable rows of {count}")
    is_finite = np.isfinite(scores)
    known = read.copy()
    known[read] = is_finite
    errors: list[str | None] = [None] * count
    for position in np.flatnonzero(read & ~known).tolist():
        errors[position] = NOT_FINITE
    for position, reason in batch.errors.items():
        errors[position] = reason

    def column(values: Any, where: Any, kind: Any) -> Any:
        spread = np.zeros(count, values.dtype)
        spread[read] = values
        return pa.array(spread, kind, mask=None if where.all() else ~where)

    label = column(labels, known, pa.int64())
    classes = _texts(class_names).take(label) if class_names else pa.nulls(count, pa.string())
    decisions = column(is_ood, np.ones(count, bool), pa.bool_())
    if not read.all():
        decisions = pa.array(decisions.to_numpy(zero_copy_only=False) | ~read)
    return pa.Table.from_arrays(
        [
            pa.array(np.arange(names.start, names.stop), pa.int64()) if isinstance(names, range) else _texts(names),
            label,
            classes,
            column(scores, read, pa.float64()),
            column(p_values, read, pa.float64()),
            decisions,
            _texts(errors),
        ],
        schema=schema(names),
    )


def _texts(values: Sequence[str | None]) -> Any:
    """Strings for Arrow, which takes only UTF-8: a file may have any bytes for a name, and those are escaped."""
    pa = require("pyarrow", "report")
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        escaped = [text and text.encode("utf-8", "backslashreplace").decode() for text in values]
        return pa.array(escaped, pa.string())


def _decide(guard: Guard, inputs: Tensor | Batch) -> tuple[Any, ...]:
    """Labels, scores, p-values and decisions as arrays; none for no rows, without asking the model."""
    if not len(inputs.features if isinstance(inputs, Batch) else inputs):
        return np.zeros(0, np.int64), np.zeros(0), np.zeros(0), np.zeros(0, bool)
    with torch.inference_mode():
        decision = guard(inputs)
    return tuple(part.cpu().numpy() for part in (decision.labels, decision.scores, decision.p_values, decision.is_ood))
