"""Training recipes by name: the paper's settings, a small version of each that runs on two cores, and the zoo's."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from fdbd.train.augment import Augment

CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# SimCLR's views for small images (Chen et al., 2020, app. B.9), as SupCon's reference code has them.
STRONG = Augment(pad=0, area=(0.2, 1.0), jitter=0.4, hue=0.1, jitter_p=0.8, gray_p=0.2)
# A short training cannot afford to learn all of those invariances.
LIGHT = Augment(padding="reflect", jitter=0.2, jitter_p=0.5)


@dataclass(frozen=True)
class Preset:
    """One recipe. Rates are for the joint batch; `milestones` and `warmup` are fractions of training, or of each of its
    two cycles where there is a `restart` (when, as a fraction; scale of the peak).

    weight_decay falls on all parameters, or only on weight matrices and filters when `decay_all` is false. ema: decay
    per step of the average that is evaluated and kept; 0 for none. sizes: image sides of equally long phases of
    training (small ones first are cheaper, and a resized crop enlarges what it shows: Touvron et al., 2019); empty for
    the images' own. image_size: side of the centre squares that image files are decoded to; arrays have one size.
    start: the zoo model whose weights training starts from; empty for random ones. linear_*: the head on frozen
    features that follows a contrastive objective.
    """

    name: str
    summary: str
    model: str = "resnet18"
    dataset: str = "cifar10"
    num_classes: int = 10
    objective: str = "cross_entropy"
    epochs: int = 100
    batch_size: int = 128
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    decay_all: bool = True
    schedule: str = "multistep"
    milestones: tuple[float, ...] = ()
    warmup: float = 0.0
    restart: tuple[float, float] | None = None
    augment: Augment = field(default_factory=Augment)
    sizes: tuple[int, ...] = ()
    temperature: float = 0.1
    projection: int = 128
    csi_labelled: bool = False
    ema: float = 0.0
    whiten: bool = False
    start: str = ""
    image_size: int = 0
    linear_epochs: int = 40
    linear_lr: float = 0.1
    linear_weight_decay: float = 1e-4
    linear_flip: bool = True
    mean: tuple[float, ...] = CIFAR10_MEAN
    std: tuple[float, ...] = CIFAR10_STD
    seed: int = 0

    def override(self, **changes: Any) -> Preset:
        """A copy with some fields changed; a name that is no field is an error that lists them."""
        known = {f.name for f in fields(self)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise ValueError(f"no such training option: {', '.join(unknown)} (there are {', '.join(sorted(known))})")
        return replace(self, **changes)


_CE = Preset(
    "ce-resnet18",
    "the paper's CIFAR-10 classifier: 100 epochs, 0.1 decayed at 50, 75, 90",
    milestones=(0.5, 0.75, 0.9),
)
_DENSENET = Preset(
    "ce-densenet",
    "DenseNet-BC-100-12's own schedule (Huang et al., 2017): 300 epochs, divided by ten at 50 % and 75 %",
    model="densenet100",
    epochs=300,
    batch_size=64,
    nesterov=True,
    weight_decay=1e-4,
    milestones=(0.5, 0.75),
)
_SUPCON = Preset(
    "supcon-resnet18",
    "the paper's SupCon: batch 1024, 500 epochs, temperature 0.1, cosine from 0.5, then a linear head",
    objective="supcon",
    epochs=500,
    batch_size=1024,
    lr=0.5,
    weight_decay=1e-4,
    schedule="cosine",
    augment=STRONG,
    temperature=0.1,
    linear_epochs=100,
)
_SUPCON_IMAGENET = replace(
    _SUPCON,
    name="supcon-imagenet",
    summary="the paper's ImageNet SupCon: ResNet-50, 700 epochs, then a linear head",
    model="torchvision:resnet50",
    dataset="imagenet",
    num_classes=1000,
    epochs=700,
    image_size=224,
    mean=IMAGENET_MEAN,
    std=IMAGENET_STD,
)
_CSI = Preset(
    "csi-resnet18",
    "CSI's own schedule (Tack et al., 2020): 1000 epochs, cosine from 0.1, four turns, then a linear head",
    objective="csi",
    epochs=1000,
    batch_size=512,
    weight_decay=1e-6,
    schedule="cosine",
    warmup=0.01,
    augment=replace(STRONG, area=(0.54, 1.0)),
    temperature=0.5,
    linear_epochs=100,
)

# Short cycles, a whitened stem and an average of the weights make a few epochs of the compact network worth having.
_SMALL = Preset(
    "ce-small",
    "the compact network, cross-entropy, 2 epochs",
    model="resnet10_compact",
    epochs=2,
    batch_size=128,
    lr=0.2,
    nesterov=True,
    decay_all=False,
    schedule="triangle",
    warmup=0.2,
    augment=Augment(pad=2, padding="reflect"),
    sizes=(24, 28, 32, 32),
    ema=0.995,
    whiten=True,
)
_ZOO_CE = replace(
    _SMALL,
    name="zoo-ce",
    summary="the recipe of the shipped cifar10-ce model: two cycles, growing windows of the images, flips",
    epochs=24,
    restart=(2 / 3, 0.5),
    sizes=(24, 28, 32, 32, 32, 32),
)
_ZOO_SUPCON = replace(
    _SMALL,
    name="zoo-supcon",
    summary="its supervised-contrastive sibling: SupCon from cifar10-ce's weights, then a linear head",
    objective="supcon",
    start="cifar10-ce",
    epochs=3,
    batch_size=256,
    lr=0.1,
    augment=LIGHT,
    sizes=(24, 28, 32),
    linear_flip=False,
)

_ALL = (
    _CE,
    _DENSENET,
    _SUPCON,
    _SUPCON_IMAGENET,
    _CSI,
    _SMALL,
    replace(
        _DENSENET,
        name="densenet-small",
        summary="a DenseNet-BC of 22 layers, cross-entropy, 1 epoch",
        model="densenet22",
        epochs=1,
        schedule="triangle",
        warmup=0.2,
    ),
    replace(
        _SMALL,
        name="supcon-small",
        summary="the compact network, SupCon, 2 epochs of small views, a linear head",
        objective="supcon",
        epochs=2,
        batch_size=256,
        lr=0.3,
        augment=LIGHT,
        sizes=(16, 20, 24),
    ),
    replace(
        _SMALL,
        name="csi-small",
        summary="the compact network, CSI, 1 epoch at half size, a linear head",
        objective="csi",
        epochs=1,
        batch_size=64,
        lr=0.1,
        augment=LIGHT,
        sizes=(16,),
        temperature=0.5,
    ),
    _ZOO_CE,
    _ZOO_SUPCON,
)
PRESETS: dict[str, Preset] = {p.name: p for p in _ALL}


def preset(name: str) -> Preset:
    """The recipe called `name`.

    >>> preset("ce-resnet18").epochs
    100
    """
    if name not in PRESETS:
        raise ValueError(f"no training preset {name!r}: there are {', '.join(PRESETS)}")
    return PRESETS[name]


def list_presets() -> list[str]:
    """Names of all recipes."""
    return list(PRESETS)
