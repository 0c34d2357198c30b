"""Decoding of rows of images: in this process, or in one that `fdbd.data.decoding` started.

This module does without torch, so that a decoding process starts in a fraction of a second."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from fdbd.core.pixels import ImageError, Picture, Pixels
from fdbd.core.preprocessing import Preprocess


class Failure(NamedTuple):
    """An image that could not be decoded and is left out: its row in the dataset, and a sentence
    that names it."""

    row: int
    reason: str


Decoded: TypeAlias = tuple[Pixels, list[Failure]]
"""Images (n, height, width, 3) of some rows, and the rows that could not be decoded."""


def decode_rows(
    pixels: Sequence[Pixels | Picture], preprocess: Preprocess, rows: Sequence[int]
) -> Decoded:
    """These images, cropped to the network's size; an ImageError or a lack of memory becomes a
    failure."""
    images = np.empty((len(rows), preprocess.height, preprocess.width, 3), np.uint8)
    failures: list[Failure] = []
    count = 0
    for row in rows:
        try:
            images[count] = preprocess.fit(pixels[row])
        except ImageError as error:
            failures.append(Failure(row, str(error)))
        except MemoryError:
            failures.append(Failure(row, "there is not enough memory to prepare it"))
        else:
            count += 1
    return images[:count], failures


# What this process decodes, if it is a decoding process.
_pixels: Sequence[Pixels | Picture]
_preprocess: Preprocess


def start(pixels: Sequence[Pixels | Picture], preprocess: Preprocess) -> None:
    """Runs first in each decoding process. The images' description is sent once, not per call."""
    global _pixels, _preprocess
    _pixels = pixels
    _preprocess = preprocess
    # Ctrl-C reaches the whole process group; the parent ends its decoding processes itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="fdbd-parent", daemon=True).start()


def is_ready() -> bool:
    """The first call of every pool: it fails if and only if decoding processes cannot start."""
    return True


def decode_here(rows: Sequence[int]) -> Decoded:
    """`decode_rows` of what `start` was given."""
    return decode_rows(_pixels, _preprocess, rows)


def _end_with_parent() -> None:
    """Ends this process when its parent ends, even if the parent was killed: a process that waits
    for room in its pipe would keep files and locks for good."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
