"""Where the time of one sample goes: what each step of a guard costs beside its network.

    python benchmarks/batch_one.py [--threads 1] [--seconds 0.5] [--json FILE]

Each step is timed as CPU time of the calling thread, the least mean of several repetitions, so that
other work on the machine moves it little; only ratios and differences within one run mean
something.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fdbd
from fdbd.networks.classifier import rows_finite

REPETITIONS = 7


def microseconds(call: Callable[[], object], seconds: float) -> float:
    """The least mean CPU time of a call."""
    call()
    call()
    started = time.thread_time_ns()
    call()
    one = max(1, time.thread_time_ns() - started)
    loops = max(1, int(seconds * 1e9 / REPETITIONS / one))
    means = []
    for _ in range(REPETITIONS):
        started = time.thread_time_ns()
        for _ in range(loops):
            call()
        means.append((time.thread_time_ns() - started) / loops)
    return min(means) / 1000


def features_alone(seconds: float) -> dict[str, float]:
    """One row of 64 features with its logits, without a network."""
    torch.manual_seed(0)
    head = fdbd.Head(torch.randn(10, 64), torch.randn(10))
    guard = fdbd.Guard(head).fit([fdbd.Batch(torch.rand(500, 64))], progress=False)
    guard.calibrate([fdbd.Batch(torch.rand(500, 64))], progress=False)
    features = torch.rand(1, 64)
    batch = fdbd.Batch(features, head(features))
    with torch.no_grad():
        return {
            "a torch operation": microseconds(lambda: features + features, seconds),
            "detector.score": microseconds(lambda: guard.detector.score(batch), seconds),
            "guard.decide": microseconds(lambda: guard.decide(batch), seconds),
        }


def steps_of(model: nn.Module, image: Tensor, seconds: float) -> dict[str, float]:
    """The steps of a guard on one image."""
    guard = fdbd.Guard(model).fit([torch.randn(64, *image.shape[1:])], progress=False)
    guard.calibrate([torch.randn(64, *image.shape[1:])], progress=False)
    classifier: Any = guard.classifier
    stages = guard.stages
    with torch.no_grad():
        batch = classifier(image)
        seen = stages.observe(image)
        inputs = stages.record.inputs
        assert inputs is not None
        return {
            "model": microseconds(lambda: model(image), seconds),
            "classifier": microseconds(lambda: classifier(image), seconds),
            "finite pixels": microseconds(lambda: rows_finite(image), seconds),
            "range of pixels": microseconds(lambda: inputs.is_missed_by(image), seconds),
            "score": microseconds(lambda: guard.detector.score(batch), seconds),
            "decision": microseconds(lambda: stages.decision(seen.logits, seen.scores), seconds),
            "guard": microseconds(lambda: guard(image), seconds),
        }


def report(name: str, found: dict[str, float]) -> None:
    """A table of one network."""
    print(f"\n{name}")
    for step, value in found.items():
        print(f"  {step:18} {value:10.1f} µs")
    if "model" in found:
        extra = found["guard"] - found["model"]
        print(f"  {'guard − model':18} {extra:10.1f} µs, {100 * extra / found['model']:.1f} %")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5, help="per step")
    parser.add_argument("--networks", nargs="*", default=["resnet20", "torchvision:resnet50"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {platform.machine()}, {options.threads} threads, CPU time")
    results = {"one row of 64 features": features_alone(options.seconds)}
    report("one row of 64 features", results["one row of 64 features"])
    for name in options.networks:
        torch.manual_seed(0)
        size = 224
        if name.startswith("torchvision:"):
            from torchvision import models

            model = models.get_model(name.partition(":")[2], weights=None).eval()
        else:
            model = fdbd.networks.create(name).eval()
            size = 32
        results[name] = steps_of(model, torch.randn(1, 3, size, size), options.seconds)
        report(name, results[name])
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
