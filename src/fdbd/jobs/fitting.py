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
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fdbd.core.batch import Batch, Head
from fdbd.data.datasets import info
from fdbd.data.decoding import prepare
from fdbd.data.features import FeatureRows, Widths
from fdbd.data.images import Images, Pixels, cut
from fdbd.data.inputs import Rows, open_rows
from fdbd.data.labels import Agreement, as_classes
from fdbd.data.npz import array_names, read_array
from fdbd.data.preprocessing import Preprocess
from fdbd.decision.guard import Guard
from fdbd.decision.threshold import check_target
from fdbd.jobs.scoring import Engine, check_engine
from fdbd.networks.by_name import NamedModel

HOLDOUT = 0.2
"""Share of the data that is kept for calibration where there are no other data for it."""
RULE = "calibration data are seen by neither the network's training nor the fit"
"""What every promise of a threshold rests on."""
MEMORISED = 0.995
"""Accuracy from which data look like those that the network was trained on."""
_ENOUGH = 100  # labels from which that is said


class Fitted(NamedTuple):
    """A guard, ready to be saved, and what it was made from."""

    guard: Guard
    fit_rows: int
    calibration_rows: int
    is_held_out: bool
    """Whether the calibration rows are a part of the data of the fit, by the user's word that no network saw them."""
    fit_accuracy: float | None
    calibration_accuracy: float | None
    """Fractions, where there are labels."""
    errors: list[str]
    """Why rows were left out, a sentence each."""
    cautions: list[str]
    """What to know before the guard is trusted, a sentence each."""


def fit_files(
    source: NamedModel | Head,
    data: str,
    *,
    calibration: str | None = None,
    network_never_saw_data: bool = False,
    holdout: float = HOLDOUT,
    head: str | None = None,
    detector: str = "fdbd",
    shaping: str | None = None,
    tpr: float | None = None,
    alpha: float | None = None,
    per_class: bool = False,
    split: str = "train",
    engine: Engine = "local",
    address: str | None = None,
    device: str | None = "auto",
    autocast: bool = False,
    batch_size: int = 128,
    workers: int | None = None,
    progress: bool = True,
) -> Fitted:
    """Fit a guard on files, and calibrate it on others.

    Calibration data are seen by neither the network's training nor the fit. A held-out part of the network's own
    training data breaks the promise of the threshold: the network has seen it.

    Args:
        source: a model, for images or for features of it; or a head alone, for features.
        data: images or features, as in `open_rows`.
        calibration: other data of the same kind, which the network never saw.
        network_never_saw_data: the user's word that `data` are none of those that the network was trained on. Then,
            without `calibration`, a random share of them, the same in each run, is kept from the fit for the threshold.
        holdout: that share, a fraction.
        head, detector, shaping: as for `Guard`.
        tpr, alpha, per_class: as for `Guard.calibrate`.
        split: which part of a dataset by name the fit takes; `calibration` takes its test part.
        engine, address, batch_size, workers: as for `score_files`.
        device: on Ray, ``"cuda"`` gives each worker a GPU; elsewhere the model is where it runs.
        autocast: run the network in bfloat16 where it can, now and whenever the guard's file is opened.
        progress: show a bar when it takes more than two seconds.
    """
    check_engine(engine, address, batch_size, workers)
    check_target(tpr, alpha)
    rows = open_rows(data, split)
    named = source if isinstance(source, NamedModel) else None
    guard = Guard(source if isinstance(source, Head) else source.model, detector, shaping=shaping, head=head)
    if autocast and guard.classifier is not None:
        guard.classifier.autocast = torch.bfloat16
    linear, is_images = guard.head, isinstance(rows, Images)
    if is_images and named is None:
        raise ValueError(f"{data!r} are images, and a head alone takes features: name a model")
    preprocess = (named.preprocess or _usual_preprocess(data)) if is_images and named else None
    names = named.class_names if named else ()
    chosen, other, held = np.ones(len(rows), bool), rows, None
    if calibration is not None:
        other = open_rows(calibration, "test")
    elif not network_never_saw_data:
        raise ValueError(
            f"no data to calibrate on: {RULE}. Give --calibration DATA; or, if the network was not trained on "
            f"{data!r}, say so with --network-never-saw-data, and a part of them is kept for calibration"
        )
    elif not 0 < holdout < 1:
        raise ValueError(f"holdout is {holdout}, expected a share between 0 and 1")
    else:
        held = np.random.default_rng(0).permutation(len(rows)) < round(holdout * len(rows))
        chosen = ~held
    is_held_out = held is not None
    training, calibrating = (
        Loader(each, some, linear, names, preprocess, batch_size, workers)
        for each, some in ((rows, chosen), (other, np.ones(len(other), bool) if held is None else held))
    )
    for loader, purpose in ((training, "to fit on"), (calibrating, "to calibrate on")):
        if not loader.chosen.any():
            raise ValueError(f"{loader.rows.source} leaves no rows {purpose}: {len(loader.rows)} are too few")
    if isinstance(rows, Images):
        if guard.detector.needs.labels and training.labels is None:
            raise ValueError(
                f"{guard.detector.label} needs labels, and {rows.source} has none that are classes of the model: put "
                f"the images in one folder per class, {linear.num_classes} in all"
            )
        if not names and len(rows.classes) == linear.num_classes:
            names = rows.classes
    guard.about = {"class_names": list(names)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "only .* calibration samples")  # goes to `cautions`
        if engine == "ray":
            from fdbd.jobs import ray

            ray.connect(address)
            pool = ray.Workers.on(device, workers, batch_size)
            ray.fit_loaders(guard, training, calibrating, pool, tpr=tpr, alpha=alpha, per_class=per_class)
        else:
            guard.fit(training, progress=progress)
            guard.calibrate(calibrating, tpr=tpr, alpha=alpha, per_class=per_class, progress=progress)
    described: Any = guard.about["calibration"]
    described |= {
        "data": "a held-out part of the data of the fit" if is_held_out else "data apart from the fit",
        "network_saw_them": "no, as the user says" if is_held_out else "not stated",
        "rows": calibrating.num_given,
    }
    if named and (own := preprocess or named.preprocess) is not None:
        guard.about |= {"model": named.origin, "preprocess": own.to_dict()}
    seen, fresh = guard.agreement.get("fit"), guard.agreement.get("calibration")
    cautions = [guard.threshold and guard.threshold.caution, _memorised([seen, fresh], data) if is_held_out else None]
    return Fitted(
        guard,
        training.num_given,
        calibrating.num_given,
        is_held_out,
        seen.accuracy if seen else None,
        fresh.accuracy if fresh else None,
        [*training.errors, *calibrating.errors],
        [caution for caution in cautions if caution],
    )


def _memorised(stages: Sequence[Agreement | None], data: str) -> str | None:
    for stage in stages:
        if stage is not None and stage.count >= _ENOUGH and stage.right >= MEMORISED * stage.count:
            return (
                f"the model is right on {100 * stage.right / stage.count:.2f} % of {data!r}, as if it had been trained "
                "on them; a threshold calibrated on a part of them then raises more false alarms than promised: give "
                "--calibration DATA that the network never saw"
            )
    return None


def read_head(path: str | os.PathLike[str]) -> Head:
    """A linear head from ``.npz`` or ``.safetensors`` with ``weight`` (C, P) and, perhaps, ``bias`` (C,)."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no head at {str(path)!r}: no such file")
    suffix, wanted = path.suffix.lower(), ("weight", "bias")
    if suffix == ".npz":
        held = array_names(path)
        arrays = {name: torch.from_numpy(read_array(path, name).copy()) for name in wanted if name in held}
    elif suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                arrays = {name: file.get_tensor(name) for name in wanted if name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is no readable safetensors file: {error}") from None
    else:
        raise ValueError(f"the head {str(path)!r} is neither .npz nor .safetensors")
    if "weight" not in arrays:
        raise ValueError(f"{path} has no 'weight', expected a weight (C, P) and a bias (C,)")
    return Head(arrays["weight"], arrays.get("bias"))


class Loader:
    """What `Guard.fit` iterates over: the chosen rows in batches, with labels where they are classes of the head.

    Attributes:
        spans: of rows, each a batch or some batches; of files that are chosen, or of all rows of an array.
        num_given: rows that the last iteration gave.
        errors: why it left rows out, a sentence each.
    """

    def __init__(
        self,
        rows: Rows,
        chosen: NDArray[np.bool_],
        head: Head,
        class_names: Sequence[str],
        preprocess: Preprocess | None,
        batch_size: int,
        workers: int | None,
    ) -> None:
        self.rows, self.chosen = rows, chosen
        self.widths = Widths.of(head)
        self.preprocess, self.workers = preprocess, workers
        self.num_given = 0
        self.errors: list[str] = []
        self.labels: NDArray[np.int64] | None = None
        if isinstance(rows, Images):
            if preprocess is None:
                raise ValueError(f"{rows.source} are images, expected features like those of the fit")
            self.labels = as_classes(rows.labels, rows.classes, head.num_classes, class_names)
            count = int(chosen.sum()) if isinstance(rows.images, Sequence) else len(rows)
            self.spans = cut(range(count), batch_size)
        else:
            if preprocess is not None:
                raise ValueError(f"{rows.source} are features, expected images like those of the fit")
            rows.check(self.widths, labels=True)
            self.spans = rows.spans(65_536)

    def __len__(self) -> int:
        return len(self.spans)

    def __iter__(self) -> Iterator[Any]:
        """(images, labels) or `Batch`es of features. Where no row can be read, an error says why the first cannot."""
        yield from self.read(self.spans)
        self.check_given()

    def check_given(self) -> None:
        """An error where the last iteration gave no row, and says why the first was left out."""
        if self.errors and not self.num_given:
            raise ValueError(f"{self.rows.source} has no row that can be read; the first: {self.errors[0]}")

    def read(self, spans: Sequence[range], processes: bool = True) -> Iterator[Any]:
        """The batches of some spans; images are decoded by `workers` processes, or by threads."""
        self.num_given, self.errors, rows = 0, [], self.rows
        items: Iterator[Any]
        items = self._images(rows, spans, processes) if isinstance(rows, Images) else self._features(rows, spans)
        for item in items:
            count = len(item[0])
            self.num_given += count
            if count:
                yield item

    def _images(self, rows: Images, spans: Sequence[range], processes: bool) -> Iterator[tuple[Tensor, Tensor | None]]:
        assert self.preprocess is not None
        pixels, places = rows.images, np.arange(len(rows))
        if isinstance(pixels, Sequence):  # files: only those that are wanted are decoded
            places = np.flatnonzero(self.chosen)
            pixels = _Chosen(pixels, places)
        for batch in prepare(pixels, self.preprocess, spans, workers=self.workers, processes=processes):
            for failure in batch.failures:
                name = str(rows.names[places[failure.row]])
                self.errors.append(failure.reason if name in failure.reason else f"{name}: {failure.reason}")
            failed = {failure.row for failure in batch.failures}
            kept = places[[row for row in batch.rows if row not in failed]]
            kept_and_chosen = self.chosen[kept]
            labels = None if self.labels is None else torch.from_numpy(self.labels[kept[kept_and_chosen]])
            yield batch.inputs[torch.from_numpy(kept_and_chosen)], labels

    def _features(self, rows: FeatureRows, spans: Sequence[range]) -> Iterator[Batch]:
        for span in spans:
            for batch in rows.read(span, self.widths, labels=True):
                assert isinstance(batch.inputs, Batch)
                assert isinstance(batch.names, range)
                self.errors += [f"row {batch.names[place]}: {reason}" for place, reason in batch.errors.items()]
                chosen = np.delete(self.chosen[batch.names.start : batch.names.stop], list(batch.errors))
                yield batch.inputs.rows(torch.from_numpy(chosen))


class _Chosen(Sequence[Pixels]):
    """Some images of a set, decoded when asked for."""

    def __init__(self, pixels: Sequence[Pixels], places: NDArray[np.int64]) -> None:
        self.pixels, self.places = pixels, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        return self.pixels[int(self.places[index])]


def _usual_preprocess(data: str) -> Preprocess:
    try:
        return Preprocess.preset(info(data).preprocess)
    except ValueError:
        raise ValueError(
            "how are images to be prepared for this model? give --preprocess, a preset such as cifar10 or imagenet, or "
            'fields as JSON such as {"size": 224, "mean": […], "std": […]}'
        ) from None
