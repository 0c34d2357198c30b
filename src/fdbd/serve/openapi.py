"""The OpenAPI description of the service, by hand: bodies are images and tensors, which no framework guesses."""

from __future__ import annotations

from typing import Any

from fdbd.serve.answers import Backend
from fdbd.serve.inference_protocol import DTYPES, OUTPUTS
from fdbd.util.version import __version__

_NUMBER = {"type": ["number", "null"]}
_TEXT = {"type": ["string", "null"]}
_BOUNDARY = {
    "type": "object",
    "properties": {"label": {"type": "integer"}, "class": _TEXT, "distance": _NUMBER, "share": _NUMBER},
}
_DECISION = {
    "type": "object",
    "required": ["label", "class", "score", "p_value", "is_ood"],
    "properties": {
        "label": {"type": "integer", "description": "Predicted class."},
        "class": {**_TEXT, "description": "Its name, where names are known."},
        "score": {**_NUMBER, "description": "Higher is more in-distribution; null where it is not finite."},
        "p_value": {**_NUMBER, "description": "Share of calibration scores at or below the score."},
        "is_ood": {"type": "boolean"},
        "boundaries": {"type": "array", "items": {"$ref": "#/components/schemas/Boundary"}},
    },
}
_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


def document(name: str, backend: Backend) -> dict[str, Any]:
    """The description of the service around this guard."""
    tensor = {
        "type": "object",
        "required": ["name", "shape", "datatype"],
        "properties": {
            "name": {"type": "string", "enum": [backend.input_name]},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 1}},
            "datatype": {"type": "string", "enum": [kind for kind in DTYPES if kind != "BOOL"]},
            "parameters": {"type": "object"},
            "data": {"type": "array"},
        },
    }
    inference = {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "parameters": {"type": "object"},
            "inputs": {"type": "array", "minItems": 1, "maxItems": 1, "items": tensor},
            "outputs": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string", "enum": list(OUTPUTS)}, "parameters": {"type": "object"}},
                },
            },
        },
    }
    explain = {
        "name": "explain",
        "in": "query",
        "schema": {"type": "boolean"},
        "description": "Also name the nearest decision boundaries.",
    }
    model = f"/v2/models/{name}"
    return {
        "openapi": "3.1.0",
        "info": {"title": f"fdbd: {backend.name}", "version": __version__, "description": backend.promise},
        "components": {
            "schemas": {"Decision": _DECISION, "Boundary": _BOUNDARY, "Error": _ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "paths": {
            "/decide": {
                "post": _operation(
                    "Decide on one image, or on rows of features",
                    _decide_body(backend),
                    _json_of(
                        {"$ref": "#/components/schemas/Decision"} if backend.input_name == "images" else _DECISIONS
                    ),
                    (400, 401, 413, 415, 503, 504),
                    parameters=[explain],
                )
            },
            f"{model}/infer": {
                "post": _operation(
                    "Open Inference Protocol: decide on a tensor",
                    _json_of(inference),
                    _json_of({"type": "object", "required": ["model_name", "outputs"]}),
                    (400, 401, 413, 503, 504),
                )
            },
            model: {"get": _operation("Open Inference Protocol: inputs and outputs", None, _ANY, (401,))},
            f"{model}/ready": {"get": _operation("Whether the model answers", None, _ANY, (401, 503))},
            "/v2": {"get": _operation("Open Inference Protocol: the server", None, _ANY, (401,))},
            "/v2/health/live": {"get": _operation("Whether the process lives", None, _ANY, ())},
            "/v2/health/ready": {"get": _operation("Whether requests are taken", None, _ANY, (503,))},
            "/status": {"get": _operation("The monitor's view, for the page", None, _ANY, (401,))},
            "/metrics": {"get": _operation("Numbers for Prometheus", None, {"text/plain": {}}, (401,))},
        },
    }


_ANY: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
_DECISIONS = {
    "type": "object",
    "required": ["decisions"],
    "properties": {"decisions": {"type": "array", "items": {"$ref": "#/components/schemas/Decision"}}},
}


def _json_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _decide_body(backend: Backend) -> dict[str, Any]:
    if backend.input_name == "features":
        rows = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
        return _json_of({"type": "object", "required": ["features"], "properties": {"features": rows}})
    image = {"schema": {"type": "string", "format": "binary"}}
    field = {"type": "object", "required": ["image"], "properties": {"image": image["schema"]}}
    return {"image/jpeg": image, "image/png": image, "multipart/form-data": {"schema": field}}


def _operation(
    summary: str,
    body: dict[str, Any] | None,
    answer: dict[str, Any],
    refusals: tuple[int, ...],
    **more: Any,
) -> dict[str, Any]:
    reasons = {
        400: "The request is not as expected; the error says how.",
        401: "The token is missing or wrong.",
        413: "The body or the number of rows is above the limit.",
        415: "This guard takes another kind of input.",
        503: "The queue is full or the service shuts down; Retry-After says when to come again.",
        504: "The answer was not ready in time.",
    }
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": answer}}
    responses |= {str(code): {"description": reasons[code], "content": error} for code in refusals}
    operation: dict[str, Any] = {"summary": summary, "responses": responses, "security": [{}, {"token": []}], **more}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": body}
    return operation
