"""Images through a network, one shard of features after another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fdbd.data.decoding import Failure, prepare
from fdbd.data.images import Images, cut
from fdbd.data.preprocessing import Preprocess
from fdbd.networks.classifier import Classifier
from fdbd.util.devices import device_of

Arrays = dict[str, NDArray[Any]]
Progress = Callable[[int, int], None]
"""Called with the images done so far, and in all."""


def extract(
    classifier: Classifier,
    images: Images,
    preprocess: Preprocess,
    shards: Sequence[range],
    batch_size: int,
    dtype: str,
    progress: Progress | None,
) -> Generator[tuple[Arrays, list[Failure]], None, None]:
    """Runs the network over these shards, which are ranges of rows.

    Arrays are ``features`` (N, P) and ``layer:NAME`` (N, P_layer), without the rows that cannot be decoded.
    """
    done = len(images) - sum(map(len, shards))
    parts: list[Arrays] = []
    failures: list[Failure] = []
    stops = {shard.stop for shard in shards}
    spans = [span for shard in shards for span in cut(shard, batch_size)]
    pin = device_of(classifier.model).type == "cuda"
    with contextlib.closing(prepare(images.images, preprocess, spans, pin=pin)) as prepared:
        for batch in prepared:
            is_last = batch.rows.stop in stops
            failures += batch.failures
            if len(batch.inputs) or (is_last and not parts):  # an empty part says how many features there are
                parts.append(_forward(classifier, batch.inputs, preprocess.size, dtype, images.name))
            done += len(batch.rows)
            if progress is not None:
                progress(done, len(images))
            if is_last:
                yield {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, failures
                parts, failures = [], []


def _forward(classifier: Classifier, inputs: Tensor, size: int, dtype: str, name: str) -> Arrays:
    count = len(inputs)
    if not count:
        inputs = torch.zeros(1, 3, size, size)
    with torch.inference_mode():
        batch = classifier(inputs)
    if batch.features.ndim != 2 or len(batch.features) != len(inputs):
        raise ValueError(
            f"the classifier gives features {tuple(batch.features.shape)} for {len(inputs)} images, expected (N, P)"
        )
    arrays = {}
    layers = {f"layer:{key}": layer for key, layer in (batch.layers or {}).items()}
    for key, tensor in {"features": batch.features, **layers}.items():
        values = tensor[:count].cpu()
        stored = values.to(getattr(torch, dtype))
        if dtype == "float16" and (stored.isinf() & values.isfinite()).any():
            raise ValueError(
                f"{key} of {name} reach {float(values.abs().max()):.3g}, too much for float16; use float32"
            )
        arrays[key] = np.ascontiguousarray(stored.numpy())
    return arrays
