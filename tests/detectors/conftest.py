"""Toy classification problems for detectors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fdbd import Batch, Head

Problem = Callable[..., tuple[Batch, Batch, Head]]


@pytest.fixture(scope="session")
def problem() -> Problem:
    """Training batch, query batch (half of it unlike the training data) and head of a problem that
    is learnable but not separable. Features are not negative, as after a ReLU, and logits have mean
    0, as networks learn them."""

    def make(
        classes: int = 5,
        width: int = 8,
        samples: int = 300,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> tuple[Batch, Batch, Head]:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        centers = 4 * torch.nn.functional.normalize(normal(classes, width).relu() + 1e-3)
        labels = torch.randint(0, classes, (samples,), generator=generator)
        features = (centers[labels] + 0.8 * normal(samples, width)).relu()
        known = (centers[labels[:20]] + 0.8 * normal(min(20, samples), width)).relu()
        queries = torch.cat([known, (1.5 * normal(20, width)).relu()])
        head = Head((centers - centers.mean(dim=0)).to(dtype), (0.1 * normal(classes)).to(dtype))
        return Batch(features.to(dtype), None, labels), Batch(queries.to(dtype)), head

    return make
