"""Timing of score stages and of networks, on the machine at hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fdbd.bench.rows import Latency
from fdbd.core.batch import Batch
from fdbd.data.features import FeatureSet
from fdbd.detectors import Detector
from fdbd.networks.classifier import Classifier
from fdbd.util.devices import device_of

BATCH_SIZES = (1, 256)
"""Batch sizes at which scores are timed."""
TRIED_BATCH_SIZES = (8, 32, 128)
"""Batch sizes that are tried for the passes of a network over a dataset."""
MOST_CALLS = 2000
# Several batches of samples are scored in turn: they begin ROWS_BETWEEN rows apart, among the first
# ROWS_USED rows.
ROWS_BETWEEN = 256
ROWS_USED = 4096


def time_score(
    detector: Detector, samples: FeatureSet, batch_size: int, budget: float = 0.15
) -> Latency:
    """Time `detector.score` on batches of the samples with their logits at hand, for about `budget`
    seconds.

    Logits are part of the forward pass of any classifier, so computing them is not charged to the
    detector.
    """
    last = max(len(samples) - batch_size, 0)
    batches = []
    for start in range(0, min(last + 1, ROWS_USED), ROWS_BETWEEN):
        batch = samples.rows(slice(start, start + batch_size))
        if batch.logits is None:
            batch = batch._replace(logits=detector.head(batch.features))
        batches.append(batch)
    count = len(batches[0].features)
    seconds = timed(detector.score, batches, count, budget, fewest=7)
    return Latency.from_calls(batch_size, seconds)


def measure_forward(
    network: Classifier,
    shape: tuple[int, int, int],
    batch_size: int,
    budget: float = 0.5,
    fewest: int = 3,
) -> Latency:
    """Time the network's forward pass on images of zeros of this shape (channels, height, width),
    on its device, for about `budget` seconds and at least `fewest` calls."""
    images = torch.zeros(batch_size, *shape, device=device_of(network.model))
    return Latency.from_calls(batch_size, timed(network, [images], batch_size, budget, fewest))


def choose_batch_size(network: Classifier, shape: tuple[int, int, int], most: int) -> int:
    """Images per forward pass: the fastest per image of a few sizes, each tried once after a
    warm-up. A larger size is not tried if the last one was not faster, so that slow networks are
    not held up; nor is one above `most`, the images of the largest pass."""
    smallest, *larger = TRIED_BATCH_SIZES
    if most <= smallest:
        return smallest
    best = measure_forward(network, shape, smallest, budget=0, fewest=2)
    for size in larger:
        if size > most:
            break
        timing = measure_forward(network, shape, size, budget=0, fewest=2)
        if timing.median > 0.95 * best.median:
            break
        best = timing
    return best.batch_size


@torch.inference_mode()
def timed(
    call: Callable[[Any], Any], inputs: Sequence[Any], count: int, budget: float, fewest: int
) -> list[float]:
    """Seconds per sample of each call on `count` samples, for about `budget` seconds, after one
    that does not count."""

    def run(number: int) -> float:
        start = time.perf_counter()
        output = call(inputs[number % len(inputs)])
        values = output.features if isinstance(output, Batch) else output
        if values.device.type != "cpu":
            # Wait for a device that computes on its own.
            values.flatten()[:1].cpu()
        return (time.perf_counter() - start) / count

    run(0)
    found: list[float] = []
    end = time.perf_counter() + budget
    while len(found) < fewest or (time.perf_counter() < end and len(found) < MOST_CALLS):
        found.append(run(len(found)))
    return found
