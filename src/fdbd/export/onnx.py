"""`fdbd.export.onnx`: a guard as an ONNX graph, whose graph is made in
`fdbd.decision.onnx_export`."""

from fdbd.decision.export_record import ExportRecord
from fdbd.decision.onnx_export import (
    MAP_OUTPUTS,
    OPSET,
    OUTPUTS,
    TOLERANCE,
    ExportError,
    export,
    metadata,
)
from fdbd.export import export_target

__all__ = [
    "MAP_OUTPUTS",
    "OPSET",
    "OUTPUTS",
    "TOLERANCE",
    "ExportError",
    "ExportRecord",
    "export",
    "metadata",
]

export_target(".onnx")(export)
