"""Deprecated: what was here is in `fdbd.export`, `fdbd.monitor`, `fdbd.integrations` and
`fdbd.jobs.ray`."""

import lazy_loader

_MOVED = [
    "drift",
    "int8",
    "mlflow",
    "monitor",
    "onnx",
    "openvino",
    "ray",
    "sklearn",
    "stream_monitor",
]
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=_MOVED)
