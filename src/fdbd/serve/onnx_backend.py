"""An exported guard behind the service: ONNX Runtime alone, torch is not imported."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdbd.data.images import decode
from fdbd.data.preprocessing import Preprocess
from fdbd.serve.answers import Answers, Reason
from fdbd.util.extras import require

_OUTPUTS = ["logits", "label", "score", "p_value", "is_ood"]


class OnnxBackend:
    """A graph that `fdbd export` wrote. Its metadata say how images are prepared and what the threshold promises."""

    def __init__(self, path: str | os.PathLike[str], *, threads: int | None = None) -> None:
        runtime, path = require("onnxruntime", "onnx"), os.fspath(path)
        options = runtime.SessionOptions()
        options.log_severity_level = 3
        if threads is not None:
            options.intra_op_num_threads = threads
        try:
            self._session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            properties = self._session.get_modelmeta().custom_metadata_map
            about = {key[5:]: json.loads(value) for key, value in properties.items() if key.startswith("fdbd.")}
        except Exception as error:  # ONNX Runtime has no common class for what a damaged file raises
            raise ValueError(f"{path!r} is no ONNX file that can be served: {error}") from None
        if "calibration" not in about:
            raise ValueError(
                f"{path!r} has no calibration scores inside, which the monitor needs: export it again with "
                "this version of fdbd"
            )
        inputs = self._session.get_inputs()
        if len(inputs) != 1:
            raise ValueError(f"{path!r} takes {len(inputs)} inputs, a service can give it one")
        self.input_name = inputs[0].name
        self.row_shape = tuple(_size(size, path) for size in inputs[0].shape[1:])
        self.num_classes = _size(self._session.get_outputs()[0].shape[1], path)
        self.class_names: tuple[str, ...] = tuple(about["class_names"] or ())
        self.calibration = np.frombuffer(base64.b64decode(about["calibration"]), "<f8").copy()
        kind, target = about["threshold"]["kind"], about["threshold"]["target"]
        self.thresholds: list[float] = np.ravel(about["threshold"]["value"]).tolist()
        self.expected_rate = target if kind == "conformal" else 1 - target
        self.name = f"{about['detector'].get('name', 'guard')}, {kind} threshold at {target:g}, ONNX"
        self.promise = about["promise"]
        fields = about.get("preprocess")
        self._preprocess = None if fields is None else Preprocess.from_dict(fields)

    enter: Callable[[int], object] | None = None

    def prepare(self, image: bytes) -> NDArray[np.float32]:
        """One encoded image as the graph takes it."""
        if self._preprocess is None:
            raise ValueError("this graph does not say how images are prepared: send tensors, or export it again")
        rows = self._preprocess.array([decode(image, name="the image")])
        return rows.reshape(self.row_shape)

    def decide(self, rows: NDArray[np.float32]) -> Answers:
        """The graph's answers."""
        logits, labels, scores, p_values, is_ood = self._session.run(_OUTPUTS, {self.input_name: rows})
        return Answers(logits, labels, scores.astype(np.float64), p_values.astype(np.float64), is_ood)

    def explain(self, rows: NDArray[np.float32], nearest: int) -> list[Reason]:
        """An exported graph holds decisions, not distances."""
        raise ValueError("an ONNX graph cannot explain its decisions: serve the guard's own file to explain")


def _size(size: Any, path: str) -> int:
    if not isinstance(size, int):
        raise ValueError(f"{path!r} takes inputs of any size, a service needs a fixed one")
    return size
