"""Features in CSV: a column for each, ``features_0`` to ``features_{P−1}``, perhaps with
``logits_0`` … and ``y`` (or ``label``)."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from fdbd.core.batch import Batch
from fdbd.data.columns import CsvFile
from fdbd.data.features import CHUNK_ROWS, FeatureRows, RowBatch, Widths
from fdbd.data.images import cut

_NUMBERED = re.compile(r"(features|logits)_(\d+)")


class CsvFeatures(FeatureRows):
    """Features in a CSV file. A cell that is not a number is an error of its row."""

    is_sequential = True

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._file = CsvFile(path)
        self._len = len(self._file)
        counts = {"features": 0, "logits": 0}
        for column in self._file.columns:
            match = _NUMBERED.fullmatch(column)
            if match is not None:
                counts[match[1]] += 1
        if not counts["features"]:
            raise ValueError(
                f"{path} has no columns features_0, features_1, …; it has "
                f"{', '.join(self._file.columns[:5])}. For "
                "texts, name their column with --text"
            )
        present = ["features"]
        if counts["logits"]:
            present.append("logits")
        for name in ("y", "label"):
            if name in self._file.columns:
                present.append(name)
        self._choose_columns(present)
        self._counts = counts
        for name in ("features", "logits"):
            self._file.require(self._numbered(name), "their count")

    def _numbered(self, name: str) -> list[str]:
        return [f"{name}_{number}" for number in range(self._counts[name])]

    def check(self, widths: Widths, labels: bool = False) -> None:
        self._check_width("features", self._counts["features"], widths)
        if self._counts["logits"]:
            self._check_width("logits", self._counts["logits"], widths)

    def read(self, rows: range, widths: Widths, labels: bool = False) -> Iterator[RowBatch]:
        names = [*self._numbered("features"), *self._numbered("logits")]
        has_label = labels and self._label in self._names
        wanted = [*names, self._label] if has_label else names
        width = self._counts["features"]
        for part in cut(rows, CHUNK_ROWS):
            columns = self._file.read(part, wanted)
            errors: dict[int, str] = {}
            values = np.zeros((len(part), len(names)))
            for number, name in enumerate(names):
                self._fill(values[:, number], columns[number], name, errors)
            true_classes = None
            if has_label:
                true_classes = self._classes(columns[-1], part)
            tensor = torch.from_numpy(values).float()
            batch = Batch(tensor[:, :width], None, true_classes)
            if self._counts["logits"]:
                batch = batch._replace(logits=tensor[:, width:])
            yield RowBatch(part, batch.without(errors), errors)

    def _fill(
        self,
        values: NDArray[np.float64],
        cells: list[str | None],
        name: str,
        errors: dict[int, str],
    ) -> None:
        """The cells of a column as numbers."""
        for place, cell in enumerate(cells):
            try:
                values[place] = float(cell or "")
            except ValueError:
                errors.setdefault(place, f"its {name} is {cell!r}, expected a number")

    def _classes(self, cells: list[str | None], part: range) -> torch.Tensor:
        """True classes; −1 if one is missing."""
        found = []
        for row, cell in zip(part, cells):
            text = cell or "-1"
            try:
                found.append(int(text))
            except ValueError:
                raise ValueError(
                    f"{self.source}, row {row}: its {self._label} is {cell!r}, expected a class "
                    "index"
                ) from None
        return torch.tensor(found, dtype=torch.int64)
