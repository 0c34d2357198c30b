"""What a service asks of a guard, whatever runs it: arrays in, arrays out. Nothing here imports torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fdbd.data.images import decode
from fdbd.data.preprocessing import Preprocess


class Answers(NamedTuple):
    """The decisions on N rows, as in `fdbd.Decision`."""

    logits: NDArray[np.float32]  #: (N, C)
    labels: NDArray[np.int64]  #: (N,) predicted classes
    scores: NDArray[np.float64]  #: (N,), higher is more in-distribution; −inf where a number was not finite
    p_values: NDArray[np.float64]  #: (N,)
    is_ood: NDArray[np.bool_]  #: (N,)

    def rows(self, start: int, stop: int) -> Answers:
        """The answers on rows start to stop."""
        return Answers._make(part[start:stop] for part in self)


Reason = tuple[list[int], list[float], list[float]]
"""Why one row got its decision: the nearest decision boundaries, the closest first, by the label beyond, the distance,
and the share of the score, where the score is a mean over boundaries."""


def finite(values: ArrayLike) -> list[Any]:
    """Values as JSON takes them, which has no infinity and no NaN: those become null."""
    return [value if math.isfinite(value) else None for value in np.ravel(values).tolist()]


class Backend(ABC):
    """A guard that answers on arrays. `prepare` is called from several threads, `decide` from two where there is an
    `enter`, else from one at a time."""

    name: str  #: what the guard is, in one line: detector and threshold
    promise: str  #: what its threshold promises, in one sentence
    input_name: str  #: "images" or "features"
    row_shape: tuple[int, ...]  #: of the input
    num_classes: int
    class_names: tuple[str, ...]  #: one per class, or none
    calibration: NDArray[np.float64]  #: (M,) calibration scores, sorted
    thresholds: list[float]  #: one, or one per predicted class
    expected_rate: float  #: the share of in-distribution samples that the threshold rejects, as it was set
    preprocess: Preprocess | None = None  #: None: encoded images are not taken
    enter: Callable[[int], object] | None = None
    """Called by each thread that decides, with the number of threads that share the cores."""

    def prepare(self, image: bytes) -> NDArray[np.float32]:
        """One encoded image as a row of the input. ValueError says what is wrong with it."""
        if self.preprocess is None:
            raise ValueError("this guard does not say how images are prepared: send tensors, or export it again")
        return self.preprocess.array([decode(image, name="the image")]).reshape(self.row_shape)

    @abstractmethod
    def decide(self, rows: NDArray[np.float32]) -> Answers:
        """The decisions on (N, *row_shape)."""

    @abstractmethod
    def explain(self, rows: NDArray[np.float32], nearest: int) -> list[Reason]:
        """The nearest boundaries of each row. ValueError where this guard cannot explain."""
