"""Options chosen on validation data: the point of a grid that tells ID from OOD best."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fdbd.data.features import FeatureSet
from fdbd.detectors import Detector, create
from fdbd.metrics import auroc

Grid = Mapping[str, Sequence[object]]
"""Values to try by option; every combination is tried."""


def tune(
    name: str,
    grid: Grid,
    fit: Callable[[Detector], Any],
    validation: FeatureSet,
    ood_validation: FeatureSet,
) -> tuple[Detector, str]:
    """The detector `name` with the options of the grid that have the highest AUROC of `validation`
    against `ood_validation` (the first of equals), unfitted; and these options in words.

    Only these two sets are looked at, never the test sets. `fit` fits a detector on the training
    data. Options that these do not suffice for, such as more neighbours than samples, are left out;
    ValueError if no options are left.
    """
    best = -1.0
    chosen: dict[str, Any] | None = None
    first_error: ValueError | None = None
    for options in points_of(grid):
        candidate = create(name, **options)
        try:
            fit(candidate)
        except ValueError as error:
            first_error = first_error or error
            continue
        with torch.inference_mode():
            inside = torch.cat([candidate.score(batch) for batch in validation.batches()])
            outside = torch.cat([candidate.score(batch) for batch in ood_validation.batches()])
        value = auroc(inside, outside)
        if value > best:
            best = value
            chosen = options
    if chosen is None:
        raise first_error or ValueError(f"the grid of {name} is empty")
    words = ", ".join(f"{name}={value}" for name, value in chosen.items())
    return create(name, **chosen), words


def points_of(grid: Grid) -> Iterator[dict[str, Any]]:
    """Every combination of the grid's values.

    >>> list(points_of({"gamma": [0.1, 1.0], "top": [10]}))
    [{'gamma': 0.1, 'top': 10}, {'gamma': 1.0, 'top': 10}]
    """
    names = list(grid)
    for values in itertools.product(*grid.values()):
        yield dict(zip(names, values))
