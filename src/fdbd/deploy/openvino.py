"""Deprecated: use `fdbd.export.openvino`."""

from fdbd.export.openvino import export_openvino as export_openvino
from fdbd.util.deprecation import warn_of_move

warn_of_move("fdbd.deploy.openvino", "fdbd.export.openvino")
