"""Images decoded by processes: all rows, in order, whatever a file does to the process that reads
it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fdbd.core.preprocessing import Preprocess
from fdbd.data.decoding import DecodersCannotStart, prepare

# Decoding processes import what they decode, so these classes stand in a module of their own.
IMAGES_OF_A_USER = """
import os, signal, sys, threading
from collections.abc import Sequence

import numpy as np


class Hostile(Sequence):
    'Images of which two end the process that decodes them.'

    def __len__(self):
        return 40

    def __getitem__(self, row):
        if row in (7, 30):
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full((4, 4, 3), row, np.uint8)


class Unstartable(Hostile):
    'Images that end every process that only hears of them.'

    def __setstate__(self, state):
        os._exit(3)

    def __getstate__(self):
        return {'any': 1}


class Witness(Sequence):
    'One image that says whether its process has modules and threads of the parent.'

    def __len__(self):
        return 1

    def __getitem__(self, row):
        has_torch = 'torch' in sys.modules
        threads = threading.active_count()
        return np.full((4, 4, 3), 100 * has_torch + threads, np.uint8)
"""


@pytest.fixture
def user_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "images_of_a_user.py").write_text(IMAGES_OF_A_USER)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("images_of_a_user")
    del sys.modules["images_of_a_user"]


def test_a_file_that_crashes_the_decoder_is_a_failure_and_costs_no_other_row(user_images) -> None:
    spans = [range(start, start + 5) for start in range(0, 40, 5)]
    images = user_images.Hostile()
    found = list(prepare(images, Preprocess(4), spans, workers=2, processes=True))
    assert [batch.rows for batch in found] == spans
    assert [(failure.row, failure.reason) for batch in found for failure in batch.failures] == [
        (7, "the decoder crashed on it"),
        (30, "the decoder crashed on it"),
    ]
    values = torch.cat([batch.inputs[:, 0, 0, 0] for batch in found]) * 255
    assert values.round().int().tolist() == [row for row in range(40) if row not in (7, 30)]


def test_processes_that_cannot_start_are_an_error_and_not_unreadable_images(user_images) -> None:
    images = user_images.Unstartable()
    with pytest.raises(DecodersCannotStart, match="cannot start"):
        list(prepare(images, Preprocess(4), [range(5)], workers=2, processes=True))


def test_images_that_cannot_be_sent_to_processes_are_an_error_that_says_so() -> None:
    class Local(Sequence):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, row: int) -> np.ndarray:
            return np.zeros((4, 4, 3), np.uint8)

    with pytest.raises(TypeError, match=r"a Local cannot be sent .* make it picklable"):
        list(prepare(Local(), Preprocess(4), [range(1)], workers=1, processes=True))


def test_a_decoding_process_is_no_copy_of_a_parent_with_threads(user_images) -> None:
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        images = user_images.Witness()
        [batch] = prepare(images, Preprocess(4), [range(1)], workers=1, processes=True)
    finally:
        stop.set()
    value = int((batch.inputs[0, 0, 0, 0] * 255).round())
    # A copy of this process would have torch's modules. The process itself has its main thread, one
    # that watches the parent, and one that feeds its answers to the pipe.
    assert value < 100
    assert value <= 3


class Awkward(Sequence):
    """Images of which one is long and narrow, and one takes more memory than there is."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> np.ndarray:
        if row == 2:
            raise MemoryError
        shape = (4, 4, 3)
        if row == 1:
            shape = (1, 3_000_000, 3)
        return np.full(shape, row, np.uint8)


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

class Sleeper(Sequence):
    def __len__(self):
        return 1
    def __getitem__(self, row):
        print(os.getpid(), flush=True)
        time.sleep(600)

if __name__ == "__main__":
    from fdbd.data.decoding import prepare
    from fdbd.core.preprocessing import Preprocess
    list(prepare(Sleeper(), Preprocess(4), [range(1)], workers=1, processes=True))
"""


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="processes are looked up in Linux's /proc"
)
def test_a_process_that_decodes_apart_leaves_soon_after_a_parent_that_was_killed(
    tmp_path: Path,
) -> None:
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
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
    values = {field: (0.5, bad, 0.5)}
    if field == "scale":
        values = {field: bad}
    with pytest.raises(ValueError, match="expected finite numbers"):
        Preprocess(8, **values)
