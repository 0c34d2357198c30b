"""How long the score stage and the network's forward pass take, measured after a warm-up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fdbd.core.batch import Batch
from fdbd.data.feature_set import FeatureSet
from fdbd.detectors import Detector
from fdbd.networks.classifier import Classifier
from fdbd.results.rows import Latency
from fdbd.util.devices import device_of

FEWEST_CALLS, MOST_CALLS = 7, 2000
BATCH_SIZES = (8, 32, 128)
"""Of which `choose_batch_size` takes one."""


def measure(detector: Detector, samples: FeatureSet, batch_size: int, budget: float = 0.15) -> Latency:
    """Time `detector.score` on batches of the samples with their logits at hand, for about `budget` seconds.

    Logits are part of the forward pass of any classifier, so computing them is not charged to the detector.
    """
    last = max(len(samples) - batch_size, 0)
    batches = [samples.rows(slice(start, start + batch_size)) for start in range(0, min(last + 1, 4096), 256)]
    batches = [b if b.logits is not None else b._replace(logits=detector.head(b.features)) for b in batches]
    count = len(batches[0].features)
    return Latency.of(batch_size, timed(detector.score, batches, count, budget, FEWEST_CALLS))


def measure_forward(network: Classifier, side: int, batch_size: int, budget: float = 0.5, fewest: int = 3) -> Latency:
    """Time the network's forward pass on images of zeros, (3, side, side) each, where it is, for about `budget`
    seconds and at least `fewest` calls."""
    images = torch.zeros(batch_size, 3, side, side, device=device_of(network.model))
    return Latency.of(batch_size, timed(network, [images], batch_size, budget, fewest))


def choose_batch_size(network: Classifier, side: int) -> int:
    """Images per forward pass: the fastest per image of a few sizes, each tried once after a warm-up. A larger one is
    not tried where the last was no gain, so that slow networks are not held up."""
    best = measure_forward(network, side, BATCH_SIZES[0], budget=0, fewest=2)
    for size in BATCH_SIZES[1:]:
        timing = measure_forward(network, side, size, budget=0, fewest=2)
        if timing.median > 0.95 * best.median:
            break
        best = timing
    return best.batch_size


@torch.inference_mode()
def timed(call: Callable[[Any], Any], inputs: Sequence[Any], count: int, budget: float, fewest: int) -> list[float]:
    """Seconds per sample of each call on `count` samples, for about `budget` seconds, after one that does not count."""
    found: list[float] = []
    _finish(call(inputs[0]))
    end = time.perf_counter() + budget
    while len(found) < fewest or (time.perf_counter() < end and len(found) < MOST_CALLS):
        start = time.perf_counter()
        _finish(call(inputs[len(found) % len(inputs)]))
        found.append((time.perf_counter() - start) / count)
    return found


def _finish(output: Any) -> None:
    """Wait for a device that computes on its own."""
    values = output.features if isinstance(output, Batch) else output
    if values.device.type != "cpu":
        values.flatten()[:1].cpu()
