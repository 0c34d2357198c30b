"""What a service asks of a guard, whatever runs it: arrays in, arrays out. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Answers(NamedTuple):
    """The decisions on N rows."""

    logits: NDArray[np.float32]
    """(N, C), the model's own."""
    labels: NDArray[np.int64]
    """(N,) predicted classes."""
    scores: NDArray[np.float64]
    """(N,), higher is more in-distribution; −inf where a number was not finite."""
    p_values: NDArray[np.float64]
    """(N,) share of calibration scores at or below the score."""
    is_ood: NDArray[np.bool_]
    """(N,)."""

    def rows(self, start: int, stop: int) -> Answers:
        """The answers on rows start to stop."""
        return Answers._make(part[start:stop] for part in self)


class Reason(NamedTuple):
    """Why one row got its decision: the nearest decision boundaries, the closest first."""

    labels: list[int]
    distances: list[float]
    shares: list[float]
    """Each boundary's share of the score, where the score is a mean over boundaries."""


class Backend(Protocol):
    """A guard that answers on arrays. `prepare` is called from several threads, `decide` from two where there is an
    `enter`, else from one at a time."""

    name: str
    """What the guard is, in one line: detector and threshold."""
    promise: str
    """What its threshold promises, in one sentence."""
    input_name: str
    """"images" or "features"."""
    row_shape: tuple[int, ...]
    """The shape of one row of the input."""
    num_classes: int
    class_names: tuple[str, ...]
    """One per class, or none."""
    calibration: NDArray[np.float64]
    """(M,) calibration scores, sorted."""
    thresholds: list[float]
    """One, or one per predicted class."""
    expected_rate: float
    """The share of in-distribution samples that the threshold rejects, as it was set."""

    enter: Callable[[int], object] | None
    """Called by each thread that decides, with the number of those that share the cores."""

    def prepare(self, image: bytes) -> NDArray[np.float32]:
        """One encoded image as a row of the input. ValueError says what is wrong with it."""

    def decide(self, rows: NDArray[np.float32]) -> Answers:
        """The decisions on (N, *row_shape)."""

    def explain(self, rows: NDArray[np.float32], nearest: int) -> list[Reason]:
        """The nearest boundaries of each row. ValueError where this guard cannot explain."""
