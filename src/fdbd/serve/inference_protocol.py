"""The Open Inference Protocol, version 2, over REST: JSON tensors and the binary tensor extension.

https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol; the extension is
Triton's, which its client uses by default: a JSON header of `Inference-Header-Content-Length`
bytes, then the tensors' bytes.

What cannot be read is a ValueError of one sentence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fdbd.serve.backend import OUTPUTS, Answers, Backend

HEADER_LENGTH = "inference-header-content-length"
VERSION = "1"
"""The version of every model: a guard's own version stands in its metadata."""
DATATYPE = "FP32"
"""Of images and features, as the metadata declare it."""
TEXT_DATATYPE = "BYTES"
"""Of texts, which are in UTF-8."""
_FAST_FROM = 1_000_000
"""Bytes of JSON from which on a parser is used that is several times faster and, unlike Python's,
takes no NaN and no infinity."""


class Inference(NamedTuple):
    """A request, read and checked."""

    id: str | None
    rows: NDArray[np.float32] | None
    """None: the input are texts, which still have to be encoded."""
    texts: list[str]
    outputs: list[tuple[str, bool]]
    """The outputs asked for, each with whether it is wanted as bytes."""


def describe(name: str, backend: Backend) -> dict[str, Any]:
    """The model's metadata."""
    shape = [-1, *backend.row_shape]
    datatype = DATATYPE
    if backend.tokenizer is not None:
        shape = [-1]
        datatype = TEXT_DATATYPE
    outputs = []
    # Maps are answered by POST /decide alone.
    offered = {} if backend.is_of_maps else OUTPUTS
    for output, (kind, _) in offered.items():
        output_shape = [-1, backend.num_classes] if output == "logits" else [-1]
        outputs.append({"name": output, "datatype": kind, "shape": output_shape})
    return {
        "name": name,
        "versions": [VERSION],
        "platform": "fdbd",
        "inputs": [{"name": backend.input_name, "datatype": datatype, "shape": shape}],
        "outputs": outputs,
        "parameters": {"guard_id": backend.id, "guard_version": backend.version},
    }


def memory_of_json(body: bytes) -> int:
    """Bytes that parsing a JSON text and turning its numbers into an array takes at most.

    Every value but the first follows a comma, a colon or an opening bracket. A number takes 32
    bytes as an object and again once its type is checked, 8 in each list and 12 in arrays; an
    object with one entry takes 232 and its key at least 50; text has up to four bytes per
    character.
    """
    return (
        4 * len(body)
        + 100 * body.count(b",")
        + 200 * body.count(b"[")
        + 110 * body.count(b":")
        + 300 * body.count(b"{")
    )


def memory_of_answer(rows: int, backend: Backend) -> int:
    """The most bytes that the answers on a number of rows take, with logits as JSON."""
    return rows * (500 + 80 * backend.num_classes)


def header_of(body: bytes, header_length: str | None) -> int:
    """How many bytes of the body are JSON."""
    if header_length is None:
        return len(body)
    is_number = header_length.isascii() and header_length.isdecimal()
    length = int(header_length[:20]) if is_number else 0
    if not 0 < length <= len(body):
        raise ValueError(
            f"the header Inference-Header-Content-Length is {header_length[:20]!r}, expected a "
            f"number up to the body's {len(body)} bytes"
        )
    return length


def read(
    body: bytes,
    header_length: str | None,
    backend: Backend,
    check_count: Callable[[int], None] = lambda rows: None,
) -> Inference:
    """A request's body, as JSON or with binary tensors.

    Args:
        check_count: called with the number of rows that the request states, before they are read;
            raises an error if they are too many.
    """
    length = header_of(body, header_length)
    request = parsed(body[:length])
    if not isinstance(request, dict):
        raise ValueError("the request is not a JSON object with the field 'inputs'")
    inputs = request.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        wanted = f"a list of one tensor {backend.input_name!r}"
        raise ValueError(f"the request's inputs are not {wanted}")
    identity = request.get("id")
    if identity is not None and not (isinstance(identity, str) and is_unicode(identity)):
        raise ValueError("the request's id is not a string of valid Unicode")
    rows = None
    texts: list[str] = []
    if backend.tokenizer is not None:
        texts = _texts(inputs[0], body[length:], backend, check_count)
    else:
        rows = _tensor(inputs[0], body[length:], backend, check_count)
    return Inference(identity, rows, texts, _wanted(request))


def _wanted(request: dict[str, Any]) -> list[tuple[str, bool]]:
    """The outputs that a request asks for, each with whether it is sent as bytes; without a list,
    all."""
    all_as_bytes = _parameter(request, "binary_data_output") is True
    outputs = request.get("outputs")
    if not outputs:
        return [(name, all_as_bytes) for name in OUTPUTS]
    if not isinstance(outputs, list):
        raise ValueError("the request's outputs are not a list")
    wanted: dict[str, bool] = {}
    for output in outputs:
        if not isinstance(output, dict):
            raise ValueError("one of the request's outputs is not an object")
        name = output.get("name")
        if not isinstance(name, str) or name not in OUTPUTS:
            known = ", ".join(OUTPUTS)
            raise ValueError(f"there is no output {name!r:.40}, expected some of {known}")
        if name in wanted:
            raise ValueError(f"the output {name!r} is asked for twice")
        wanted[name] = _parameter(output, "binary_data", all_as_bytes) is True
    return list(wanted.items())


def write(name: str, inference: Inference, answers: Answers) -> tuple[bytes, dict[str, str]]:
    """The response's body and headers."""
    values = dict(zip(OUTPUTS, answers))
    parts = []
    outputs = []
    for output, as_bytes in inference.outputs:
        kind, dtype = OUTPUTS[output]
        array = np.asarray(values[output], dtype)
        description: dict[str, Any] = {"name": output, "datatype": kind, "shape": list(array.shape)}
        if as_bytes:
            content = array.tobytes()
            parts.append(content)
            description["parameters"] = {"binary_data_size": len(content)}
        else:
            # A number that is not finite becomes null, as JSON has none.
            description["data"] = np.ravel(array).tolist()
        outputs.append(description)
    response: dict[str, Any] = {"model_name": name, "model_version": VERSION, "outputs": outputs}
    if inference.id is not None:
        response["id"] = inference.id
    # Logits of many classes are millions of numbers, which `json` writes ten times more slowly; the
    # event loop would stand still meanwhile.
    header = msgspec.json.encode(response)
    if not parts:
        return header, {"content-type": "application/json"}
    length = {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(header))}
    return b"".join([header, *parts]), length


def _features_of(request: Any) -> NDArray[np.float32] | None:
    """The numbers of a request, in one or two dimensions; None if it has none of equal rows."""
    if not isinstance(request, dict) or not isinstance(request.get("features"), list):
        return None
    depth = _depth(request["features"])
    if depth > 2:
        return None
    return _numbers(request["features"], depth)


def read_features(body: bytes, backend: Backend) -> NDArray[np.float32]:
    """The rows of `{"features": [[…], …]}`, or of one row without the outer brackets."""
    rows = _features_of(parsed(body))
    if rows is None:
        raise ValueError('the body is not {"features": [[numbers], …]} with rows of equal length')
    if rows.shape == backend.row_shape:
        rows = rows[None]
    if rows.shape[1:] != backend.row_shape or not len(rows):
        width = backend.row_shape[0]
        raise ValueError(
            f"features have shape {list(rows.shape)}, expected [N, {width}] with N at least 1"
        )
    return rows


def parsed(body: bytes) -> Any:
    """A JSON text as Python's values."""
    try:
        if len(body) < _FAST_FROM:
            return json.loads(body)
        return msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"the request is not JSON of finite numbers ({error}); send large batches with a NaN "
            "or an infinity as binary tensors"
        ) from None
    except (ValueError, RecursionError):
        raise ValueError("the request is not JSON") from None


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: JSON can spell half of a surrogate pair, which is no
    character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _numbers(values: list[Any], depth: int) -> NDArray[np.float32] | None:
    """Lists of numbers, nested so deep, as an array; None if they are anything else. null is NaN.

    The types are checked first: numpy reads text as numbers, and makes room for the longest.
    """
    kind: Any = float | None
    for _ in range(depth):
        kind = list[kind]
    try:
        checked = msgspec.convert(values, kind)
        with np.errstate(over="ignore"):
            return np.asarray(checked, np.float64).astype(np.float32)
    except (msgspec.ValidationError, ValueError, TypeError, OverflowError):
        return None


def _depth(values: Any) -> int:
    """How deep the first elements are nested."""
    depth = 0
    while isinstance(values, list):
        depth += 1
        values = values[0] if values else None
    return depth


def _parameter(value: dict[str, Any], name: str, default: object = None) -> Any:
    parameters = value.get("parameters")
    if parameters is None:
        return default
    if not isinstance(parameters, dict):
        raise ValueError("parameters are not an object")
    return parameters.get(name, default)


def _tensor(
    tensor: dict[str, Any], tail: bytes, backend: Backend, check_count: Callable[[int], None]
) -> NDArray[np.float32]:
    name = tensor.get("name")
    kind = tensor.get("datatype")
    shape = tensor.get("shape")
    if name != backend.input_name:
        raise ValueError(f"there is no input {name!r:.40}, expected {backend.input_name!r}")
    if kind != DATATYPE:
        raise ValueError(
            f"the datatype is {kind!r:.20}, expected {DATATYPE}: the network's input, already "
            "prepared. Encoded images go to /decide"
        )
    expected = [-1, *backend.row_shape]
    if not _is_shape(shape, expected):
        raise ValueError(f"the shape is {shape!r:.80}, expected {expected} with at least one row")
    assert isinstance(shape, list)
    check_count(shape[0])
    count = math.prod(shape)
    stated = _parameter(tensor, "binary_data_size")
    if stated is None:
        if tail:
            raise ValueError("the body has bytes after its JSON, but no tensor is binary")
        values = _tensor_from_list(tensor.get("data"), count, len(expected))
    else:
        values = _tensor_from_bytes(tail, stated, count)
        _refuse_data_beside_bytes(tensor)
    return values.reshape(shape)


def _texts(
    tensor: dict[str, Any], tail: bytes, backend: Backend, check_count: Callable[[int], None]
) -> list[str]:
    """The texts of a tensor of BYTES: strings in its data, or bytes that each follow their length
    as four bytes, the lowest first."""
    name = tensor.get("name")
    kind = tensor.get("datatype")
    shape = tensor.get("shape")
    if name != backend.input_name:
        raise ValueError(f"there is no input {name!r:.40}, expected {backend.input_name!r}")
    if kind != TEXT_DATATYPE:
        raise ValueError(
            f"the datatype is {kind!r:.20}, expected {TEXT_DATATYPE}: the texts in UTF-8"
        )
    is_column = isinstance(shape, list) and len(shape) == 2 and shape[1] == 1
    if not _is_shape(shape, [-1, 1] if is_column else [-1]):
        raise ValueError(
            f"the shape is {shape!r:.80}, expected [N] or [N, 1] with at least one row"
        )
    assert isinstance(shape, list)
    check_count(shape[0])
    stated = _parameter(tensor, "binary_data_size")
    if stated is not None:
        texts = _texts_from_bytes(tail, stated, shape[0])
        _refuse_data_beside_bytes(tensor)
    elif tail:
        raise ValueError("the body has bytes after its JSON, but no tensor is binary")
    else:
        texts = _texts_from_list(tensor.get("data"))
    if len(texts) != shape[0]:
        raise ValueError(f"data hold {len(texts)} texts, the shape needs {shape[0]}")
    return texts


def _refuse_data_beside_bytes(tensor: dict[str, Any]) -> None:
    if tensor.get("data") is not None:
        raise ValueError("the tensor has data in JSON and a binary_data_size: send one of them")


def _texts_from_list(data: object) -> list[str]:
    wrong = ValueError("data are not texts: expected a list of strings")
    if not isinstance(data, list):
        raise wrong
    texts = []
    for value in data:
        # Of the shape [N, 1], each text may be a list of its own.
        text = value[0] if isinstance(value, list) and len(value) == 1 else value
        if not isinstance(text, str):
            raise wrong
        texts.append(text)
    return texts


def _texts_from_bytes(tail: bytes, stated: object, count: int) -> list[str]:
    if type(stated) is not int or stated != len(tail):
        raise ValueError(
            f"binary_data_size is {stated!r:.20}, and the body has {len(tail)} bytes of data"
        )
    texts: list[str] = []
    place = 0
    while place < len(tail):
        if len(texts) == count:
            # There may be millions.
            raise ValueError(f"data hold more than {count} texts, which the shape needs")
        start = place + 4
        length = int.from_bytes(tail[place:start], "little")
        place = start + length
        if start > len(tail) or place > len(tail):
            raise ValueError(
                "the binary data end within a text: each follows its length in 4 bytes"
            )
        try:
            texts.append(tail[start:place].decode())
        except UnicodeDecodeError:
            raise ValueError(f"text {len(texts)} is not UTF-8") from None
    return texts


def _is_shape(shape: object, expected: list[int]) -> bool:
    """Whether a shape is the expected one with any number of rows, at least one."""
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        return False
    return shape[1:] == expected[1:] and len(shape) == len(expected) and shape[0] >= 1


def _tensor_from_bytes(tail: bytes, stated: object, count: int) -> NDArray[np.float32]:
    needed = 4 * count
    if type(stated) is not int or not stated == len(tail) == needed:
        raise ValueError(
            f"binary_data_size is {stated!r:.20}, the body has {len(tail)} bytes of data, and the "
            f"shape needs {needed}"
        )
    return np.frombuffer(tail, "<f4").astype(np.float32)


def _tensor_from_list(data: object, count: int, most_nested: int) -> NDArray[np.float32]:
    """Numbers in one list, or nested as the shape is."""
    values = None
    depth = _depth(data)
    if isinstance(data, list) and depth <= most_nested:
        values = _numbers(data, depth)
    if values is None:
        raise ValueError("data are not numbers, or rows of different lengths")
    if values.size != count:
        raise ValueError(f"data hold {values.size} numbers, the shape needs {count}")
    return values
