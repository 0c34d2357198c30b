"""Images decoded by processes: all rows, in order, whatever a file does to the process that reads it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import numpy as np
import torch

from fdbd.bench.extraction import prepare
from fdbd.preprocess import Preprocess


class Hostile(Sequence):
    """Images of which two end the process that decodes them."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> np.ndarray:
        if row in (7, 30):
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full((4, 4, 3), row, np.uint8)


def test_a_file_that_crashes_the_decoder_is_a_failure_and_costs_no_other_row() -> None:
    spans = [range(start, start + 5) for start in range(0, 40, 5)]
    found = list(prepare(Hostile(), Preprocess(4), spans, workers=2, processes=True))
    assert [batch.rows for batch in found] == spans
    assert [(failure.row, failure.reason) for batch in found for failure in batch.failures] == [
        (7, "the decoder crashed on it"),
        (30, "the decoder crashed on it"),
    ]
    values = torch.cat([batch.inputs[:, 0, 0, 0] for batch in found]) * 255
    assert values.round().int().tolist() == [row for row in range(40) if row not in (7, 30)]
