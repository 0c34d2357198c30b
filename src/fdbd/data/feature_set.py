"""Features of one dataset under one model: what a benchmark is made of."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fdbd.core.batch import Batch

if TYPE_CHECKING:
    from fdbd.data.images import Images


@dataclass(frozen=True)
class FeatureSet:
    """N samples of a dataset as a classifier's head sees them.

    Args:
        name: the dataset's name.
        features: (N, P), any floating dtype; batches come out in float32 (or float64).
        labels: (N,) class indices, where there are any.
        logits: (N, C); None: computed from the head.
        samples: a key of the samples themselves (the images, say), the same under every model; "": not known.
        layers: pooled earlier layers by name, (N, P_layer) each, where there are any.
        images: the samples as images, in the same order, where they are at hand.

    >>> samples = FeatureSet("mine", torch.zeros(5, 2, dtype=torch.float16))
    >>> len(samples), samples.rows(slice(0, 2)).features.dtype
    (5, torch.float32)
    """

    name: str
    features: Tensor
    labels: Tensor | None = None
    logits: Tensor | None = None
    samples: str = ""
    layers: Mapping[str, Tensor] | None = None
    images: Images | None = None

    def __len__(self) -> int:
        return self.features.shape[0]

    @property
    def key(self) -> str:
        """Identifies these samples in this order: `samples`, or a hash of the features."""
        if self.samples:
            return self.samples
        values = self.features.detach().cpu().contiguous().view(torch.uint8)
        return f"features {hashlib.sha256(values.numpy().data).hexdigest()[:32]}"

    def batches(self, size: int = 8192) -> Iterator[Batch]:
        """The samples in order, at most `size` at a time."""
        return (self.rows(slice(start, start + size)) for start in range(0, len(self), size))

    def rows(self, rows: slice | Tensor) -> Batch:
        """Some samples as one Batch."""
        dtype = torch.float64 if self.features.dtype == torch.float64 else torch.float32
        return Batch(self.features, self.logits, self.labels, self.layers).rows(rows).to(dtype=dtype)

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()
