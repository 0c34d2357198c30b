"""Toy classification problems for detectors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fdbd import Batch, Head

Problem = Callable[..., tuple[Batch, Batch, Head]]


@pytest.fixture(scope="session")
def problem() -> Problem:
    """Training batch, query batch (half of it unlike the training data) and head of a problem that is learnable but not
    separable; features are not negative, as after a ReLU."""

    def make(
        classes: int = 5, width: int = 8, samples: int = 300, seed: int = 0, dtype: torch.dtype = torch.float64
    ) -> tuple[Batch, Batch, Head]:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        centers = 1.5 * normal(classes, width).abs()
        labels = torch.randint(0, classes, (samples,), generator=generator)
        features = (centers[labels] + 0.8 * normal(samples, width)).relu()
        known = (centers[labels[:20]] + 0.8 * normal(min(20, samples), width)).relu()
        queries = torch.cat([known, (1.5 * normal(20, width)).relu()])
        weight, bias = centers, 0.1 * normal(classes) - centers.square().sum(dim=1) / 2
        head = Head(weight.to(dtype), bias.to(dtype))
        return Batch(features.to(dtype), None, labels), Batch(queries.to(dtype)), head

    return make
