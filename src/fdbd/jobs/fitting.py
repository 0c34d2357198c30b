"""Fit and calibrate a guard on files: images with a model, or features with a head."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Unpack

from fdbd.core.batch import Batch, Head
from fdbd.core.preprocessing import Preprocess
from fdbd.data.datasets import info
from fdbd.data.features import Widths
from fdbd.data.images import Images, cut
from fdbd.data.inputs import Rows, open_rows
from fdbd.data.labels import as_classes
from fdbd.data.npz import array_names, read_array
from fdbd.decision.guard import Guard
from fdbd.decision.threshold import Target, check_target
from fdbd.jobs.scoring import Engine, read_batches
from fdbd.networks.by_name import NamedModel
from fdbd.networks.checkpoint import read_weights

HOLDOUT = 0.2  # share of the data that is kept for calibration where there are no other data for it
RULE = "calibration data are seen by neither the network's training nor the fit"


class Fitted(NamedTuple):
    """A guard, ready to be saved, and what it was made from."""

    guard: Guard
    training: Loader
    calibrating: Loader  #: of the same rows, where a part of the data of the fit was held out
    cautions: list[str]  #: what to know before the guard is trusted, a sentence each


def fit_files(
    source: NamedModel | Head,
    data: str,
    calibration: str | None = None,
    engine: Engine = Engine(),  # noqa: B008 - it never changes
    *,
    holdout: float | None = None,
    head: str | None = None,
    detector: str = "fdbd",
    autocast: bool = False,
    split: str = "train",
    **target: Unpack[Target],
) -> Fitted:
    """Fit a guard on files, and calibrate it on others.

    Args:
        source: a model, for images or for features of it; or a head alone, for features.
        data: images or features, as in `open_rows`.
        calibration: other data of the same kind, which the network never saw; of a dataset by name,
            the test part.
        engine: where the network runs. The model is at `engine.home` already.
        holdout: without `calibration`, the share of `data` that is kept from the fit for the
            threshold, the same rows in each run: the user's word that `data` are none of those that
            the network was trained on. A held-out part of the network's own training data breaks
            the promise of the threshold.
        head, detector: as for `Guard`.
        autocast: run the network in bfloat16 where it can, now and whenever the guard's file is
            opened.
        split: which part of a dataset by name the fit takes.
        target: `tpr`, `alpha` and `per_class` of `Guard.calibrate`.
    """
    check_target(target.get("tpr"), target.get("alpha"))
    rows = open_rows(data, split)
    named = source if isinstance(source, NamedModel) else None
    guard = Guard(source if isinstance(source, Head) else source.model, detector, head=head)
    if autocast and guard.classifier is not None:
        guard.classifier.autocast = torch.bfloat16
    linear, names, preprocess = guard.head, named.class_names if named else (), None
    if isinstance(rows, Images):
        if named is None:
            raise ValueError(f"{data!r} are images, and a head alone takes features: name a model")
        preprocess = named.preprocess or _usual_preprocess(data)
    other, held = rows, None
    if calibration is not None:
        other = open_rows(calibration, "test")
    elif holdout is None:
        raise ValueError(
            f"no data to calibrate on: {RULE}. Give --calibration DATA; or, if the network was not trained on "
            f"{data!r}, say so with --network-never-saw-data, and a part of them is kept for calibration"
        )
    elif not 0 < holdout < 1:
        raise ValueError(f"holdout is {holdout}, expected a share between 0 and 1")
    else:
        held = np.random.default_rng(0).permutation(len(rows)) < round(holdout * len(rows))
    training = Loader(rows, linear, names, preprocess, engine, None if held is None else ~held)
    calibrating = Loader(other, linear, names, preprocess, engine, held)
    for loader, purpose in ((training, "fit"), (calibrating, "calibrate")):
        if not loader.chosen.any():
            raise ValueError(
                f"{loader.rows.source} leaves no rows to {purpose} on: {len(loader.rows)} are too few"
            )
    if isinstance(rows, Images):
        if guard.detector.needs.labels and training.labels is None:
            raise ValueError(
                f"{guard.detector.label} needs labels, and {rows.source} has none that are classes of the model: put "
                f"the images in one folder per class, {linear.num_classes} in all"
            )
        if len(rows.classes) == linear.num_classes:
            names = names or rows.classes
    guard.about = {"class_names": list(names)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "only .* calibration samples")  # goes to `cautions`
        if (pool := engine.cluster()) is not None:
            from fdbd.jobs.ray.pool import fit_loaders

            fit_loaders(guard, training, calibrating, pool, **target)
        else:
            guard.fit(training, progress=engine.progress)
            guard.calibrate(calibrating, **target, progress=engine.progress)
    described: Any = guard.about["calibration"]
    described |= {
        "data": "data apart from the fit"
        if held is None
        else "a held-out part of the data of the fit",
        "network_saw_them": "not stated" if held is None else "no, as the user says",
        "rows": calibrating.num_given,
    }
    if named and (own := preprocess or named.preprocess) is not None:
        guard.about |= {"model": named.origin, "preprocess": own.to_dict()}
    cautions = [guard.threshold.caution] if guard.threshold and guard.threshold.caution else []
    known = [
        stage
        for stage in guard.agreement.values()
        if stage.count >= 100 and stage.right >= 0.995 * stage.count
    ]
    if held is not None and known:
        cautions.append(
            f"the model is right on {100 * known[0].right / known[0].count:.2f} % of {data!r}, as if it had been "
            "trained on them; a threshold calibrated on a part of them then raises more false alarms than promised: "
            "give --calibration DATA that the network never saw"
        )
    return Fitted(guard, training, calibrating, cautions)


def read_head(path: str | os.PathLike[str]) -> Head:
    """A linear head from ``.npz`` or ``.safetensors`` with ``weight`` (C, P) and, perhaps, ``bias``
    (C,)."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no head at {str(path)!r}: no such file")
    if path.suffix.lower() == ".npz":
        wanted = {"weight", "bias"}.intersection(array_names(path))
        arrays = {name: torch.from_numpy(read_array(path, name).copy()) for name in wanted}
    else:
        arrays = read_weights(path)
    if "weight" not in arrays:
        raise ValueError(f"{path} has no 'weight', expected a weight (C, P) and a bias (C,)")
    return Head(arrays["weight"], arrays.get("bias"))


class Loader:
    """What `Guard.fit` iterates over: the chosen rows in batches, with labels where they are
    classes of the head.

    Attributes:
        spans: the work in pieces, each the rows of one or more batches.
        num_given: rows that the last iteration gave.
        errors: why it left rows out, a sentence each.
    """

    def __init__(
        self,
        rows: Rows,
        head: Head,
        class_names: Sequence[str],
        preprocess: Preprocess | None,
        engine: Engine,
        chosen: NDArray[np.bool_] | None = None,
    ) -> None:
        self.rows, self.chosen = rows, np.ones(len(rows), bool) if chosen is None else chosen
        self.widths = Widths(head.num_features, head.num_classes)
        self.preprocess, self.engine = preprocess, engine
        self.num_given = 0
        self.errors: list[str] = []
        self.labels: NDArray[np.int64] | None = None
        if isinstance(rows, Images) != (preprocess is not None):
            kinds = ("images", "features") if preprocess is None else ("features", "images")
            raise ValueError(
                f"{rows.source} are {kinds[0]}, expected {kinds[1]} like those of the fit"
            )
        self.spans: list[Sequence[int]]
        if isinstance(rows, Images):
            self.labels = as_classes(rows.labels, rows.classes, head.num_classes, class_names)
            # Of files only those that are chosen are decoded; of an array all rows are read.
            numbers: Any = range(len(rows))
            if isinstance(rows.images, Sequence):
                numbers = tuple(np.flatnonzero(self.chosen).tolist())
            self.spans = [*cut(numbers, engine.batch_size)]
        else:
            rows.check(self.widths, labels=True)
            self.spans = [*rows.spans(65_536)]

    def __len__(self) -> int:
        return len(self.spans)

    def __iter__(self) -> Iterator[Any]:
        """(images, labels) or `Batch`es of features. Where no row can be read, an error says why
        the first cannot."""
        yield from self.read(self.spans)
        self.check_given()

    def check_given(self) -> None:
        """An error where the last iteration gave no row, and says why the first was left out."""
        if self.errors and not self.num_given:
            raise ValueError(
                f"{self.rows.source} has no row that can be read; the first: {self.errors[0]}"
            )

    def read(self, spans: Sequence[Sequence[int]], processes: bool = True) -> Iterator[Any]:
        """The batches of some spans; images are decoded by `engine.workers` processes, or by a
        thread."""
        self.num_given, self.errors = 0, []
        names = self.rows.names if isinstance(self.rows, Images) else None
        for numbers, inputs, errors in read_batches(
            self.rows, spans, self.widths, self.preprocess, self.engine, processes, labels=True
        ):
            for place, reason in errors.items():
                name = f"row {numbers[place]}" if names is None else str(names[numbers[place]])
                self.errors.append(reason if name in reason else f"{name}: {reason}")
            kept = np.delete(np.asarray(numbers, np.int64), list(errors))
            is_chosen = self.chosen[kept]
            self.num_given += int(is_chosen.sum())
            if not is_chosen.any():
                continue
            if isinstance(inputs, Batch):
                yield inputs.rows(torch.from_numpy(is_chosen))
            else:
                labels = (
                    None if self.labels is None else torch.from_numpy(self.labels[kept[is_chosen]])
                )
                yield inputs[torch.from_numpy(is_chosen)], labels


def _usual_preprocess(data: str) -> Preprocess:
    try:
        return Preprocess.preset(info(data).preprocess)
    except ValueError:
        raise ValueError(
            "how are images to be prepared for this model? give --preprocess, a preset such as cifar10 or imagenet, or "
            'fields as JSON such as {"size": 224, "mean": […], "std": […]}'
        ) from None
