"""Guards of a head of scaled cosines on real images.

    FDBD_DATA=FOLDER python benchmarks/cosine_head.py [--quick]

The zoo's contrastive CIFAR-10 network gets a `fdbd.networks.CosineHead` with the scale 16 in place
of its linear layer; the head is trained by cross-entropy, the rest of the network stays as it is.
The guards are fitted on the training images, and calibrated and tested on one half of the test
images each. Out-of-distribution are textures, digits of SVHN and MNIST.

Ends as a section of RESULTS.md.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from _common import table, write_section, writes
from torch import Tensor

import fdbd
from fdbd.data import load
from fdbd.metrics.evaluation import evaluate
from fdbd.networks import CosineHead, zoo, zoo_card
from fdbd.train.objectives import head_of, set_head

NETWORK = "cifar10-supcon"
CLASSES = 10
SCALE = 16.0
EPOCHS = 10
ALPHA = 0.05
BATCH = 256
OUTSIDE = ("textures32", "svhn", "mnist")
DETECTORS = ("fdbd", "msp", "energy", "mcm", "knn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer images")
    options = parser.parse_args()
    started = time.perf_counter()
    limit = 2_000 if options.quick else None
    training, labels = images_of("cifar10", "train", limit)
    model = zoo(NETWORK).to(memory_format=torch.channels_last)
    fitted_on = seen_by(fdbd.Classifier(model), training)
    name, _ = head_of(model)
    set_head(model, name, trained_head(fitted_on.features, labels))
    # From here on the features are directions.
    classifier = fdbd.Classifier(model)
    directions = F.normalize(fitted_on.features)
    torch.testing.assert_close(seen_by(classifier, training[:BATCH]).features, directions[:BATCH])

    test_images, test_labels = images_of("cifar10", "test", limit)
    known = seen_by(classifier, test_images)
    half = len(test_images) // 2
    assert known.logits is not None
    is_right = known.logits[half:].argmax(dim=1) == test_labels[half:]
    outside = {}
    for name in OUTSIDE:
        images, _ = images_of(name, "test", limit)
        outside[name] = seen_by(classifier, images)

    rows = []
    for name in DETECTORS:
        guard = fdbd.Guard(classifier.head, name)
        guard.fit([fdbd.Batch(directions)], progress=False)
        guard.calibrate([known.rows(slice(half))], alpha=ALPHA, progress=False)
        rows.append([name, *cells(guard, known.rows(slice(half, None)), outside)])
    sizes = ", ".join(f"{len(batch.features):,} of {name}" for name, batch in outside.items())
    lines = [
        f"`FDBD_DATA=FOLDER python benchmarks/cosine_head.py`: `{NETWORK}` with a cosine head of "
        f"scale {SCALE:g} trained on its frozen features, fitted on {len(training):,} training "
        f"images, calibrated on {half:,} test images, tested on {len(test_images) - half:,} "
        f"others; out-of-distribution {sizes}. α = {ALPHA}. "
        f"{(time.perf_counter() - started) / 60:.0f} minutes.",
        "",
        f"The network: {100 * is_right.float().mean():.1f} % of the test images right.",
        "",
        "In percent: test images flagged; then AUROC / FPR95 (in-distribution positive), and in "
        "brackets how many are flagged.",
        "",
        table(["detector", "false alarms", *outside], rows),
    ]
    if writes(options.quick):
        write_section("Cosine head: CIFAR-10", "\n".join(lines))
    print("\n".join(lines))


def images_of(name: str, split: str, limit: int | None) -> tuple[np.ndarray, Tensor]:
    """At most `limit` images (N, 32, 32, 3), in a random order, and their labels; −1 if there are
    none."""
    with warnings.catch_warnings():
        # A part of SVHN's test images is enough here; the table says how many there were.
        warnings.simplefilter("ignore")
        found = load(name, split)
    labels = np.full(len(found), -1) if found.labels is None else found.labels
    order = np.random.default_rng(0).permutation(len(found))[:limit]
    return np.asarray(found.images)[order], torch.from_numpy(labels[order])


def trained_head(features: Tensor, labels: Tensor) -> CosineHead:
    """A cosine head that cross-entropy has trained on these features (N, P)."""
    torch.manual_seed(0)
    head = CosineHead(torch.randn(CLASSES, features.shape[1]), SCALE)
    head.weight.requires_grad_(True)
    optimiser = torch.optim.Adam(head.parameters(), 1e-2)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(features)).split(BATCH):
            loss = F.cross_entropy(head(features[rows]), labels[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    head.weight.requires_grad_(False)
    return head


def normalised(pixels: np.ndarray) -> Tensor:
    """(N, H, W, 3) bytes as the network takes them."""
    images = zoo_card(NETWORK).preprocess.normalise(np.ascontiguousarray(pixels))
    return images.contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def seen_by(classifier: fdbd.Classifier, images: np.ndarray) -> fdbd.Batch:
    """Features and logits of these images."""
    parts = [classifier(normalised(pixels)) for pixels in _batches(images)]
    features = torch.cat([part.features for part in parts])
    return fdbd.Batch(features, torch.cat([part.logits for part in parts]))


def _batches(images: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(images), BATCH):
        yield images[start : start + BATCH]


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
