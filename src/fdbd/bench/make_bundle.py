"""Write the bundles: ``python -m fdbd.bench.make_bundle [NAME]``, with the images below FDBD_DATA.

ResNet-50 runs over a few ImageNet photographs per class and the OOD sets; its features are kept as 8-bit codes. Each
zoo model runs over CIFAR-10 and five OOD sets; kept, in float16, are a class-balanced part of the training set with the
moments of all of it, part of the test set, and the OOD sets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from fdbd import networks as models
from fdbd.bench.bundle import DEFAULT, FOLDER, encode, moment_tensors
from fdbd.bench.cache import CachedFeatures, FeatureCache
from fdbd.data.datasets import load
from fdbd.data.datasets.collection import spread_evenly
from fdbd.fitting.statistics import ClassMoments
from fdbd.networks.by_name import model_by_name
from fdbd.networks.classifier import Classifier
from fdbd.util.files import beside

TRAIN_PER_CLASS = 500
TEST_COUNT = 8000
OOD = {"textures32": 1200, "tiny-imagenet": 2500, "flowers102": 819, "mnist": 1500, "fashion-mnist": 1500}
GROUPS = {"near": ["tiny-imagenet"], "far": ["textures32", "flowers102", "mnist", "fashion-mnist"]}


NEAR_SCENES = ("garden", "ocean")
"""Categories of SUN that share their contents with ImageNet classes: greenhouse, pot, fence; seashore, lakeside."""
IMAGENET_GROUPS = {"near": ["sun-near"], "far": ["textures", "sun"]}


def make_imagenet(folder: Path = FOLDER) -> list[Path]:
    """Compute and write the bundle of ResNet-50 on ImageNet; returns the files."""
    named = model_by_name("public:resnet50", device="cpu")
    assert named.preprocess is not None
    classifier, cache = Classifier(named.model), FeatureCache()
    kept: dict[str, Tensor] = {}
    labels: dict[str, Tensor] = {}
    for name, split in (
        ("imagenet-sample", "train"),
        ("imagenet-sample", "test"),
        ("textures", "test"),
        ("sun", "test"),
    ):
        images = load(name, split, for_size=named.preprocess.size)
        print(f"ResNet-50: {name} {split}, {len(images):,} images from {images.source}", flush=True)
        found = cache.features(classifier, images, named.preprocess)
        title = "train" if split == "train" else name
        kept[title] = found.features.float()
        if found.labels is not None and name == "imagenet-sample":
            labels[title] = found.labels
        if name == "sun":
            assert images.paths is not None
            near = torch.tensor([images.paths[row].name.startswith(NEAR_SCENES) for row in found.positions.tolist()])
            kept["sun"], kept["sun-near"] = kept["sun"][~near], kept["sun"][near]
    train, test = kept.pop("train"), kept["imagenet-sample"]
    accuracy = float((classifier.head(test).argmax(dim=1) == labels["imagenet-sample"]).float().mean())
    about = {
        "title": "ResNet-50: ImageNet against textures and scenes",
        "train_set": "imagenet-sample (train)",
        "test_sets": list(kept),
        "groups": IMAGENET_GROUPS,
        "notes": [
            f"Model: {named.weights}; accuracy {accuracy:.2%} on the {len(test):,} ID photographs.",
            f"Fitted on {len(train):,} photographs, {len(train) // 1000} per class, where the paper has 1.28 million: "
            "enough for a mean, few for class means, covariances and neighbours. No fitted photograph is scored.",
            "Features in the package, as 8-bit codes. textures: ten categories of DTD; sun: bamboo forests, deserts "
            "and rain forests; sun-near: gardens and oceans, whose contents ImageNet classes share.",
        ],
    }
    fitted = {
        **_codes("features", train),
        "labels": labels["train"].to(torch.int16),
        "head_weight": classifier.head.weight.half(),
        "head_bias": classifier.head.bias,
    }
    scored = {"imagenet-sample.labels": labels["imagenet-sample"].to(torch.int16)}
    for name, features in kept.items():
        scored |= _codes(f"{name}.features", features)
    return _write(DEFAULT, about, fitted, scored, folder)


def _codes(name: str, features: Tensor) -> dict[str, Tensor]:
    codes, scales = encode(features)
    return {f"{name}.codes": codes, f"{name}.scales": scales}


def make(name: str, folder: Path = FOLDER) -> list[Path]:
    """Compute and write the bundle of one zoo model; returns the files."""
    card = models.zoo_card(name)
    classifier = Classifier(models.zoo(name))
    preprocess = card.preprocess
    cache = FeatureCache()

    def features(dataset: str, split: str, limit: int | None = None) -> CachedFeatures:
        images = load(dataset, split, limit=limit)
        print(f"{name}: {images.name} {split}, {len(images):,} images from {images.source}", flush=True)
        return cache.features(classifier, images, preprocess)

    train = features("cifar10", "train")
    moments = ClassMoments(card.num_classes, classifier.head.num_features)
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
            f"Model: {name} of the zoo ({card.recipe}, seed {card.seed}, accuracy {card.test_accuracy:.2%} on all "
            "10,000 test images).",
            f"Features in the package, float16: {TRAIN_PER_CLASS} training images per class and the moments of all "
            f"50,000, {TEST_COUNT:,} test images, the other 2,000 held out; "
            "textures32 is ten categories of DTD, flowers102 a part of its test.",
        ],
    }
    fitted = {
        "features": train.features[part].half(),
        "labels": train.labels[part].to(torch.uint8),
        "head_weight": classifier.head.weight,
        "head_bias": classifier.head.bias,
        **moment_tensors(moments),
    }
    scored: dict[str, Tensor] = {}
    for dataset, limit in {"cifar10": TEST_COUNT, **OOD}.items():
        found = features(dataset, "test", limit)
        scored[f"{dataset}.features"] = found.features.half()
        if dataset == "cifar10" and found.labels is not None:
            scored["cifar10.labels"] = found.labels.to(torch.uint8)
    held_out = load("cifar10", "test")
    held_out = held_out.subset(np.setdiff1d(np.arange(len(held_out)), spread_evenly(TEST_COUNT, len(held_out))))
    found = cache.features(classifier, held_out, preprocess)
    assert found.labels is not None
    scored |= {"heldout.features": found.features.half(), "heldout.labels": found.labels.to(torch.uint8)}
    return _write(name, about, fitted, scored, folder)


def _write(
    name: str, about: Mapping[str, Any], fitted: dict[str, Tensor], scored: dict[str, Tensor], folder: Path
) -> list[Path]:
    folder.mkdir(exist_ok=True)
    written = []
    for suffix, tensors in (("train", fitted), ("test", scored)):
        path = folder / f"{name}-{suffix}.safetensors"
        with beside(path) as temporary:
            save_file(
                {key: value.contiguous() for key, value in tensors.items()}, temporary, {"about": json.dumps(about)}
            )
        written.append(path)
    return written


def _balanced(labels: Tensor, per_class: int) -> Tensor:
    """Indices of so many samples of each class, spread evenly over the set."""
    chosen = []
    for label in labels.unique().tolist():
        where = np.flatnonzero(labels.numpy() == label)
        chosen.append(where[np.arange(per_class) * len(where) // per_class])
    return torch.from_numpy(np.sort(np.concatenate(chosen)))


if __name__ == "__main__":
    for bundle in sys.argv[1:] or [DEFAULT, *models.list_zoo()]:
        for file in make_imagenet() if bundle == DEFAULT else make(bundle):
            print(f"{file.name}: {file.stat().st_size / 1e6:.2f} MB")
