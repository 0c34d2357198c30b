"""Training features kept on disk, so that a fit of several passes runs the network only once."""

import os
import pickle
import tempfile
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from typing_extensions import Self

from fdbd.core.batch import Batch

MOST_ROWS = 4096
"""Rows of a batch as it is read back, at most."""


class Spool:
    """Batches written to a temporary file, of at most 4,096 rows each, and read back any number of
    times."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="fdbd-spool-")  # noqa: SIM115 - closed by __exit__
        self._pieces = 0
        self.num_rows = 0

    def append(self, batch: Batch) -> None:
        """Write a batch."""
        batch = batch.detach().cpu()
        self._file.seek(0, os.SEEK_END)
        self.num_rows += len(batch.features)
        for start in range(0, len(batch.features), MOST_ROWS):
            pickle.dump(batch.rows(slice(start, start + MOST_ROWS))._map(Tensor.clone), self._file)
            self._pieces += 1

    def __iter__(self) -> Iterator[Batch]:
        self._file.seek(0)
        for _ in range(self._pieces):
            yield pickle.load(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()
