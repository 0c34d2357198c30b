"""Deprecated: use `fdbd.export.onnx`."""

from fdbd.export.onnx import OPSET as OPSET
from fdbd.export.onnx import OUTPUTS as OUTPUTS
from fdbd.export.onnx import TOLERANCE as TOLERANCE
from fdbd.export.onnx import ExportError as ExportError
from fdbd.export.onnx import export as export
from fdbd.export.onnx import metadata as metadata
from fdbd.util.deprecation import warn_of_move

warn_of_move("fdbd.deploy.onnx", "fdbd.export.onnx")
