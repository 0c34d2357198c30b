"""Guards of a head of several labels, on real images: composites of CIFAR-10 (2 × 2).

    FDBD_DATA=FOLDER python benchmarks/many_labels.py [--network FOLDER] [--quick]

`fdbd train several-labels-small` trains the network: ten sigmoid outputs, one per class, for
pictures of four images each. `--network` is its folder (runs/several-labels-small); what is not
trained there yet is trained first. The guards are fitted on composites of the training images and
calibrated and tested on composites of the test images.

Out-of-distribution are composites whose four parts are all of no class of CIFAR-10: textures,
digits of SVHN, MNIST. And of the test images with one texture among them: three parts are known.

Ends as a section of RESULTS.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from _common import table, write_section, writes
from sklearn.metrics import average_precision_score
from torch import Tensor

import fdbd
from fdbd.data import load
from fdbd.data.composites import PARTS, composite_labels, composites
from fdbd.metrics.evaluation import evaluate
from fdbd.train import preset, train

PRESET = "several-labels-small"
CLASSES = 10
ALPHA = 0.05
BATCH = 100
OUTSIDE = ("textures32", "svhn", "mnist")
DETECTORS = {
    "multilabel-fdbd": {},
    "joint-energy": {},
    "joint-energy, max": {"combine": "max"},
    "fdbd": {},
    "knn": {},
}


class Seen(NamedTuple):
    """What the network says of N composites."""

    batch: fdbd.Batch
    labels: Tensor
    """(N, C) zeros and ones."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", type=Path, default=Path("runs") / PRESET)
    parser.add_argument("--quick", action="store_true", help="a network of a few steps")
    options = parser.parse_args()
    started = time.perf_counter()
    steps = 10 if options.quick else 0
    folder = options.network.with_name(f"{options.network.name}-quick")
    if not options.quick:
        folder = options.network
    trained = train(PRESET, out=folder, device="cpu", max_steps=steps)
    classifier = fdbd.Classifier(trained.model.eval())

    training = seen_by(classifier, *images_of("cifar10", "train"))
    known = seen_by(classifier, *images_of("cifar10", "test"))
    order = torch.randperm(len(known.labels), generator=torch.Generator().manual_seed(0))
    calibration = order[: len(order) // 2]
    test = order[len(order) // 2 :]
    outside = {}
    for name in OUTSIDE:
        images, _ = images_of(name, "test")
        outside[name] = seen_by(classifier, images, torch.full((len(images),), -1)).batch
    outside["one texture, three known parts"] = seen_by(classifier, *one_unknown()).batch

    rows = []
    for name, parameters in DETECTORS.items():
        detector = fdbd.create(name.partition(",")[0], **parameters)
        guard = fdbd.Guard(classifier.head, detector)
        guard.fit([training.batch], progress=False)
        guard.calibrate([known.batch.rows(calibration)], alpha=ALPHA, progress=False)
        rows.append([name, *cells(guard, known.batch.rows(test), outside)])
    sizes = ", ".join(f"{len(batch.features):,} of {name}" for name, batch in outside.items())
    lines = [
        f"`FDBD_DATA=FOLDER python benchmarks/many_labels.py`: network of `fdbd train {PRESET}` "
        f"({preset(PRESET).epochs} epoch), fitted on {len(training.labels):,} composites of "
        f"training images, calibrated on {len(calibration):,} of test images, tested on "
        f"{len(test):,} others; out-of-distribution {sizes}. α = {ALPHA}. "
        f"{(time.perf_counter() - started) / 60:.0f} minutes.",
        "",
        quality(known, test),
        "",
        "In percent: composites of test images flagged; then AUROC / FPR95 (in-distribution "
        "positive), and in brackets how many are flagged.",
        "",
        table(["detector", "false alarms", *outside], rows),
    ]
    if writes(options.quick):
        write_section("Several labels: composites of CIFAR-10", "\n".join(lines))
    else:
        print("\n".join(lines))


def images_of(name: str, split: str) -> tuple[np.ndarray, Tensor]:
    """Images (N, 32, 32, 3), in a random order, and labels; a number that fills its composites."""
    found = load(name, split)
    labels = np.zeros(len(found), np.int64) if found.labels is None else found.labels
    order = np.random.default_rng(0).permutation(len(found))
    order = order[: len(order) // PARTS * PARTS]
    return np.asarray(found.images)[order], torch.from_numpy(labels[order])


def one_unknown() -> tuple[np.ndarray, Tensor]:
    """The test images with every fourth replaced by a texture, as many as there are textures."""
    images, labels = images_of("cifar10", "test")
    textures, _ = images_of("textures32", "test")
    places = np.arange(len(textures)) * PARTS
    images = images[: PARTS * len(textures)].copy()
    labels = labels[: PARTS * len(textures)].clone()
    images[places] = textures
    labels[places] = -1
    return images, labels


@torch.inference_mode()
def seen_by(classifier: fdbd.Classifier, images: np.ndarray, labels: Tensor) -> Seen:
    """Features and logits of the composites of these images."""
    parts = [classifier(batch) for batch in _pictures(images)]
    features = torch.cat([part.features for part in parts])
    logits = torch.cat([part.logits for part in parts])
    return Seen(fdbd.Batch(features, logits), composite_labels(labels, CLASSES))


def _pictures(images: np.ndarray) -> Iterator[Tensor]:
    recipe = preset(PRESET)
    mean = torch.tensor(recipe.mean)[:, None, None]
    std = torch.tensor(recipe.std)[:, None, None]
    for start in range(0, len(images), PARTS * BATCH):
        pixels = torch.from_numpy(np.ascontiguousarray(images[start : start + PARTS * BATCH]))
        scaled = pixels.permute(0, 3, 1, 2).float() / 255
        pictures = composites((scaled - mean) / std)
        yield pictures.contiguous(memory_format=torch.channels_last)


def quality(known: Seen, test: Tensor) -> str:
    """How good the network itself is, in one sentence."""
    logits = known.batch.rows(test).logits
    assert logits is not None
    truth = known.labels[test]
    precisions = [
        average_precision_score(truth[:, label], logits[:, label]) for label in range(CLASSES)
    ]
    is_right = (logits > 0) == truth.bool()
    return (
        f"The network: mean average precision {100 * np.mean(precisions):.1f} %, "
        f"{100 * is_right.float().mean():.1f} % of the labels right, "
        f"{100 * is_right.all(dim=1).float().mean():.1f} % of the sets."
    )


def cells(guard: fdbd.Guard, test: fdbd.Batch, outside: dict[str, fdbd.Batch]) -> list[str]:
    """False alarms, and AUROC, FPR95 and flagged share of each set."""
    inside = guard.decide(test)
    found = [f"{100 * inside.is_ood.double().mean():.1f}"]
    for batch in outside.values():
        decision = guard.decide(batch)
        measured = evaluate(inside.scores, decision.scores)
        flagged = 100 * decision.is_ood.double().mean()
        found.append(f"{100 * measured.auroc:.2f} / {100 * measured.fpr95:.1f} ({flagged:.0f})")
    return found


if __name__ == "__main__":
    main()
