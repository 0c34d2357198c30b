"""Files on Ray: what `fit_files` reads, as datasets whose blocks are read where there is room."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from fdbd.core.batch import Batch
from fdbd.decision.guard import Guard
from fdbd.jobs.fitting import Loader
from fdbd.jobs.ray.fitting import fit
from fdbd.jobs.ray.pool import Workers, quiet
from fdbd.jobs.ray.scoring import calibrate
from fdbd.util.extras import require

INPUTS = "inputs"


def fit_loaders(guard: Guard, training: Loader, calibration: Loader, workers: Workers, **threshold: Any) -> None:
    """Fit and calibrate a guard on the rows of two loaders, which then know how many they gave and left out.

    Args:
        guard: to fit, in place.
        training, calibration: images, or features.
        workers: actors that run the network.
        threshold: `tpr`, `alpha` and `per_class` of `Guard.calibrate`.
    """
    column = "features" if training.preprocess is None else INPUTS
    with quiet():
        for loader, job, options in ((training, fit, {}), (calibration, calibrate, threshold)):
            ledger = _Ledger.start()
            job(guard, _dataset(loader, ledger), column=column, workers=workers, **options)
            loader.num_given, loader.errors = _Ledger.total(ledger)


def _dataset(loader: Loader, ledger: Any) -> Any:
    """The rows of a loader as a Ray Dataset, each span a piece of work."""
    data = require("ray.data", "ray")
    work = [{"span": number} for number in range(len(loader.spans))]
    return data.from_items(work, override_num_blocks=len(work)).map_batches(
        _Read(loader, ledger), batch_size=1, batch_format="pyarrow"
    )


class _Read:
    """The number of a span to its rows: model inputs or features, and labels where there are any."""

    def __init__(self, loader: Loader, ledger: Any) -> None:
        self.loader, self.ledger = loader, ledger

    def __call__(self, work: Any) -> dict[str, Any]:
        [number] = work.column("span").to_pylist()
        loader = copy.copy(self.loader)
        items = list(loader.read([loader.spans[number]], processes=False))
        require("ray", "ray").get(self.ledger.note.remote(number, loader.num_given, loader.errors))
        return _columns(items)


def _columns(items: list[Any]) -> dict[str, Any]:
    """Batches of a loader as one set of columns."""
    if not items:
        return {}
    if isinstance(items[0], Batch):
        parts = {"features": [item.features for item in items]}
        for name, values in (("logits", [i.logits for i in items]), ("label", [i.labels for i in items])):
            if values[0] is not None:
                parts[name] = values
    else:
        parts = {INPUTS: [inputs for inputs, _ in items]}
        if items[0][1] is not None:
            parts["label"] = [labels for _, labels in items]
    return {name: np.ascontiguousarray(torch.cat(values).numpy()) for name, values in parts.items()}


class _Ledger:
    """An actor that notes how many rows each span gave, and what it left out; a span that is read again counts once."""

    def __init__(self) -> None:
        self.notes: dict[int, tuple[int, list[str]]] = {}

    def note(self, span: int, given: int, errors: list[str]) -> None:
        self.notes[span] = given, errors

    def read(self) -> dict[int, tuple[int, list[str]]]:
        return self.notes

    @classmethod
    def start(cls) -> Any:
        ray = require("ray", "ray")
        return ray.remote(num_cpus=0)(cls).remote()

    @staticmethod
    def total(ledger: Any) -> tuple[int, list[str]]:
        """Rows given, and the errors in the order of the rows."""
        notes = require("ray", "ray").get(ledger.read.remote())
        errors = [error for span in sorted(notes) for error in notes[span][1]]
        return sum(given for given, _ in notes.values()), errors
