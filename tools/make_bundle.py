"""Write the bundles: ``python tools/make_bundle.py [NAME]``, with the images below FDBD_DATA.

ResNet-50 runs over a few ImageNet photographs per class and the OOD sets; its features are kept as
8-bit codes. Each zoo model runs over CIFAR-10 and five OOD sets; kept, in float16, are a
class-balanced part of the training set with the moments of all of it, part of the test set, and the
OOD sets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from fdbd.bench.bundle import DEFAULT, FOLDER, NEAR_SCENES, bundle_model, encode, moment_tensors
from fdbd.bench.cache import CachedFeatures, FeatureCache
from fdbd.core.batch import Head
from fdbd.data.datasets import Images, load
from fdbd.data.images import spread_evenly
from fdbd.fitting.statistics import ClassMoments
from fdbd.networks import list_zoo, zoo_card
from fdbd.networks.by_name import model_by_name
from fdbd.networks.classifier import Classifier
from fdbd.util.files import beside

Features = Callable[[Images], CachedFeatures]
Tensors = dict[str, Tensor]

TRAIN_PER_CLASS = 500
TEST_COUNT = 8000
OOD = {
    "textures32": 1200,
    "tiny-imagenet": 2500,
    "flowers102": 819,
    "mnist": 1500,
    "fashion-mnist": 1500,
}
GROUPS = {"near": ["tiny-imagenet"], "far": ["textures32", "flowers102", "mnist", "fashion-mnist"]}
IMAGENET_GROUPS = {"near": ["sun-near"], "far": ["textures", "sun"]}


def make(name: str, folder: Path = FOLDER) -> list[Path]:
    """Compute and write the bundle of one model; returns the files."""
    named = model_by_name(bundle_model(name), device="cpu")
    assert named.preprocess is not None
    classifier = Classifier(named.model)
    preprocess = named.preprocess
    cache = FeatureCache()

    def features(images: Images) -> CachedFeatures:
        print(f"{name}: {images.name}, {len(images):,} images from {images.source}", flush=True)
        return cache.features(classifier, images, preprocess)

    if name == DEFAULT:
        about, fitted, scored = _imagenet(
            features, classifier.head, preprocess.longest_side, str(named.weights)
        )
    else:
        about, fitted, scored = _cifar(name, features, classifier.head)
    folder.mkdir(exist_ok=True)
    written = []
    for suffix, tensors in (("train", fitted), ("test", scored)):
        path = folder / f"{name}-{suffix}.safetensors"
        whole = {key: value.contiguous() for key, value in tensors.items()}
        with beside(path) as temporary:
            save_file(whole, temporary, {"about": json.dumps(about)})
        written.append(path)
    return written


def _imagenet(
    features: Features, head: Head, size: int, weights: str
) -> tuple[Mapping[str, Any], Tensors, Tensors]:
    train = features(load("imagenet-sample", "train", for_size=size))
    test, textures, sun = (
        load(name, "test", for_size=size) for name in ("imagenet-sample", "textures", "sun")
    )
    found = {images.name: features(images) for images in (test, textures, sun)}
    inside = found[test.name]
    scenes = found[sun.name]
    assert sun.paths is not None
    near = torch.tensor(
        [sun.paths[row].name.startswith(NEAR_SCENES) for row in scenes.positions.tolist()]
    )
    kept = {name: part.features.float() for name, part in found.items()}
    kept |= {"sun": scenes.features[~near].float(), "sun-near": scenes.features[near].float()}
    assert inside.labels is not None
    assert train.labels is not None
    accuracy = float((head(inside.features.float()).argmax(dim=1) == inside.labels).float().mean())
    about = {
        "title": "ResNet-50: ImageNet against textures and scenes",
        "train_set": "imagenet-sample (train)",
        "test_sets": list(kept),
        "groups": IMAGENET_GROUPS,
        "notes": [
            f"Model: {weights}; accuracy {accuracy:.2%} on the {len(inside):,} ID photographs.",
            (
                f"Fitted on {len(train):,} photographs, {len(train) // 1000} per class, where the"
                " paper has 1.28 million: enough for a mean, few for class means, covariances and"
                " neighbours. No fitted photograph is scored."
            ),
            (
                "Features in the package, as 8-bit codes. textures: ten categories of DTD; sun:"
                " bamboo forests, deserts and rain forests; sun-near: gardens and oceans, whose"
                " contents ImageNet classes share."
            ),
        ],
    }
    fitted = _codes("features", train.features.float()) | {"labels": train.labels.to(torch.int16)}
    fitted |= {"head_weight": head.weight.half(), "head_bias": head.bias}
    scored = {"imagenet-sample.labels": inside.labels.to(torch.int16)}
    for name, part in kept.items():
        scored |= _codes(f"{name}.features", part)
    return about, fitted, scored


def _cifar(name: str, features: Features, head: Head) -> tuple[Mapping[str, Any], Tensors, Tensors]:
    card = zoo_card(name)
    train = features(load("cifar10", "train"))
    moments = ClassMoments(card.num_classes, head.num_features)
    for batch in train.batches():
        moments.update(batch)
    assert train.labels is not None
    part = _balanced(train.labels, TRAIN_PER_CLASS)
    about = {
        "title": f"{name}: CIFAR-10 against {len(OOD)} OOD sets",
        "train_set": "cifar10 (train)",
        "test_sets": ["cifar10", *OOD],
        "groups": GROUPS,
        "notes": [
            (
                f"Model: {name} of the zoo ({card.recipe}, seed {card.seed}, accuracy"
                f" {card.test_accuracy:.2%} on all 10,000 test images)."
            ),
            (
                f"Features in the package, float16: {TRAIN_PER_CLASS} training images per class and"
                f" the moments of all 50,000, {TEST_COUNT:,} test images, the other 2,000 held out;"
                " textures32 is ten categories of DTD, flowers102 a part of its test."
            ),
        ],
    }
    fitted = {"features": train.features[part].half(), "labels": train.labels[part].to(torch.uint8)}
    fitted |= {"head_weight": head.weight, "head_bias": head.bias, **moment_tensors(moments)}
    sets = {
        dataset: load(dataset, "test", limit=limit)
        for dataset, limit in {"cifar10": TEST_COUNT, **OOD}.items()
    }
    whole = load("cifar10", "test")
    others = np.setdiff1d(np.arange(len(whole)), spread_evenly(TEST_COUNT, len(whole)))
    scored: Tensors = {}
    for dataset, images in {**sets, "heldout": whole.subset(others)}.items():
        found = features(images)
        scored[f"{dataset}.features"] = found.features.half()
        if dataset in ("cifar10", "heldout") and found.labels is not None:
            scored[f"{dataset}.labels"] = found.labels.to(torch.uint8)
    return about, fitted, scored


def _codes(name: str, features: Tensor) -> Tensors:
    codes, scales = encode(features)
    return {f"{name}.codes": codes, f"{name}.scales": scales}


def _balanced(labels: Tensor, per_class: int) -> Tensor:
    """Indices of so many samples of each class, spread evenly over the set."""
    chosen = []
    for label in labels.unique().tolist():
        where = np.flatnonzero(labels.numpy() == label)
        chosen.append(where[np.arange(per_class) * len(where) // per_class])
    return torch.from_numpy(np.sort(np.concatenate(chosen)))


if __name__ == "__main__":
    for bundle in sys.argv[1:] or [DEFAULT, *list_zoo()]:
        for file in make(bundle):
            print(f"{file.name}: {file.stat().st_size / 1e6:.2f} MB")
