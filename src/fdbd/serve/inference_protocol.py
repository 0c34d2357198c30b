"""The Open Inference Protocol, version 2, over REST: JSON tensors and the binary tensor extension.

https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol; the extension is Triton's, which
its client uses by default: a JSON header of `Inference-Header-Content-Length` bytes, then the tensors' bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fdbd.serve.answers import Answers, Backend

HEADER_LENGTH = "inference-header-content-length"

DTYPES: dict[str, type[np.generic]] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}
"""The protocol's names of number types."""

OUTPUTS = {"logits": "FP32", "label": "INT64", "score": "FP64", "p_value": "FP64", "is_ood": "BOOL"}
"""Outputs by name, with their types."""


class ProtocolError(ValueError):
    """A request that does not keep to the protocol; the message is one sentence."""


class Inference(NamedTuple):
    """A request, read and checked."""

    id: str | None
    rows: NDArray[np.float32]
    outputs: tuple[tuple[str, bool], ...]
    """The outputs asked for, each with whether it is wanted as bytes."""


def describe(name: str, backend: Backend) -> dict[str, Any]:
    """The model's metadata."""
    shapes = {"logits": [-1, backend.num_classes]}
    return {
        "name": name,
        "versions": ["1"],
        "platform": "fdbd",
        "inputs": [{"name": backend.input_name, "datatype": "FP32", "shape": [-1, *backend.row_shape]}],
        "outputs": [{"name": o, "datatype": kind, "shape": shapes.get(o, [-1])} for o, kind in OUTPUTS.items()],
    }


def read(body: bytes, header_length: str | None, backend: Backend) -> Inference:
    """A request's body, as JSON or with binary tensors.

    Raises:
        ProtocolError: it says what is wrong with the request.
    """
    header, tensors = _split(body, header_length)
    request = _mapping(_json(header), "the request")
    inputs = request.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1:
        raise ProtocolError(f"the request has other inputs than the one expected, {backend.input_name!r}")
    rows = _tensor(_mapping(inputs[0], "the input"), tensors, backend)
    identity = request.get("id")
    if identity is not None and not isinstance(identity, str):
        raise ProtocolError("the request's id is no string")
    parameters = _mapping(request.get("parameters") or {}, "parameters")
    return Inference(identity, rows, _wanted(request.get("outputs"), parameters.get("binary_data_output") is True))


def write(name: str, inference: Inference, answers: Answers) -> tuple[bytes, dict[str, str]]:
    """The response's body and headers."""
    values = dict(zip(OUTPUTS, answers))
    parts, outputs = [], []
    for output, as_bytes in inference.outputs:
        array = np.ascontiguousarray(values[output], dtype=DTYPES[OUTPUTS[output]])
        description: dict[str, Any] = {"name": output, "datatype": OUTPUTS[output], "shape": list(array.shape)}
        if as_bytes:
            parts.append(array.astype(array.dtype.newbyteorder("<")).tobytes())
            description["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            description["data"] = [_plain(value) for value in array.ravel().tolist()]
        outputs.append(description)
    response: dict[str, Any] = {"model_name": name, "model_version": "1", "outputs": outputs}
    if inference.id is not None:
        response["id"] = inference.id
    header = json.dumps(response).encode()
    if not parts:
        return header, {"content-type": "application/json"}
    length = {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(header))}
    return b"".join([header, *parts]), length


def _split(body: bytes, header_length: str | None) -> tuple[bytes, bytes]:
    if header_length is None:
        return body, b""
    if not header_length.isascii() or not header_length.isdigit() or not 0 < int(header_length) <= len(body):
        raise ProtocolError(
            f"the header Inference-Header-Content-Length is {header_length[:20]!r}, expected a number up to the body's "
            f"{len(body)} bytes"
        )
    return body[: int(header_length)], body[int(header_length) :]


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ProtocolError("the request is no JSON") from None


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ProtocolError(f"{what} is no JSON object")
    return value


def _tensor(tensor: Mapping[str, Any], tail: bytes, backend: Backend) -> NDArray[np.float32]:
    if tensor.get("name") != backend.input_name:
        raise ProtocolError(f"there is no input {str(tensor.get('name'))[:40]!r}, expected {backend.input_name!r}")
    kind, shape = tensor.get("datatype"), tensor.get("shape")
    if not isinstance(kind, str) or kind not in DTYPES or kind == "BOOL":
        raise ProtocolError(f"the datatype is {str(kind)[:20]!r}, expected a number type such as FP32")
    expected = [-1, *backend.row_shape]
    if (
        not isinstance(shape, list)
        or not all(type(size) is int for size in shape)
        or len(shape) != len(expected)
        or any(wanted not in (-1, size) for size, wanted in zip(shape, expected))
        or not shape[0] >= 1
    ):
        raise ProtocolError(f"the shape is {str(shape)[:80]}, expected {expected} with at least one row")
    dtype = np.dtype(DTYPES[kind]).newbyteorder("<")
    parameters = _mapping(tensor.get("parameters") or {}, "parameters")
    if "binary_data_size" in parameters:
        count = parameters["binary_data_size"]
        if type(count) is not int or count != len(tail) or count != math.prod(shape) * dtype.itemsize:
            raise ProtocolError(
                f"binary_data_size is {str(count)[:20]}, the body has {len(tail)} bytes of data, and the shape needs "
                f"{math.prod(shape) * dtype.itemsize}"
            )
        values = np.frombuffer(tail, dtype).reshape(shape)
    else:
        values = _numbers(tensor.get("data"), shape, dtype)
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _numbers(data: Any, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    try:
        values = np.asarray(data, dtype=np.float64 if dtype.kind == "f" else dtype)
    except (TypeError, ValueError, OverflowError):
        raise ProtocolError(f"data are no numbers of type {dtype.name}, or rows of different lengths") from None
    if values.size != math.prod(shape) or not isinstance(data, list):
        raise ProtocolError(f"data hold {values.size} numbers, the shape {list(shape)} needs {math.prod(shape)}")
    return values.reshape(shape)


def _wanted(outputs: Any, all_as_bytes: bool) -> tuple[tuple[str, bool], ...]:
    if outputs is None or outputs == []:
        return tuple((name, all_as_bytes) for name in OUTPUTS)
    if not isinstance(outputs, list):
        raise ProtocolError("outputs are no list")
    wanted = []
    for output in outputs:
        name = _mapping(output, "an output").get("name")
        if not isinstance(name, str) or name not in OUTPUTS:
            raise ProtocolError(f"there is no output {str(name)[:40]!r}, expected some of {', '.join(OUTPUTS)}")
        parameters = _mapping(output.get("parameters") or {}, "parameters")
        wanted.append((name, parameters.get("binary_data", all_as_bytes) is True))
    return tuple(wanted)


def _plain(value: Any) -> Any:
    """JSON has no infinity and no NaN: those become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
