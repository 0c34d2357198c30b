"""Images decoded by processes: all rows, in order, whatever a file does to the process that reads
it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from fdbd.core.preprocessing import Preprocess
from fdbd.data.decoding import prepare


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


class Awkward(Sequence):
    """Images of which one is long and narrow, and one takes more memory than there is."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> np.ndarray:
        if row == 2:
            raise MemoryError
        return np.full((1, 3_000_000, 3) if row == 1 else (4, 4, 3), row, np.uint8)


def test_an_image_that_resizing_would_blow_up_is_a_failure_and_costs_no_other_row() -> None:
    [batch] = prepare(Awkward(), Preprocess(32), [range(4)], workers=1)
    assert [failure.row for failure in batch.failures] == [1, 2]
    assert batch.failures[0].reason.startswith(
        "the image has 3000000 × 1 pixels and, resized to a short side of 32,"
    )
    assert batch.failures[1].reason == "there is not enough memory to prepare it"
    assert (batch.inputs[:, 0, 0, 0] * 255).round().tolist() == [0, 3]


def test_efficientnets_crop_of_an_image_one_pixel_high_is_a_pixel() -> None:
    image = np.arange(30, dtype=np.uint8).reshape(1, 10, 3)
    assert (Preprocess(4, crop="tf").fit(image) == image[0, 5]).all()


def test_large_images_in_an_array_are_prepared_a_few_at_a_time(monkeypatch) -> None:
    images = np.random.default_rng(0).integers(0, 255, (7, 6, 6, 3), np.uint8)
    whole = [batch.inputs for batch in prepare(images, Preprocess(4), [range(5), range(5, 7)])]
    monkeypatch.setattr("fdbd.data.decoding.MAX_PIXELS", 2 * 36)
    slices = []

    class Watched:
        shape = images.shape

        def __len__(self) -> int:
            return len(images)

        def __getitem__(self, rows: slice) -> np.ndarray:
            slices.append(rows.stop - rows.start)
            return images[rows]

    parts = [batch.inputs for batch in prepare(Watched(), Preprocess(4), [range(5), range(5, 7)])]
    assert slices == [2, 2, 1, 2]
    assert all(torch.equal(one, other) for one, other in zip(whole, parts))


SLEEPER = """
import os, sys, time
from collections.abc import Sequence
from fdbd.data.decoding import prepare
from fdbd.core.preprocessing import Preprocess

class Sleeper(Sequence):
    def __len__(self):
        return 1
    def __getitem__(self, row):
        print(os.getpid(), flush=True)
        time.sleep(600)

list(prepare(Sleeper(), Preprocess(4), [range(1)], workers=1, processes=True))
"""


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="processes are looked up in Linux's /proc"
)
def test_a_process_that_decodes_apart_leaves_soon_after_a_parent_that_was_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 10
    while is_alive(child):
        assert time.monotonic() < deadline, "the child outlives its parent"
        time.sleep(0.1)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["mean", "std", "scale"])
def test_a_preprocessing_of_numbers_that_are_not_finite_is_refused(field: str, bad: float) -> None:
    values = {field: bad if field == "scale" else (0.5, bad, 0.5)}
    with pytest.raises(ValueError, match="expected finite numbers"):
        Preprocess(8, **values)
