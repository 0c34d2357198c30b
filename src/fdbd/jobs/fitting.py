"""Fit and calibrate a guard on files: images with a model, or features with a head."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Unpack

from fdbd.core.batch import Batch, Head
from fdbd.core.preprocessing import Preprocess
from fdbd.data.columns import TextRows
from fdbd.data.datasets import info
from fdbd.data.features import FeatureRows, Widths
from fdbd.data.images import Images, cut
from fdbd.data.inputs import Rows, open_rows
from fdbd.data.label_maps import LabelMaps
from fdbd.data.labels import Agreement
from fdbd.data.npz import array_names, read_array
from fdbd.decision.choice import Auto
from fdbd.decision.guard import Guard
from fdbd.decision.threshold import FewCalibrationSamplesWarning, Target, check_target
from fdbd.jobs.classes import Matched, gap_caution, match_classes
from fdbd.jobs.scoring import (
    FEATURE_PART_ROWS,
    PART_ROWS,
    Engine,
    Preparation,
    engine_for_maps,
    read_batches,
)
from fdbd.networks.by_name import NamedModel
from fdbd.networks.checkpoint import read_weights

HOLDOUT = 0.2
"""Share of the data that is kept for calibration if there are no other data for it."""
RULE = "calibration data are seen by neither the network's training nor the fit"
MEMORISED = 0.995
"""An accuracy that a network may reach on its own training data, but hardly on other data."""


class Fitted(NamedTuple):
    """A guard, ready to be saved, and what it was made from."""

    guard: Guard
    training: Loader
    calibrating: Loader
    """Reads the same rows as `training`, if a part of the data of the fit was held out."""
    cautions: list[str]
    """What to know before the guard is trusted, a sentence each."""


def fit_files(
    source: NamedModel | Head,
    data: str,
    calibration: str | None = None,
    engine: Engine = Engine(),  # noqa: B008 - it never changes
    *,
    holdout: float | None = None,
    held_out: str | None = None,
    head: str | None = None,
    detector: str | Auto = "fdbd",
    autocast: bool = False,
    split: str = "train",
    text: str | None = None,
    label: str | None = None,
    label_maps: str | os.PathLike[str] | None = None,
    **target: Unpack[Target],
) -> Fitted:
    """Fit a guard on files, and calibrate it on others.

    Args:
        source: a model, for images or for features of it; or a head alone, for features.
        data: images or features, as in `open_rows`.
        calibration: other data of the same kind, which the network never saw; of a dataset by
            name, the test part.
        engine: where the network runs. The model is at `engine.home` already.
        holdout: without `calibration`, the share of `data` that is kept from the fit for the
            threshold, the same rows in each run. It confirms that the network was not trained on
            `data`: a held-out part of the network's own training data breaks the promise of the
            threshold.
        held_out: with "auto", other data of the same kind to weigh detectors by; None: a part of
            the calibration data, which takes an engine on this machine.
        head, detector: as for `Guard`.
        autocast: run the network in bfloat16 if it can, now and whenever the guard's file is
            opened.
        split: which part of a dataset by name the fit takes.
        text, label: the columns of texts and of their labels, for a model of texts.
        label_maps: for a model that predicts maps, the folder of the label maps of `data`, see
            `LabelMaps`. Most detectors need none.
        target: `tpr`, `alpha` and `per_class` of `Guard.calibrate`.
    """
    check_target(target.get("tpr"), target.get("alpha"))
    guard = _new_guard(source, head, detector, autocast)
    _check_weighing(guard, held_out, engine)
    rows = open_rows(data, split, text, label)
    preparation = preparation_for(source, rows, data)
    gives_maps = _gives_maps(guard, preparation)
    if gives_maps:
        engine = engine_for_maps(engine)
    elif label_maps is not None:
        raise ValueError(
            "label maps are for a model that predicts a class for each position of a map, and this "
            "one predicts one for each image: leave --label-maps out"
        )

    kept_apart = _kept_apart(rows, data, calibration, holdout)
    other = rows
    if calibration is not None:
        other = open_calibration(calibration, text, label)
    class_names = source.class_names if isinstance(source, NamedModel) else ()
    num_classes = guard.head.num_classes
    if gives_maps:
        # The class of a folder says nothing about the pixels of its images.
        matches = _Matches(Matched(None, {}, []), None)
    else:
        matches = _match_both(rows, other, num_classes, class_names)

    training = Loader(rows, guard.head, preparation, engine, matches.fit.labels)
    calibrating = Loader(other, guard.head, preparation, engine, matches.calibration_labels)
    if label_maps is not None:
        training.label_maps = _open_label_maps(label_maps, rows)
    if kept_apart is not None:
        training.choose(~kept_apart)
        calibrating.choose(kept_apart)
    weighing = None
    if held_out is not None:
        weighing = Loader(open_calibration(held_out, text, None), guard.head, preparation, engine)
        _check_not_empty(weighing, "weigh detectors")
    _check_not_empty(training, "fit")
    _check_not_empty(calibrating, "calibrate")
    _check_labels(guard, training)

    guard.about = {"class_names": class_names_of(class_names, matches.fit, num_classes)}
    _run(guard, training, weighing, calibrating, engine, **target)
    is_part_of_fit_data = kept_apart is not None
    describe(guard, source, preparation, calibrating, is_part_of_fit_data)
    cautions = [*matches.cautions, *cautions_of(guard, data, is_part_of_fit_data)]
    return Fitted(guard, training, calibrating, cautions)


class _Matches(NamedTuple):
    """The labels of the fit and of the calibration as classes of the model."""

    fit: Matched
    calibration: Matched | None
    """None: the data are those of the fit, or have no labels."""

    @property
    def calibration_labels(self) -> NDArray[np.int64] | None:
        if self.calibration is None:
            return self.fit.labels
        return self.calibration.labels

    @property
    def cautions(self) -> list[str]:
        """What to know of both, a sentence each."""
        if self.calibration is None:
            return self.fit.cautions
        return [*self.fit.cautions, *self.calibration.cautions]


def _match_both(rows: Rows, other: Rows, num_classes: int, class_names: Sequence[str]) -> _Matches:
    """The labels of the fit, then those of the calibration, which are matched with the classes of
    the fit, too."""
    fit = match_rows(rows, num_classes, class_names, None)
    if other is rows:
        return _Matches(fit, None)
    return _Matches(fit, match_rows(other, num_classes, class_names, fit))


def _check_weighing(guard: Guard, held_out: str | None, engine: Engine) -> None:
    """An error unless "auto", and it alone, gets the data to weigh detectors by."""
    if guard.auto is None and held_out is not None:
        raise ValueError(
            "held-out data are what auto weighs detectors by: leave --held-out out, or say "
            "--detector auto"
        )
    if guard.auto is not None and held_out is None and engine.name != "local":
        raise ValueError(
            "on a cluster auto weighs detectors by data of their own: give --held-out DATA, some "
            "300 samples, or leave --engine out"
        )


def _new_guard(
    source: NamedModel | Head, head: str | None, detector: str | Auto, autocast: bool
) -> Guard:
    model = source if isinstance(source, Head) else source.model
    guard = Guard(model, detector, head=head)
    if autocast and guard.classifier is not None:
        guard.classifier.autocast = torch.bfloat16
    return guard


def _gives_maps(guard: Guard, preparation: Preparation | None) -> bool:
    """Whether the model predicts a class for each position of a map. A head that is a convolution
    may stand before or after a pooling, so the model is tried on one image of noise."""
    classifier = guard.classifier
    if classifier is None or not isinstance(preparation, Preprocess):
        return False
    if not classifier.may_give_maps:
        return False
    shape = (1, preparation.height, preparation.width, 3)
    noise = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    with torch.inference_mode():
        return classifier(preparation.normalise(noise)).grid is not None


def _open_label_maps(folder: str | os.PathLike[str], rows: Rows) -> LabelMaps:
    if not isinstance(rows, Images) or isinstance(rows.names, range):
        raise ValueError(
            f"label maps are found by the names of image files, and {rows.source} has none: give a "
            "folder of images"
        )
    return LabelMaps(Path(folder), rows.names)


def preparation_for(source: NamedModel | Head, rows: Rows, data: str) -> Preparation | None:
    """How images or texts are prepared for the model; None for features."""
    if isinstance(rows, FeatureRows):
        return None
    kind = "images" if isinstance(rows, Images) else "texts"
    if isinstance(source, Head):
        raise ValueError(f"{data!r} are {kind}, and a head alone takes features: name a model")
    if isinstance(rows, Images):
        if source.tokenizer is not None:
            raise ValueError(
                f"{data!r} are images, and the model takes texts: give a file, and its column with "
                "--text"
            )
        return source.preprocess or _usual_preprocess(data)
    if source.tokenizer is None:
        raise ValueError(
            f"{data!r} holds texts, and the model has no tokenizer: name one with hf:FOLDER_OR_NAME"
        )
    return source.tokenizer


def _usual_preprocess(data: str) -> Preprocess:
    """The preprocessing that networks trained on this dataset usually have."""
    try:
        return Preprocess.preset(info(data).preprocess)
    except ValueError:
        raise ValueError(
            "it is not known how to prepare images for this model: give --preprocess, a preset "
            "such as cifar10 or imagenet, or fields as JSON such as "
            '{"size": 224, "mean": […], "std": […]}'
        ) from None


def _kept_apart(
    rows: Rows, data: str, calibration: str | None, holdout: float | None
) -> NDArray[np.bool_] | None:
    """Which rows of the fit are kept to calibrate on; None if there are other data for it."""
    if calibration is not None:
        return None
    if holdout is None:
        raise ValueError(
            f"no data to calibrate on: {RULE}. Give --calibration DATA; or, if the network was not "
            f"trained on {data!r}, confirm it with --network-never-saw-data, and a part of them is "
            "kept for calibration"
        )
    if not 0 < holdout < 1:
        raise ValueError(f"holdout is {holdout}, expected a share between 0 and 1")
    shuffled = np.random.default_rng(0).permutation(len(rows))
    return shuffled < round(holdout * len(rows))


def open_calibration(calibration: str, text: str | None, label: str | None) -> Rows:
    """The calibration data. Texts need no labels there."""
    if text is not None and label is not None:
        rows = open_rows(calibration, "test", text)
        if isinstance(rows, TextRows) and label in rows.file.columns:
            return open_rows(calibration, "test", text, label)
        return rows
    return open_rows(calibration, "test", text, label)


def match_rows(
    rows: Rows, num_classes: int, class_names: Sequence[str], fit: Matched | None
) -> Matched:
    """The labels of images or texts as classes of the model. Files of features bring their own."""
    if isinstance(rows, FeatureRows):
        return Matched(None, {}, [])
    return match_classes(rows, num_classes, class_names, fit)


def class_names_of(given: Sequence[str], match: Matched, num_classes: int) -> list[str]:
    """A name for each class: the model's own, else those of the folders if each class has one."""
    if given:
        return list(given)
    by_index = {index: name for name, index in match.names.items()}
    if len(by_index) != num_classes:
        return []
    return [by_index[index] for index in range(num_classes)]


def _check_not_empty(loader: Loader, purpose: str) -> None:
    if not loader.chosen.any():
        raise ValueError(
            f"{loader.rows.source} leaves no rows to {purpose} on: {len(loader.rows)} are too few"
        )


def _check_labels(guard: Guard, training: Loader) -> None:
    """An error if the detector learns from labels and the images or texts have none."""
    if not guard.detector.needs.labels or training.labels is not None:
        return
    if training.label_maps is not None:
        return
    if guard.classifier is not None and guard.classifier.may_give_maps:
        raise ValueError(
            f"{guard.detector.label} needs labels: give a folder of label maps with --label-maps, "
            "or choose a detector that needs none, such as fdbd"
        )
    if isinstance(training.rows, TextRows):
        raise ValueError(
            f"{guard.detector.label} needs labels, and {training.rows.source} has none that are "
            "classes of the model: name their column with --label"
        )
    if isinstance(training.rows, Images):
        raise ValueError(
            f"{guard.detector.label} needs labels, and {training.rows.source} has none that are "
            "classes of the model: put the images in one folder per class, "
            f"{guard.head.num_classes} in all"
        )


def _run(
    guard: Guard,
    training: Loader,
    weighing: Loader | None,
    calibrating: Loader,
    engine: Engine,
    **target: Unpack[Target],
) -> None:
    """Fit and calibrate, in this process or on a cluster; with `weighing`, "auto" weighs detectors
    by these rows in between, in this process."""
    workers = engine.cluster()
    with warnings.catch_warnings():
        # `cautions_of` says it, with what else there is to know.
        warnings.simplefilter("ignore", FewCalibrationSamplesWarning)
        if workers is None:
            guard.fit(training, held_out=weighing, progress=engine.progress)
            guard.calibrate(calibrating, **target, progress=engine.progress)
        else:
            from fdbd.jobs.ray.fits import fit_loaders

            fit_loaders(guard, training, calibrating, workers, held_out=weighing, **target)


def describe(
    guard: Guard,
    source: NamedModel | Head,
    preparation: Preparation | None,
    calibrating: Loader,
    is_part_of_fit_data: bool,
) -> None:
    """Note in the guard's file what the model is, and what the threshold was set on."""
    described: Any = guard.about["calibration"]
    if is_part_of_fit_data:
        described["data"] = "a held-out part of the data of the fit"
        described["network_saw_them"] = "no, as the user says"
    else:
        described["data"] = "data apart from the fit"
        described["network_saw_them"] = "not stated"
    described["rows"] = calibrating.num_given
    if isinstance(source, NamedModel):
        own = preparation or source.preprocess or source.tokenizer
        if own is not None:
            # The tokenizer of a model of texts is in its origin.
            guard.about["model"] = source.origin
        if isinstance(own, Preprocess):
            guard.about["preprocess"] = own.to_dict()


def cautions_of(guard: Guard, data: str, is_part_of_fit_data: bool) -> list[str]:
    """What to know before the guard is trusted, a sentence each. `is_part_of_fit_data`: the
    calibration data were kept apart from `data`."""
    cautions = []
    few = guard.stages.require_any_threshold().caution
    if few is not None:
        cautions.append(few)
    class_names: Any = guard.about["class_names"]
    agreement = guard.stages.record.agreement
    gap = gap_caution(agreement.get("fit"), agreement.get("calibration"), class_names)
    if gap is not None:
        cautions.append(gap)
    if is_part_of_fit_data:
        memorised = _memorised_caution(agreement.values(), data)
        if memorised is not None:
            cautions.append(memorised)
    return cautions


def _memorised_caution(agreements: Iterable[Agreement], data: str) -> str | None:
    """A caution if the model is so often right that it may have been trained on the data."""
    for agreement in agreements:
        accuracy = agreement.accuracy or 0.0
        if agreement.count >= 100 and accuracy >= MEMORISED:
            return (
                f"the model is right on {accuracy:.2%} of {data!r}, as if it had been trained on "
                "them; a threshold calibrated on a part of them then raises more false alarms than "
                "promised: give --calibration DATA that the network never saw"
            )
    return None


def read_head(path: str | os.PathLike[str]) -> Head:
    """A linear head from ``.npz`` or ``.safetensors`` with ``weight`` (C, P) and, perhaps, ``bias``
    (C,)."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no head at {str(path)!r}: no such file")
    arrays: dict[str, torch.Tensor] = {}
    if path.suffix.lower() == ".npz":
        for name in array_names(path):
            if name in ("weight", "bias"):
                arrays[name] = torch.from_numpy(read_array(path, name).copy())
    else:
        arrays = dict(read_weights(path))
    if "weight" not in arrays:
        raise ValueError(f"{path} has no 'weight', expected a weight (C, P) and a bias (C,)")
    return Head(arrays["weight"], arrays.get("bias"))


class Loader:
    """What `Guard.fit` iterates over: the chosen rows in batches, images with labels if there are
    any.

    Args:
        rows: of a file or folder.
        head: whose widths the features must have; None for texts.
        preparation: from an image or a text to what the model takes; None for features.
        engine: how many rows a batch has, and how many processes decode.
        labels: (N,) class indices of images or texts, or None. Features come with those of their
            file.

    Attributes:
        chosen: (N,) which rows are given.
        spans: the work in pieces, each the rows of one or more batches.
        num_given: rows that the last iteration gave.
        errors: why it left rows out, a sentence each.
    """

    def __init__(
        self,
        rows: Rows,
        head: Head | None,
        preparation: Preparation | None,
        engine: Engine,
        labels: NDArray[np.int64] | None = None,
    ) -> None:
        given = _kind_of(rows)
        expected = _kind_for(preparation)
        if given != expected:
            raise ValueError(
                f"{rows.source} are {given}, expected {expected} like those of the fit"
            )
        self.rows = rows
        self.widths = Widths(0, 0)
        if head is not None:
            self.widths = Widths(head.num_features, head.num_classes)
        self.preparation = preparation
        self.engine = engine
        self.labels = labels
        self.label_maps: LabelMaps | None = None
        """The label maps of the images, for a model that predicts maps."""
        self.num_given = 0
        self.errors: list[str] = []
        if isinstance(rows, FeatureRows):
            rows.check(self.widths, labels=True)
        self.choose(np.ones(len(rows), bool))

    def choose(self, chosen: NDArray[np.bool_]) -> None:
        """Give these rows (N,) alone."""
        self.chosen = chosen
        self.spans: list[Sequence[int]]
        if isinstance(self.rows, FeatureRows):
            self.spans = [*self.rows.spans(FEATURE_PART_ROWS)]
            return
        if isinstance(self.rows, TextRows):
            self.spans = [*self.rows.spans(PART_ROWS)]
            return
        # Of files, only those that are chosen are decoded; of an array, all rows are read.
        numbers: Any = range(len(self.rows))
        if isinstance(self.rows.images, Sequence):
            numbers = tuple(np.flatnonzero(chosen).tolist())
        self.spans = [*cut(numbers, self.engine.batch_size)]

    def __len__(self) -> int:
        return len(self.spans)

    def __iter__(self) -> Iterator[Any]:
        """(images, labels) or `Batch`es of features. If no row can be read, an error says why the
        first cannot."""
        yield from self.read(self.spans)
        self.check_given()

    def check_given(self) -> None:
        """An error if the last iteration gave no row; it says why the first was left out."""
        if self.errors and not self.num_given:
            raise ValueError(
                f"{self.rows.source} has no row that can be read; the first: {self.errors[0]}"
            )

    def read(self, spans: Sequence[Sequence[int]], processes: bool = True) -> Iterator[Any]:
        """The batches of some spans; images are decoded by `engine.workers` processes, or by a
        thread."""
        self.num_given = 0
        self.errors = []
        batches = read_batches(
            self.rows, spans, self.widths, self.preparation, self.engine, processes, labels=True
        )
        for numbers, inputs, errors in batches:
            for place, reason in errors.items():
                self.errors.append(self._error(numbers[place], reason))
            readable = np.delete(np.asarray(numbers, np.int64), list(errors))
            is_chosen = self.chosen[readable]
            self.num_given += int(is_chosen.sum())
            if not is_chosen.any():
                continue
            mask = torch.from_numpy(is_chosen)
            if isinstance(inputs, Batch):
                yield inputs.rows(mask)
                continue
            labels = self._labels_of(readable[is_chosen])
            if isinstance(inputs, Mapping):
                # Arguments of a model of texts.
                yield {name: tensor[mask] for name, tensor in inputs.items()}, labels
            else:
                yield inputs[mask], labels

    def _labels_of(self, numbers: NDArray[np.int64]) -> torch.Tensor | None:
        """The labels of these rows: (N,), or of the pixels of images (N, height, width)."""
        if self.label_maps is None:
            if self.labels is None:
                return None
            return torch.from_numpy(self.labels[numbers])
        assert isinstance(self.preparation, Preprocess)
        maps = []
        for number in numbers.tolist():
            maps.append(self.label_maps.read(number, self.preparation))
        return torch.from_numpy(np.stack(maps))

    def _error(self, row: int, reason: str) -> str:
        """Why a row was left out, in a sentence that names it."""
        name = str(self.rows.names[row]) if isinstance(self.rows, Images) else f"row {row}"
        return reason if name in reason else f"{name}: {reason}"


def _kind_of(rows: Rows) -> str:
    """What the rows are, in the plural."""
    if isinstance(rows, Images):
        return "images"
    return "texts" if isinstance(rows, TextRows) else "features"


def _kind_for(preparation: Preparation | None) -> str:
    """What kind of rows this prepares, in the plural."""
    if preparation is None:
        return "features"
    return "images" if isinstance(preparation, Preprocess) else "texts"
