"""`fdbd.deploy.onnx`: a guard as an ONNX graph, under its documented name (the code is `fdbd.decision.onnx_export`)."""

from fdbd.decision.onnx_export import OPSET, OUTPUTS, TOLERANCE, ExportError, export, metadata
from fdbd.deploy import export_target

__all__ = ["OPSET", "OUTPUTS", "TOLERANCE", "ExportError", "export", "metadata"]

export_target(".onnx")(export)
