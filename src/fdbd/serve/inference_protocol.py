"""The Open Inference Protocol, version 2, over REST: JSON tensors and the binary tensor extension.

https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol; the extension is
Triton's, which its client uses by default: a JSON header of `Inference-Header-Content-Length`
bytes, then the tensors' bytes.

What cannot be read is a ValueError of one sentence.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fdbd.serve.backend import OUTPUTS, Answers, Backend, finite

HEADER_LENGTH = "inference-header-content-length"

_NUMBERS = {"INT": ("i", (1, 2, 4, 8)), "UINT": ("u", (1, 2, 4, 8)), "FP": ("f", (2, 4, 8))}
INPUTS = {
    f"{name}{8 * size}": f"<{kind}{size}"
    for name, (kind, sizes) in _NUMBERS.items()
    for size in sizes
}
"""Number types of the protocol that an input may have, with numpy's names."""


class Inference(NamedTuple):
    """A request, read and checked."""

    id: str | None
    rows: NDArray[np.float32]
    outputs: list[tuple[str, bool]]
    """The outputs asked for, each with whether it is wanted as bytes."""


def describe(name: str, backend: Backend) -> dict[str, Any]:
    """The model's metadata."""
    shapes = {"logits": [-1, backend.num_classes]}
    return {
        "name": name,
        "versions": ["1"],
        "platform": "fdbd",
        "inputs": [
            {"name": backend.input_name, "datatype": "FP32", "shape": [-1, *backend.row_shape]}
        ],
        "outputs": [
            {"name": o, "datatype": kind, "shape": shapes.get(o, [-1])}
            for o, (kind, _) in OUTPUTS.items()
        ],
    }


def read(body: bytes, header_length: str | None, backend: Backend) -> Inference:
    """A request's body, as JSON or with binary tensors."""
    length = len(body)
    if header_length is not None:
        length = (
            int(header_length[:20]) if header_length.isascii() and header_length.isdecimal() else 0
        )
        if not 0 < length <= len(body):
            raise ValueError(
                f"the header Inference-Header-Content-Length is {header_length[:20]!r}, expected a number up to the "
                f"body's {len(body)} bytes"
            )
    request = _parsed(body[:length])
    try:
        inputs, identity, as_bytes = (
            request["inputs"],
            request.get("id"),
            _parameter(request, "binary_data_output"),
        )
        if len(inputs) != 1:
            raise ValueError(
                f"the request has {len(inputs)} inputs, expected one, {backend.input_name!r}"
            )
        if identity is not None and not isinstance(identity, str):
            raise ValueError("the request's id is no string")
        rows = _tensor(inputs[0], body[length:], backend)
        wanted = []
        for output in request.get("outputs") or [{"name": name} for name in OUTPUTS]:
            if output["name"] not in OUTPUTS:
                raise ValueError(
                    f"there is no output {output['name']!r:.40}, expected some of {', '.join(OUTPUTS)}"
                )
            wanted.append((output["name"], _parameter(output, "binary_data", as_bytes) is True))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the request is not as the Open Inference Protocol wants it: {error!r:.80}"
        ) from None
    return Inference(identity, rows, wanted)


def write(name: str, inference: Inference, answers: Answers) -> tuple[bytes, dict[str, str]]:
    """The response's body and headers."""
    values = dict(zip(OUTPUTS, answers))
    parts, outputs = [], []
    for output, as_bytes in inference.outputs:
        kind, dtype = OUTPUTS[output]
        array = np.asarray(values[output], dtype)
        description: dict[str, Any] = {"name": output, "datatype": kind, "shape": list(array.shape)}
        if as_bytes:
            parts.append(array.tobytes())
            description["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            description["data"] = finite(array)
        outputs.append(description)
    response: dict[str, Any] = {"model_name": name, "model_version": "1", "outputs": outputs}
    if inference.id is not None:
        response["id"] = inference.id
    header = json.dumps(response).encode()
    if not parts:
        return header, {"content-type": "application/json"}
    length = {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(header))}
    return b"".join([header, *parts]), length


def read_features(body: bytes, backend: Backend) -> NDArray[np.float32]:
    """The rows of `{"features": [[…], …]}`, or of one row without the outer brackets."""
    try:
        with np.errstate(over="ignore"):
            rows = np.asarray(_parsed(body)["features"], np.float64).astype(np.float32)
    except (ValueError, TypeError, LookupError, OverflowError):
        raise ValueError(
            'the body is not {"features": [[numbers], …]} with rows of equal length'
        ) from None
    if rows.shape == backend.row_shape:
        rows = rows[None]
    if rows.shape[1:] != backend.row_shape or not len(rows):
        raise ValueError(
            f"features have shape {list(rows.shape)}, expected [N, {backend.row_shape[0]}] with N at least 1"
        )
    return rows


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the request is no JSON") from None


def _parameter(value: dict[str, Any], name: str, default: object = None) -> Any:
    return (value.get("parameters") or {}).get(name, default)


def _tensor(tensor: Any, tail: bytes, backend: Backend) -> NDArray[np.float32]:
    name, kind, shape, data = (tensor.get(key) for key in ("name", "datatype", "shape", "data"))
    if name != backend.input_name:
        raise ValueError(f"there is no input {name!r:.40}, expected {backend.input_name!r}")
    if kind not in INPUTS:
        raise ValueError(f"the datatype is {kind!r:.20}, expected a number type such as FP32")
    is_list = isinstance(shape, list) and all(type(size) is int for size in shape)
    if not is_list or shape[1:] != list(backend.row_shape) or shape[0] < 1:
        raise ValueError(
            f"the shape is {shape!r:.80}, expected {[-1, *backend.row_shape]} with at least one row"
        )
    dtype, count = np.dtype(INPUTS[kind]), math.prod(shape)
    stated = _parameter(tensor, "binary_data_size")
    if stated is not None:
        if type(stated) is not int or not stated == len(tail) == count * dtype.itemsize:
            raise ValueError(
                f"binary_data_size is {stated!r:.20}, the body has {len(tail)} bytes of data, and the shape needs "
                f"{count * dtype.itemsize}"
            )
        values = np.frombuffer(tail, dtype)
    else:
        try:
            values = np.asarray(data, np.float64 if dtype.kind == "f" else dtype)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                f"data are no numbers of type {kind}, or rows of different lengths"
            ) from None
        if values.size != count or not isinstance(data, list):
            raise ValueError(f"data hold {values.size} numbers, the shape {shape} needs {count}")
    with np.errstate(over="ignore"):
        return values.reshape(shape).astype(np.float32)
