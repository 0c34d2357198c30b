"""The latency columns of the paper's Tables 1 and 2, to be run by someone with a GPU (the paper's
is a Tesla T4): milliseconds per image of a network alone, and of the network with a detector.

    python benchmarks/gpu.py                 # on CUDA; prints a Markdown table
    python benchmarks/gpu.py --device cpu    # the same on the CPU, to try the script

Weights are random: latency does not depend on them. Features of the bank of KNN, and all training
data, are random too. The output has one row per detector:

    | CIFAR-10, ResNet-18, batch 128, Tesla T4 | ms per image | above the network, ms |
    |---|---|---|
    | network alone | … | |
    | msp | … | … |

What is above the network is the median over rounds of the difference within a round. Each call ends
with one synchronisation; inside a score there is none, so that the host runs ahead of the device.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import fdbd
from fdbd.fitting.sample_size import FewSamplesWarning

DETECTORS: dict[str, dict[str, object]] = {
    "msp": {},
    "energy": {},
    "fdbd": {},
    "mds": {},
    "vim": {},
    "knn": {"k": 50},
}


class Setting(NamedTuple):
    """A network of the paper, with the size of its images and the samples in KNN's bank."""

    title: str
    network: str
    classes: int
    pixels: int
    bank: int


SETTINGS = (
    Setting("CIFAR-10, ResNet-18", "resnet18", 10, 32, 50_000),
    Setting("ImageNet, ResNet-50", "resnet50", 1000, 224, 12_811),
)


def finish(device: torch.device) -> None:
    """Wait until the device has done all that it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """The time that one call takes, to its end on the device."""
    finish(device)
    start = time.perf_counter()
    call()
    finish(device)
    return time.perf_counter() - start


def fitted_guards(
    setting: Setting, classifier: fdbd.Classifier, device: torch.device
) -> dict[str, fdbd.Guard]:
    """A guard for each detector, fitted on random features of the size that the paper's has."""
    head = classifier.head
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(setting.bank, head.num_features, generator=generator).relu()
    labels = torch.arange(setting.bank) % head.num_classes
    guards = {}
    for name, options in DETECTORS.items():
        detector = fdbd.create(name, **options)
        detector.fit(fdbd.Batch(features, None, labels), head.cpu())
        guards[name] = fdbd.Guard(classifier, detector.to(device))
    return guards


def table(setting: Setting, device: torch.device, batch: int, rounds: int) -> str:
    """The Markdown table of one network."""
    model = fdbd.networks.create(setting.network, num_classes=setting.classes)
    classifier = fdbd.Classifier(model.eval().to(device))
    guards = fitted_guards(setting, classifier, device)
    images = torch.randn(batch, 3, setting.pixels, setting.pixels, device=device)
    alone: list[float] = []
    above: dict[str, list[float]] = {name: [] for name in guards}
    with torch.inference_mode():
        for number in range(rounds + 3):
            of_network = seconds(lambda: classifier(images), device)
            # The first rounds choose algorithms and fill caches.
            if number < 3:
                for guard in guards.values():
                    guard.score(images)
                continue
            alone.append(of_network)
            for name, guard in guards.items():
                above[name].append(seconds(lambda: guard.score(images), device) - of_network)  # noqa: B023
    return _rendered(setting, device, batch, statistics.median(alone), above)


def _rendered(
    setting: Setting, device: torch.device, batch: int, alone: float, above: dict[str, list[float]]
) -> str:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    per_image = 1e3 / batch
    lines = [
        f"| {setting.title}, batch {batch}, {where} | ms per image | above the network, ms |",
        "|---|---|---|",
        f"| network alone | {alone * per_image:.4f} | |",
    ]
    for name, differences in above.items():
        more = statistics.median(differences)
        lines.append(f"| {name} | {(alone + more) * per_image:.4f} | {more * per_image:+.4f} |")
    return "\n".join(lines)


def fused_kernels(device: torch.device) -> int:
    """How many kernels torch.compile makes of fDBD's score with logits given."""
    from torch._inductor.utils import run_and_get_code

    head = fdbd.Head(torch.randn(10, 512))
    features = torch.randn(64, 512)
    detector = fdbd.FDBD().fit(fdbd.Batch(features), head).to(device)

    def score(features: Tensor, logits: Tensor) -> Tensor:
        return detector.score(fdbd.Batch(features, logits))

    compiled = torch.compile(score, fullgraph=True)
    logits = head(features)
    _, sources = run_and_get_code(compiled, features.to(device), logits.to(device))
    return sum(source.count("= async_compile.") for source in sources)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", choices=[setting.network for setting in SETTINGS])
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu tries the script")
    device = torch.device(options.device)
    warnings.simplefilter("ignore", FewSamplesWarning)
    for setting in SETTINGS:
        if options.only in (None, setting.network):
            print(table(setting, device, options.batch, options.rounds), end="\n\n")
    print(f"torch.compile makes {fused_kernels(device)} kernel(s) of fDBD's score.")


if __name__ == "__main__":
    main()
