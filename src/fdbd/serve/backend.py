"""What a service asks of a guard, arrays in and arrays out; and an exported guard, which needs no
torch."""

from __future__ import annotations

import base64
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fdbd.core.pixels import decode
from fdbd.core.preprocessing import Preprocess
from fdbd.core.tokenizer import TextEncoder, TextTokenizer
from fdbd.util.extras import require
from fdbd.util.files import hash_file

Rows = NDArray[Any]
"""(N, …) images or features in float32, or texts as `fdbd.core.tokenizer.TextEncoder.row` gives
them."""

OUTPUTS = {
    "logits": ("FP32", "<f4"),
    "label": ("INT64", "<i8"),
    "score": ("FP64", "<f8"),
    "p_value": ("FP64", "<f8"),
    "is_ood": ("BOOL", "|b1"),
}
"""Outputs by name, with their types in the protocol and in numpy."""


MAP_OUTPUTS = ("label", "is_ood", "ood_share", "image_score", "image_p_value", "image_is_ood")
"""What is asked of a graph of maps."""
MAP_BATCH_SIZE = 4
"""Images that a model of maps takes at once at most, since its inner maps are large; a batch of the
service that has more is cut."""


class Answers(NamedTuple):
    """The decisions on N rows, as in `fdbd.Decision`."""

    logits: NDArray[np.float32]
    """(N, C)"""
    labels: NDArray[np.int64]
    """(N,) predicted classes."""
    scores: NDArray[np.float64]
    """(N,), higher is more in-distribution; −inf if a number was not finite."""
    p_values: NDArray[np.float64]
    """(N,)"""
    is_ood: NDArray[np.bool_]
    """(N,)"""
    ood_shares: NDArray[np.float64] | None = None
    """(N,) of a guard of maps: the share of each image's positions that are OOD. The fields above
    are then about the image as a whole: its label is the class of the most positions."""
    masks: NDArray[np.bool_] | None = None
    """(N, H, W) of a guard of maps: which positions are OOD."""

    def rows(self, start: int, stop: int) -> Answers:
        """The answers on rows start to stop."""
        parts = [None if part is None else part[start:stop] for part in self]
        return Answers._make(parts)

    @classmethod
    def joined(cls, pieces: Sequence[Answers]) -> Answers:
        """The answers on several runs of rows, one behind the other."""
        parts = []
        for arrays in zip(*pieces):
            parts.append(None if arrays[0] is None else np.concatenate(arrays))
        return cls._make(parts)


Reason = tuple[list[int], list[float], list[float]]
"""Why one row got its decision: the nearest decision boundaries, the closest first, by the label
beyond, the distance, and the distance's share of all distances (of fDBD: of the score)."""


def finite(values: ArrayLike) -> list[Any]:
    """Values as JSON takes them, which has no infinity and no NaN: those become null."""
    return [value if math.isfinite(value) else None for value in np.ravel(values).tolist()]


class Backend(ABC):
    """A guard that answers on arrays. `prepare` is called from several threads, `decide` from two
    if there is an `enter`, else from one at a time."""

    id: str
    """Which guard this is: it changes with the detector, the threshold, the head or the weights."""
    version: str
    """How many thresholds the guard has had since its fit."""
    name: str
    """What the guard is, in one line: detector and threshold."""
    promise: str
    """What its threshold promises, in one sentence."""
    input_name: str
    """"images", "features" or "texts"."""
    row_shape: tuple[int, ...]
    """Of a row that is decided: a prepared image, features, or an encoded text."""
    is_of_maps: bool = False
    """Whether the model predicts a class for each position of a map."""
    num_classes: int
    class_names: tuple[str, ...]
    """One per class, or none."""
    calibration: NDArray[np.float64]
    """(M,) calibration scores, sorted."""
    thresholds: list[float]
    """One, or one per predicted class."""
    expected_rate: float
    """The share of in-distribution samples that the threshold rejects, as it was set."""
    preprocess: Preprocess | None = None
    """None: encoded images are not taken."""
    tokenizer: TextTokenizer | None = None
    """None: texts are not taken."""
    encoder: TextEncoder | None = None
    """That of the tokenizer."""
    usual_value: float = 0.0
    """A value as the input has it, for batches that only try whether the guard works."""
    enter: Callable[[int], object] | None = None
    """Called by each thread that decides, with the number of threads that share the cores."""

    def prepare(self, image: bytes) -> NDArray[np.float32]:
        """One encoded image as a row of the input. ValueError says what is wrong with it."""
        if self.preprocess is None:
            raise ValueError(
                "this guard does not say how images are prepared: send tensors, or export it again"
            )
        return self.preprocess.array([decode(image, name="the image")]).reshape(self.row_shape)

    def take_texts(self, tokenizer: TextTokenizer) -> None:
        """Note that this guard takes texts, and how they are encoded."""
        self.tokenizer = tokenizer
        self.encoder = tokenizer.encoder()
        self.input_name = "texts"
        self.row_shape = self.encoder.row_shape

    def trial_rows(self, count: int) -> Rows:
        """Rows that only try whether the guard works. Texts are as long as the model takes them, so
        that it is known how much memory a batch needs."""
        if self.encoder is not None:
            return self.encoder.longest_rows(count)
        return np.full((count, *self.row_shape), self.usual_value, np.float32)

    @abstractmethod
    def decide(self, rows: Rows) -> Answers:
        """The decisions on (N, *row_shape)."""

    @abstractmethod
    def explain(self, rows: Rows, nearest: int) -> list[Reason]:
        """The nearest boundaries of each row. ValueError if this guard cannot explain."""


class OnnxBackend(Backend):
    """A graph that `fdbd export` wrote. Its metadata say how images are prepared and what the
    threshold promises."""

    def __init__(self, path: str | os.PathLike[str], *, threads: int | None = None) -> None:
        path = os.fspath(path)
        self._session = _open_session(path, threads)
        about = _metadata(self._session, path)
        self._takes_any_length = True
        if about.get("preprocess") is not None:
            self.preprocess = Preprocess.from_dict(about["preprocess"])
        self._open_inputs(path, about)
        self.num_classes = _size(self._session.get_outputs()[0].shape[1], path)
        self.is_of_maps = bool(about["threshold"].get("maps"))
        self.class_names = tuple(about["class_names"] or ())
        self.calibration = np.frombuffer(base64.b64decode(about["calibration"]), "<f8").copy()
        threshold = about["threshold"]
        kind = threshold["kind"]
        target = threshold["target"]
        self.thresholds = np.ravel(threshold["value"]).tolist()
        self.expected_rate = target if kind == "conformal" else 1 - target
        detector = about["detector"].get("name", "guard")
        self.name = f"{detector}, {kind} threshold at {target:g}, ONNX"
        self.promise = about["promise"]
        self.id = about["id"] if "id" in about else _id_of_file(path)
        self.version = str(about.get("guard_version", 0))

    def _open_inputs(self, path: str, about: dict[str, Any]) -> None:
        """Set what the guard takes: one tensor, or texts for a graph of token ids and masks."""
        inputs = self._session.get_inputs()
        described = about.get("tokenizer")
        if described is None:
            if len(inputs) != 1:
                raise ValueError(
                    f"{path!r} takes {len(inputs)} inputs and has no tokenizer inside, a service "
                    "can give it one"
                )
            self.input_name = inputs[0].name
            self.row_shape = self._shape_of_rows(inputs[0].shape[1:], path)
            return
        tokenizer = TextTokenizer.from_dict(described)
        names = [each.name for each in inputs]
        if set(names) != set(tokenizer.inputs):
            raise ValueError(
                f"{path!r} takes {', '.join(names)}, and its tokenizer gives "
                f"{', '.join(tokenizer.inputs)}: export it again"
            )
        length = inputs[0].shape[1]
        self._takes_any_length = not isinstance(length, int)
        if not self._takes_any_length:
            tokenizer = replace(tokenizer, max_tokens=length)
        self.take_texts(tokenizer)

    def _shape_of_rows(self, sizes: list[Any], path: str) -> tuple[int, ...]:
        """The shape of one input. A graph of maps may take images of any size: the preprocessing
        says which size they have here."""
        takes_any_size = len(sizes) == 3 and not all(isinstance(size, int) for size in sizes[1:])
        if takes_any_size and self.preprocess is not None:
            sizes = [sizes[0], self.preprocess.height, self.preprocess.width]
        return tuple(_size(size, path) for size in sizes)

    def decide(self, rows: Rows) -> Answers:
        """The graph's answers."""
        if self.is_of_maps:
            pieces = []
            for start in range(0, len(rows), MAP_BATCH_SIZE):
                pieces.append(self._decide_maps(rows[start : start + MAP_BATCH_SIZE]))
            return Answers.joined(pieces)
        given: dict[str, Any] = {self.input_name: rows}
        if self.encoder is not None:
            given = self.encoder.inputs_of(rows, cut=self._takes_any_length)
        found = self._session.run([*OUTPUTS], given)
        logits, labels, scores, p_values, is_ood = found
        scores = scores.astype(np.float64)
        p_values = p_values.astype(np.float64)
        return Answers(logits, labels, scores, p_values, is_ood)

    def _decide_maps(self, rows: Rows) -> Answers:
        found = self._session.run([*MAP_OUTPUTS], {self.input_name: rows})
        labels, is_ood, ood_share, scores, p_values, image_is_ood = found
        most = []
        for of_image in labels:
            most.append(np.bincount(of_image.ravel(), minlength=self.num_classes).argmax())
        return Answers(
            logits=np.zeros((len(rows), 0), np.float32),
            labels=np.array(most, np.int64),
            scores=scores.astype(np.float64),
            p_values=p_values.astype(np.float64),
            is_ood=image_is_ood,
            ood_shares=ood_share.astype(np.float64),
            masks=is_ood,
        )

    def explain(self, rows: Rows, nearest: int) -> list[Reason]:
        """An exported graph holds decisions, not distances."""
        raise ValueError(
            "an ONNX graph cannot explain its decisions: serve the guard's own file to explain"
        )


def _open_session(path: str, threads: int | None) -> Any:
    runtime = require("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        return runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        # ONNX Runtime has no common class for what a damaged file raises.
        raise _not_servable(path, error) from None


def _metadata(session: Any, path: str) -> dict[str, Any]:
    """What `fdbd export` wrote into the file."""
    about = {}
    try:
        for key, value in session.get_modelmeta().custom_metadata_map.items():
            if key.startswith("fdbd."):
                about[key.removeprefix("fdbd.")] = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _not_servable(path, error) from None
    if "calibration" not in about:
        raise ValueError(
            f"{path!r} has no calibration scores inside, which the monitor needs: export it again "
            "with this version of fdbd"
        )
    return about


def _not_servable(path: str, error: Exception) -> ValueError:
    return ValueError(f"{path!r} is not an ONNX file that can be served: {error}")


def _id_of_file(path: str) -> str:
    """An id for files of versions that wrote none."""
    return hash_file(path)[:16]


def _size(size: Any, path: str) -> int:
    if not isinstance(size, int):
        raise ValueError(f"{path!r} takes inputs of any size, a service needs a fixed one")
    return size
