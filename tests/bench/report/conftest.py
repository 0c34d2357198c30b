"""A small benchmark on synthetic features, with names that would break a page that trusts them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fdbd.bench import Results
from fdbd.bench.rows import Latency
from fdbd.bench.runner import Benchmark
from fdbd.core.batch import Head
from fdbd.data.features import FeatureSet
from fdbd.detectors import FDBD, MSP, Detector, Energy, Paper

HOSTILE = '</script><img src="https://example.org/x.png" onerror=alert(1)>&amp;\u2028 "\'$title'


class Unfittable(Detector):
    """Fails, to show that the report says so."""

    def passes(self, head: Head):  # type: ignore[no-untyped-def]
        raise ValueError(f"cannot be fitted <b>here</b> {HOSTILE}")
        yield


class Hostile(MSP):
    name = ""
    paper = Paper(HOSTILE, "Nobody", "<i>Nowhere</i>", 2024)


def make_benchmark(
    names: tuple[str, ...] = ("near set", "far set", HOSTILE), **options: object
) -> Benchmark:
    """Four classes in six dimensions; OOD features lie nearer to the boundaries the later the
    set."""
    generator = torch.Generator().manual_seed(0)

    def features(count: int, strength: float) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.arange(count) % 4
        centres = torch.eye(4, 6)[labels] * strength
        return centres + 0.8 * torch.randn(count, 6, generator=generator), labels

    head = Head(torch.eye(4, 6), torch.zeros(4))
    train = FeatureSet("train", *features(400, 4.0))
    test = FeatureSet("inside", *features(300, 4.0))
    ood = [FeatureSet(name, features(150, 2.5 / (k + 1))[0]) for k, name in enumerate(names)]
    return Benchmark(head, train, test, ood, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def hostile() -> str:
    return HOSTILE


@pytest.fixture(scope="session")
def build() -> Callable[..., Benchmark]:
    return make_benchmark


@pytest.fixture(scope="session")
def benchmark_() -> Benchmark:
    return make_benchmark(
        title=f"A test {HOSTILE}",
        notes=[f"Data: synthetic {HOSTILE}"],
        groups={"near": ["near set"], "far": ["far set", HOSTILE]},
        forward=lambda size: Latency(size, 1e-3, 2e-3),
    )


@pytest.fixture(scope="session")
def results(benchmark_: Benchmark) -> Results:
    detectors = [
        FDBD(),
        FDBD(normalizer=None),
        MSP(),
        Energy(),
        "maxlogit",
        "react+energy",
        Hostile(),
        Unfittable(),
    ]
    return benchmark_.run(detectors, progress=False)
