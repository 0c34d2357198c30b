"""How long the score stage takes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch

from fdbd.bench.features import FeatureSet
from fdbd.detectors import Detector


@dataclass(frozen=True)
class Latency:
    """Seconds a sample of one detector's score stage, at one batch size."""

    batch_size: int
    median: float
    p95: float

    def to_dict(self) -> dict[str, float]:
        return {"batch_size": self.batch_size, "median": self.median, "p95": self.p95}


def measure(detector: Detector, samples: FeatureSet, batch_size: int, budget: float = 0.15) -> Latency:
    """Time `detector.score` on batches of the samples with their logits at hand, for about `budget` seconds.

    Logits are part of the forward pass of any classifier, so computing them is not charged to the detector.
    """
    batches = [_with_logits(detector, samples, start, batch_size) for start in range(0, min(len(samples), 4096), 256)]
    batches = [batch for batch in batches if batch.features.shape[0] == batch_size] or batches[:1]
    seconds: list[float] = []
    with torch.inference_mode():
        detector.score(batches[0])
        end = time.perf_counter() + budget
        while len(seconds) < 5 or (time.perf_counter() < end and len(seconds) < 2000):
            batch = batches[len(seconds) % len(batches)]
            start = time.perf_counter()
            detector.score(batch)
            seconds.append((time.perf_counter() - start) / batch.features.shape[0])
    seconds.sort()
    return Latency(batch_size, median(seconds), seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))])


def _with_logits(detector: Detector, samples: FeatureSet, start: int, size: int):  # type: ignore[no-untyped-def]
    batch = samples.rows(slice(start, start + size))
    return batch if batch.logits is not None else batch._replace(logits=detector.head(batch.features))
