"""Inputs to trace and verify an exported graph on: the user's, or noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fdbd.core.batch import Batch
from fdbd.data.features import Widths, holds_features, open_features
from fdbd.data.images import decode
from fdbd.decision.guard_file import OpenedGuard

ROWS = 4


def example_for(opened: OpenedGuard, source: Path | None) -> Tensor | Batch:
    """A few rows of what the guard takes: an image and noisy copies, the first features of a file, or noise."""
    width = opened.guard.detector.head.num_features
    if opened.preprocess is None:
        if source is None:
            return Batch(torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0)).abs())
        if not holds_features(str(source)):
            raise ValueError(f"{str(source)!r} is no file of features, and the graph takes features")
        rows, widths = open_features(source), Widths.of(opened.guard.detector.head)
        rows.check(widths)
        first = next(iter(rows.read(rows.spans(1)[0], widths)), None) if len(rows) else None
        if first is None or not isinstance(first.inputs, Batch) or not len(first.inputs.features):
            raise ValueError(f"{str(source)!r} holds no features to verify the graph on")
        return Batch(first.inputs.features[:ROWS].clone())
    size = opened.preprocess.size
    noise = np.random.default_rng(0).integers(0, 256, (ROWS, size, size, 3), np.uint8)
    if source is None:
        return opened.preprocess(noise)
    return opened.preprocess([decode(source), *noise[1:]])
