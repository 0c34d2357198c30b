"""What ``Guard(model, "auto")`` costs: the score of the whole pool and of typical choices, relative
to one forward pass of ResNet-50 in batches of 32, and the images that a fit runs through the
network.

    python benchmarks/choice.py          a few minutes on two cores; updates RESULTS.md
    python benchmarks/choice.py --quick  fewer rounds, nothing written
"""

from __future__ import annotations

import argparse
import warnings

import torch
from _common import interleaved, machine, table, verdict, write_section, writes
from torch import nn

import fdbd
from fdbd import Batch, Head
from fdbd.decision.choice_rule import POOL, make_member
from fdbd.networks.public import ImageNetResNet50

BATCH = 32
NUM_FEATURES = 2048
NUM_CLASSES = 1000
NUM_TRAINING = 5000
MOST = 0.05
"""Largest share of a forward pass that the score may take."""
MOST_PASSES = 1.3
"""Images through the network in a fit, relative to those of a plain fit, without the kinds."""


def make_features(count: int, seed: int) -> torch.Tensor:
    """Non-negative features with the spectrum of a covariance that falls, as a network's do."""
    generator = torch.Generator().manual_seed(seed)
    scales = 1 / torch.arange(1, NUM_FEATURES + 1).float().sqrt()
    mixing = torch.randn(NUM_FEATURES, NUM_FEATURES, generator=torch.Generator().manual_seed(99))
    latent = torch.randn(count, NUM_FEATURES, generator=generator) * scales
    return (latent @ mixing / 8).relu()


def make_ensembles() -> dict[str, fdbd.Ensemble]:
    """The whole pool, it without banks, and the six that data without images get."""
    head = Head(torch.randn(NUM_CLASSES, NUM_FEATURES) / 45)
    training = Batch(make_features(NUM_TRAINING, 1))
    held_out = Batch(make_features(300, 2))
    without_banks = [name for name in POOL if name not in ("knn", "nnguide")]
    choices = {
        f"the whole pool, {len(POOL)} members": POOL,
        f"without banks, {len(without_banks)} members": without_banks,
        "six members with equal weights": fdbd.Auto().specs(can_be_weighed=False),
        "fdbd alone": ("fdbd", "energy"),
    }
    found = {}
    for title, names in choices.items():
        members = [make_member(name, NUM_TRAINING) for name in names]
        ensemble = fdbd.Ensemble(members, "fisher").fit(training, head)
        found[title] = ensemble.calibrate(held_out)
    return found


class Counting(nn.Module):
    """A small classifier that counts the images that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.head = nn.Linear(64, 10)
        self.images = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.images += len(images)
        logits: torch.Tensor = self.head(self.layers(images).flatten(1))
        return logits


def count_passes() -> tuple[int, int, int]:
    """Images through the network: of a plain fit and calibration, of "auto", and of its kinds."""
    training = torch.rand(2000, 3, 32, 32)
    fresh = torch.rand(1000, 3, 32, 32)
    counts = []
    for detector in ("fdbd", "auto"):
        model = Counting().eval()
        guard = fdbd.Guard(model, detector).fit([training]).calibrate([fresh])
        counts.append(model.images)
    assert guard.choice is not None
    return counts[0], counts[1], sum(guard.choice.per_kind.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, nothing written")
    quick = parser.parse_args().quick
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    network = ImageNetResNet50().eval()
    images = torch.rand(BATCH, 3, 224, 224)
    ensembles = make_ensembles()
    batch = Batch(make_features(BATCH, 3))
    batch = batch._replace(logits=next(iter(ensembles.values())).head(batch.features))
    fdbd_alone = ensembles.pop("fdbd alone").members[0]
    contenders = {"forward pass": lambda: network(images), "fdbd": lambda: fdbd_alone.score(batch)}
    for title, ensemble in ensembles.items():
        contenders[title] = lambda ensemble=ensemble: ensemble.score(batch)
    with torch.no_grad():
        timings = interleaved(contenders, rounds=2 if quick else 5, calls=1)
    missed = []
    rows = []
    for title in ["fdbd", *ensembles]:
        ratio = timings.ratio(title, "forward pass")
        rows.append([title, f"{1e6 * timings.seconds(title) / BATCH:.0f} µs", f"{ratio:.2%}"])
        if ratio > MOST:
            missed.append(f"{title} takes {ratio:.1%} of a forward pass, at most {MOST:.0%}")
    plain, auto, kinds = count_passes()
    passes = (auto - kinds) / plain
    if passes > MOST_PASSES:
        missed.append(f"a fit takes {passes:.2f} times the images of a plain one")
    text = "\n".join(
        [
            f"Per sample in batches of {BATCH}, {NUM_FEATURES} features, {NUM_CLASSES} classes, "
            f"banks of {NUM_TRAINING} samples; {machine()}",
            "",
            table(["score", "time", "of a forward pass of ResNet-50"], rows),
            "",
            f'Images through the network: {plain:,} for fdbd, {auto:,} for "auto", {kinds} of them '
            f"pseudo-OOD images: {passes:.2f} times those of a plain fit and calibration, without "
            "the latter.",
            "",
            verdict(missed),
        ]
    )
    print(text)
    if writes(quick):
        write_section("Guard with auto", f"`benchmarks/choice.py`.\n\n{text}")


if __name__ == "__main__":
    main()
