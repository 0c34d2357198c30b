"""Where the time of one sample goes: what each step of a guard costs beside its network.

    python benchmarks/batch_one.py [--threads 1] [--seconds 2] [--networks NAME …] [--no-write]

Steps take turns, and are timed as CPU time of the calling thread, so that other work on the machine
moves them little. Each step runs once per turn behind the network, as it does in a guard: the
network has emptied the caches by then, and a step takes several times as long as in a loop of its
own. Writes the section "One sample" of RESULTS.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from _common import machine, seconds_text, table, verdict, write_section
from torch import Tensor, nn

import fdbd
from fdbd.networks.classifier import sum_in_sight

OFTEN = 200
"""Calls per turn of the steps that stand alone."""
LIMITS = {"resnet20": 5.0, "torchvision:resnet50": 1.0}
"""Percent by which a guard may be slower than its network."""
ROW_LIMIT = 12e-6
"""Seconds that a score of one row of 64 features may take."""

Steps = dict[str, Callable[[], object]]


def in_turns(steps: Steps, seconds: float, calls: int, before: Callable[[], object]) -> Any:
    """Seconds of CPU time per call, by step and turn; `before` runs ahead of each step."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    end = time.perf_counter() + seconds * len(steps)
    while time.perf_counter() < end or len(next(iter(found.values()))) < 5:
        for name, step in steps.items():
            before()
            start = time.thread_time_ns()
            for _ in range(calls):
                step()
            found[name].append((time.thread_time_ns() - start) / calls / 1e9)
    return found


def features_alone(seconds: float) -> tuple[list[list[str]], list[str]]:
    """One row of 64 features with its logits, without a network."""
    torch.manual_seed(0)
    head = fdbd.Head(torch.randn(10, 64), torch.randn(10))
    guard = fdbd.Guard(head).fit([fdbd.Batch(torch.rand(500, 64))], progress=False)
    guard.calibrate([fdbd.Batch(torch.rand(500, 64))], progress=False)
    features = torch.rand(1, 64)
    batch = fdbd.Batch(features, head(features))
    steps: Steps = {
        "a torch operation": lambda: features + features,
        "detector.score": lambda: guard.detector.score(batch),
        "guard.decide": lambda: guard.decide(batch),
    }
    with torch.no_grad():
        found = in_turns(steps, seconds / 4, OFTEN, lambda: None)
    rows = []
    for name, times in found.items():
        rows.append(["one row of 64 features", name, seconds_text(min(times)), ""])
    score = min(found["detector.score"])
    if score <= ROW_LIMIT:
        return rows, []
    return rows, [f"a score of one row takes {seconds_text(score)}, not {seconds_text(ROW_LIMIT)}"]


def steps_of(
    name: str, model: nn.Module, image: Tensor, seconds: float
) -> tuple[list[list[str]], list[str]]:
    """The steps of a guard on one image, each behind the network."""
    guard = fdbd.Guard(model).fit([torch.randn(64, *image.shape[1:])], progress=False)
    guard.calibrate([torch.randn(64, *image.shape[1:])], progress=False)
    classifier: Any = guard.classifier
    stages = guard.stages
    inputs = stages.record.inputs
    assert inputs is not None
    with torch.no_grad():
        batch = classifier(image)
        seen = stages.observe(image)
        total = sum_in_sight(image)
        steps: Steps = {
            "model": lambda: model(image),
            "classifier": lambda: classifier(image),
            "guard": lambda: guard(image),
            "sum of pixels": lambda: sum_in_sight(image),
            "range of pixels": lambda: inputs.is_missed_by(image, total),
            "score": lambda: guard.detector.score(batch),
            "decision": lambda: stages.decision(seen.logits, seen.scores),
        }
        found = in_turns(steps, seconds, 1, lambda: model(image))
    rows = [[name, step, seconds_text(statistics.median(found[step])), ""] for step in found]
    pairs = zip(found["guard"], found["model"])
    extra = statistics.median(guarded - alone for guarded, alone in pairs)
    percent = 100 * extra / statistics.median(found["model"])
    rows.append([name, "guard − model", seconds_text(extra), f"{percent:.1f} %"])
    limit = LIMITS.get(name)
    if limit is None or percent <= limit:
        return rows, []
    return rows, [f"a guard on {name} takes {percent:.1f} % longer, not {limit:g} %"]


def network(name: str) -> tuple[nn.Module, int]:
    """A network with random weights, and the side of its images."""
    torch.manual_seed(0)
    if not name.startswith("torchvision:"):
        return fdbd.networks.create(name).eval(), 32
    from torchvision import models

    model: nn.Module = models.get_model(name.partition(":")[2], weights=None)
    return model.eval(), 224


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="per step")
    parser.add_argument("--networks", nargs="*", default=list(LIMITS))
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # 64 calibration samples are few, and enough here.
    warnings.simplefilter("ignore")
    rows, missed = features_alone(options.seconds)
    for name in options.networks:
        model, size = network(name)
        image = torch.randn(1, 3, size, size)
        more, also_missed = steps_of(name, model, image, options.seconds)
        rows += more
        missed += also_missed
    text = (
        f"`python benchmarks/batch_one.py`: CPU time of the calling thread, {options.threads} torch "
        "thread, steps in turns. Steps of a guard run behind a call of its network, with the caches "
        "as that leaves them: medians. A single row: the least mean of "
        f"{OFTEN} calls. {machine()}\n\n"
        + table(["of", "step", "CPU time", "of the network"], rows)
        + "\n"
        + verdict(missed)
    )
    print(text)
    if not options.no_write:
        write_section("One sample", text)


if __name__ == "__main__":
    main()
