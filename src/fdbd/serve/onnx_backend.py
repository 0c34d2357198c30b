"""An exported guard behind the service: ONNX Runtime alone, torch is not imported."""

from __future__ import annotations

import base64
import json
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdbd.data.preprocessing import Preprocess
from fdbd.serve.backend import Answers, Backend, Reason
from fdbd.serve.inference_protocol import OUTPUTS
from fdbd.util.extras import require


class OnnxBackend(Backend):
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
        self.class_names = tuple(about["class_names"] or ())
        self.calibration = np.frombuffer(base64.b64decode(about["calibration"]), "<f8").copy()
        kind, target = about["threshold"]["kind"], about["threshold"]["target"]
        self.thresholds = np.ravel(about["threshold"]["value"]).tolist()
        self.expected_rate = target if kind == "conformal" else 1 - target
        self.name = f"{about['detector'].get('name', 'guard')}, {kind} threshold at {target:g}, ONNX"
        self.promise = about["promise"]
        if about.get("preprocess") is not None:
            self.preprocess = Preprocess.from_dict(about["preprocess"])

    def decide(self, rows: NDArray[np.float32]) -> Answers:
        """The graph's answers."""
        logits, labels, scores, p_values, is_ood = self._session.run([*OUTPUTS], {self.input_name: rows})
        return Answers(logits, labels, scores.astype(np.float64), p_values.astype(np.float64), is_ood)

    def explain(self, rows: NDArray[np.float32], nearest: int) -> list[Reason]:
        """An exported graph holds decisions, not distances."""
        raise ValueError("an ONNX graph cannot explain its decisions: serve the guard's own file to explain")


def _size(size: Any, path: str) -> int:
    if not isinstance(size, int):
        raise ValueError(f"{path!r} takes inputs of any size, a service needs a fixed one")
    return size
