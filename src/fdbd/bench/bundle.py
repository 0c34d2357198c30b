"""Bundles: features of real networks on real images, inside the package, so that a benchmark needs
nothing else.

They hold features only, in float16 or as 8-bit codes; logits are computed from the head.
`tools/make_bundle.py` writes them.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fdbd.bench.rows import Latency
from fdbd.bench.runner import Benchmark
from fdbd.bench.timing import measure_forward
from fdbd.core.batch import Head
from fdbd.data.datasets import info
from fdbd.data.features import FeatureSet
from fdbd.fitting.statistics import ClassMoments
from fdbd.networks.classifier import Classifier
from fdbd.networks.public import ImageNetResNet50
from fdbd.networks.zoo import zoo

FOLDER = Path(__file__).parent / "data"
NEAR_SCENES = ("garden", "ocean")
"""Categories of SUN that share their contents with ImageNet classes: greenhouse, pot, fence;
seashore, lakeside."""
DEFAULT = "imagenet-resnet50"


def list_bundles() -> list[str]:
    """Names of the models whose features are in the package.

    >>> "cifar10-ce" in list_bundles()
    True
    """
    return sorted(
        path.name.removesuffix("-test.safetensors") for path in FOLDER.glob("*-test.safetensors")
    )


def load_bundle(name: str = DEFAULT) -> Benchmark:
    """The benchmark of a bundle: ResNet-50 on ImageNet, or a zoo model on CIFAR-10.

    >>> bundle = load_bundle()
    >>> bundle.head, [samples.name for samples in bundle.ood]
    (Head(1000 classes, 2048 features), ['textures', 'sun', 'sun-near'])
    """
    if name not in list_bundles():
        raise ValueError(
            f"the package has no features of {name!r}, only of {', '.join(list_bundles())}; for "
            "any other model write a config with fdbd bench --init my.toml"
        )
    about, train = _read(FOLDER / f"{name}-train.safetensors")
    _, test = _read(FOLDER / f"{name}-test.safetensors")

    def samples(title: str, key: str) -> FeatureSet:
        """The set under a key of the file, by the name that it has in tables."""
        labels = None
        if f"{key}.labels" in test:
            labels = test[f"{key}.labels"].long()
        # Bundles of one ID set hold the same images, so rows of two models can be compared in
        # pairs.
        return FeatureSet(title, test[f"{key}.features"], labels, samples=f"bundle {key}")

    def forward(size: int) -> Latency:
        """The weights do not matter for time, and those of ResNet-50 are not in the package."""
        if name == DEFAULT:
            return measure_forward(Classifier(ImageNetResNet50().eval()), (3, 224, 224), size)
        return measure_forward(Classifier(zoo(name)), (3, 32, 32), size)

    sets = [samples(title, title) for title in about["test_sets"]]
    validation = None
    if "heldout.features" in test:
        validation = samples("held out", "heldout")
    statistics = None
    if "totals" in train:
        statistics = _moments(train)
    return Benchmark(
        Head(train["head_weight"].float(), train["head_bias"].float()),
        FeatureSet(about["train_set"], train["features"], train["labels"].long()),
        sets[0],
        sets[1:],
        groups=about["groups"],
        title=about["title"],
        notes=about["notes"],
        statistics=statistics,
        validation=validation,
        forward=forward,
        class_names=info(sets[0].name).classes or _imagenet_classes(),
    )


def _imagenet_classes() -> tuple[str, ...]:
    return tuple((FOLDER / "imagenet-classes.txt").read_text("utf-8").splitlines())


def encode(features: Tensor) -> tuple[Tensor, Tensor]:
    """Non-negative features (N, P) as uint8 codes and one scale per row.

    A code is 255 times the square root of the feature's share of the largest in its row, so that
    the many small features keep their precision.
    """
    if features.min() < 0:
        raise ValueError("8-bit codes are for non-negative features, such as those after a ReLU")
    scales = features.amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    return (255 * (features / scales[:, None]).sqrt()).round().to(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Features (N, P) in float32 from what `encode` returned."""
    return (codes.float() / 255).square_() * scales[:, None]


def bundle_model(name: str) -> str:
    """The network of a bundle, by the name that `fdbd.networks.by_name` takes."""
    return "public:resnet50" if name == DEFAULT else f"zoo:{name}"


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        about = json.loads((file.metadata() or {}).get("about", "{}"))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name in list(tensors):
        if name.endswith("features.codes"):
            start = name.removesuffix(".codes")
            codes = tensors.pop(name)
            scales = tensors.pop(f"{start}.scales")
            tensors[start] = decode(codes, scales)
    return about, tensors


def _moments(train: dict[str, Tensor]) -> ClassMoments:
    """Moments of the full training set, as the statistic that detectors ask for."""
    moments = ClassMoments(*train["totals"].shape)
    moments.counts = train["counts"].double()
    moments.totals = train["totals"].double()
    moments.count = int(moments.counts.sum())
    moments.average = moments.totals.sum(dim=0) / moments.count
    moments.scatter = train["scatter"].double()
    return moments


def moment_tensors(moments: ClassMoments) -> dict[str, Tensor]:
    """What `_moments` reads."""
    return {
        "counts": moments.counts,
        "totals": moments.totals,
        "scatter": moments.scatter.to(torch.float64),
    }
