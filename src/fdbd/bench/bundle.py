"""The embedded bundle: features of the zoo models on real data, inside the package, so that a benchmark needs nothing.

It holds features only, in float16; logits are computed from the head. `make_bundle` writes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fdbd.bench.latency import measure_forward
from fdbd.bench.runner import Benchmark
from fdbd.core.batch import Head
from fdbd.data.datasets import info
from fdbd.data.feature_set import FeatureSet
from fdbd.fitting.statistics import ClassMoments
from fdbd.networks.classifier import Classifier
from fdbd.networks.zoo import zoo

FOLDER = Path(__file__).parent / "data"


def list_bundles() -> list[str]:
    """Names of the models whose features are in the package.

    >>> "cifar10-ce" in list_bundles()
    True
    """
    return sorted(path.name.removesuffix("-test.safetensors") for path in FOLDER.glob("*-test.safetensors"))


def load_bundle(name: str = "cifar10-ce") -> Benchmark:
    """The benchmark of a zoo model on its bundle.

    >>> bundle = load_bundle()
    >>> bundle.head, [samples.name for samples in bundle.ood]
    (Head(10 classes, 128 features), ['textures32', 'tiny-imagenet', 'flowers102', 'mnist', 'fashion-mnist'])
    """
    if name not in list_bundles():
        raise ValueError(
            f"the package has no features of {name!r}, only of {', '.join(list_bundles())}; for any other model write "
            "a config with fdbd bench --init my.toml"
        )
    about, train = _read(FOLDER / f"{name}-train.safetensors")
    _, test = _read(FOLDER / f"{name}-test.safetensors")
    head = Head(train["head_weight"], train["head_bias"])
    # All bundles hold the same images, chosen by `make_bundle`, so rows of two models can be compared in pairs.
    sets = [
        FeatureSet(title, test[f"{title}.features"], test.get(f"{title}.labels"), samples=f"bundle {title}")
        for title in about["test_sets"]
    ]
    return Benchmark(
        head,
        FeatureSet(about["train_set"], train["features"], train["labels"].long()),
        sets[0],
        sets[1:],
        groups=about["groups"],
        title=about["title"],
        notes=about["notes"],
        statistics=_moments(train),
        validation=FeatureSet("held out", test["heldout.features"], test["heldout.labels"].long()),
        forward=lambda size: measure_forward(Classifier(zoo(name)), 32, size),
        class_names=info(sets[0].name).classes,
    )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        about = json.loads((file.metadata() or {}).get("about", "{}"))
        return about, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _moments(train: dict[str, Tensor]) -> ClassMoments:
    """Moments of the full training set, as the statistic that detectors ask for."""
    moments = ClassMoments(*train["totals"].shape)
    moments.counts, moments.totals = train["counts"].double(), train["totals"].double()
    moments.count = int(moments.counts.sum())
    moments.average = moments.totals.sum(dim=0) / moments.count
    moments.scatter = train["scatter"].double()
    return moments


def moment_tensors(moments: ClassMoments) -> dict[str, Tensor]:
    """What `_moments` reads."""
    return {"counts": moments.counts, "totals": moments.totals, "scatter": moments.scatter.to(torch.float64)}
