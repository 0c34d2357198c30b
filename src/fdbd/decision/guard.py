"""Guard: all stages as one module that is fitted, calibrated, asked and saved. Files are read in
`guard_file`."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from fdbd.core import artifact
from fdbd.core.batch import Batch, Head, Inputs, as_batch, required_logits
from fdbd.core.configuration import NotFittedError, require_name
from fdbd.core.perturbation import InputPerturbation
from fdbd.data.labels import Agreement
from fdbd.decision import hub, onnx_export
from fdbd.decision.answers import Decision, Explanation, NotCalibratedError, explain
from fdbd.decision.choice import Auto, Choice, choose
from fdbd.decision.choice_samples import HeldOut, Seen, in_pieces, pseudo_ood, set_aside
from fdbd.decision.identity import guard_id
from fdbd.decision.threshold import FewSamplesWarning, Target, Threshold, check_target
from fdbd.detectors import Detector, Ensemble, Shaped, as_detector, create_shaping
from fdbd.detectors.shaping import Shaping
from fdbd.fitting.driver import fit_detector, over_processes
from fdbd.fitting.overlap import Sketch, sample_hashes
from fdbd.fitting.spool import Spool
from fdbd.fitting.statistics import Count
from fdbd.networks.classifier import PRECISIONS, Classifier, rows_finite, split_batch
from fdbd.networks.find_head import HeadName
from fdbd.networks.wrapped import weights_hash
from fdbd.util.progress import track
from fdbd.util.version import __version__


class CalibrationScores(NamedTuple):
    """What a threshold is set from: scores, predicted classes, labels if given, and hashes of N
    samples."""

    scores: Tensor
    predicted: Tensor
    labels: Tensor | None
    hashes: Tensor


Data: TypeAlias = Inputs | Batch | Iterable[Inputs | Batch | CalibrationScores]
"""What a data loader yields, one batch of it, or `Batch`es of features; for `calibrate` also
finished scores."""


class Guard(nn.Module):
    """A classifier that knows what it does not know. It runs on the model's device; batches move
    there by themselves.

    Args:
        model: any ``nn.Module`` with a linear head that gives each sample one of C classes, a
            `Classifier`, or a bare `Head` for features without a network.
        detector: a detector or its name, as in `fdbd.create`; ``"auto"``, or `fdbd.Auto` with
            options, chooses and weighs detectors by itself (experimental).
        shaping: an activation shaping or its name, put before the detector.
        perturb: an `InputPerturbation`, applied to images before they are scored; None: none.
        head: name of the model's linear head, where it is not found by itself.
        layers: names of inner layers whose pooled features the detector reads (multi-layer MDS).

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> guard = Guard(model).fit([torch.randn(500, 4)]).calibrate([torch.randn(500, 4)], tpr=0.95)
    >>> decision = guard(torch.randn(5, 4))
    >>> decision.is_ood.shape, decision.logits.shape
    (torch.Size([5]), torch.Size([5, 3]))
    """

    def __init__(
        self,
        model: nn.Module | Head | None = None,
        detector: Detector | Auto | str = "fdbd",
        *,
        shaping: Shaping | str | None = None,
        perturb: InputPerturbation | None = None,
        head: HeadName = None,
        layers: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.auto = _as_auto(detector)
        """How the detector is chosen; None: it is the one that was given."""
        if self.auto is not None:
            if shaping is not None:
                raise ValueError('"auto" chooses among shapings by itself: leave shaping out')
            detector = self.auto.make_pool(self._can_be_weighed(model))
        assert not isinstance(detector, Auto)
        detector = as_detector(detector)
        if shaping is not None:
            detector = Shaped(create_shaping(shaping, before=type(detector)), detector)
        if perturb is not None and (detector.needs.network or detector.needs.calibration):
            why = (
                "perturbs the images by itself"
                if detector.needs.network
                else "has p-values of plain images"
            )
            raise ValueError(f"{detector.label} {why}: leave perturb out")
        if model is not None and not isinstance(model, (nn.Module, Head)):
            raise TypeError(
                f"model is a {type(model).__name__}, expected a torch.nn.Module or an fdbd.Head"
            )
        if isinstance(model, nn.Module) and not isinstance(model, Classifier):
            model = Classifier(model, head, layers or detector.needs.layers)
        self.detector: Detector = detector
        self.perturb = perturb
        self.threshold: Threshold | None = None
        self._head = model if isinstance(model, Head) else None
        self.classifier = model if isinstance(model, Classifier) else None
        self.about: dict[str, object] = {}
        """JSON values that are saved in the file: the model's origin, class names, how the guard
        was calibrated."""
        self.agreement: dict[str, Agreement] = {}
        """How often given labels are the model's own predictions, for ``"fit"`` and
        ``"calibration"``."""
        self.seen: Sketch | None = None
        """Which samples the fit saw, so that `calibrate` notices them; None: not known."""
        self._version = 0
        self._fitted_weights: str | None = None

    def fit(self, data: Data, *, held_out: Data | None = None, progress: bool = True) -> Self:
        """Fit the detector on training data, in one streaming pass of the network; a detector that
        needs several passes reads the features from a temporary file. Under torchrun each process
        passes its shard, and all end with the same detector.

        Args:
            data: a data loader of tensors or arrays, (inputs, labels), dicts or `Batch`es of
                features; or one batch.
            held_out: with ``"auto"``, in-distribution data that neither the network's training nor
                `data` hold, by which detectors are weighed; some 300 samples. None: `calibrate`
                sets a part of its data aside for that.
            progress: show a bar when it takes more than two seconds.
        """
        if held_out is not None and self.auto is None:
            raise ValueError('held_out is what "auto" weighs detectors by: leave it out')
        self.seen, self.threshold, self.agreement = Sketch(), None, {}
        self.about.pop("choice", None)
        self._version = 0
        self._fitted_weights = None
        combine, head = over_processes(), self.head
        if self.auto is not None:
            # What an earlier fit has chosen makes room for the whole pool.
            self.detector = self.auto.make_pool(self._can_be_weighed(self.classifier))
        with torch.no_grad(), Spool() as spool:
            items = iter(track(_items(data), "fitting", enabled=progress))
            batches: Iterable[Batch] = (self.noted(*self.training_batch(item)) for item in items)
            if self.detector.needs.passes not in (0, 1):
                for batch in batches:
                    spool.append(batch)
                batches = spool
            if self.auto is not None:
                # How much of the data a member keeps depends on how many there are.
                num_rows = _over_all(combine, spool.num_rows)
                self.detector = self.auto.make_pool(self._can_be_weighed(self.classifier), num_rows)
            fit_detector(self.detector, batches, head, combine)
            for item in (
                items
            ):  # not read by a detector that learns nothing, but `calibrate` compares with them
                self.seen.add(item.features if isinstance(item, Batch) else split_batch(item)[0])
        if combine is not None:
            self.seen = combine(self.seen)
        self._fitted_weights = self._weights()
        self.warn_of_labels("fit")
        if held_out is not None:
            self._choose(held_out, share=1.0, progress=progress)
        return self

    def calibrate(
        self,
        data: Data,
        *,
        tpr: float | None = None,
        alpha: float | None = None,
        per_class: bool = False,
        progress: bool = True,
    ) -> Self:
        """Set the threshold from in-distribution data that neither the network's training nor the
        fit has seen: scores on data that either has seen are too good, and the threshold then
        raises more false alarms than asked for. The guard warns about data of its own fit (a small
        calibration set can escape where the fit saw many more than 4,096 samples); it cannot know
        what the network was trained on.

        Args:
            data, progress: as for `fit`. With ``"auto"``, and without held-out data in the fit, a
                random part of `data` weighs the detectors, 300 samples or one half of them, and the
                rest sets the threshold.
            tpr: fraction of in-distribution samples to accept; 0.95 if neither is given.
            alpha: instead, the largest fraction of false alarms, on average over the draw of the
                calibration data: a conformal threshold.
            per_class: a threshold for each predicted class.
        """
        check_target(tpr, alpha)
        if self.auto is not None and self.choice is None and self.detector.is_fitted:
            # Scores of what weighed the detectors would be too good for a threshold.
            batches = self._choose(data, share=0.5, progress=progress)
        else:
            self.require_fitted()
            with torch.no_grad():
                batches = [
                    self.calibration_scores(item)
                    for item in track(_items(data), "calibrating", enabled=progress)
                ]
        if not batches:
            raise ValueError(
                "the calibration data hold no samples; give at least one non-empty batch"
            )
        known = Sketch()
        self.agreement.pop("calibration", None)
        for batch in batches:
            known.add_hashes(batch.hashes)
            self._compare("calibration", batch.labels, batch.predicted)
        if self.seen is not None and known.overlap(self.seen) > 0.5:
            _warn(
                "the calibration data were also used for the fit: scores on them are too good, and the threshold will "
                "raise more false alarms than asked for; calibrate on data that neither the fit nor the network's "
                "training has seen"
            )
        self.warn_of_labels("calibration")
        scores, predicted = (
            torch.cat([getattr(batch, part) for batch in batches])
            for part in ("scores", "predicted")
        )
        self.set_threshold(scores, predicted, tpr=tpr, alpha=alpha, per_class=per_class)
        return self

    @property
    def choice(self) -> Choice | None:
        """What ``"auto"`` has found and chosen; None: nothing yet, or the detector was given."""
        found = self.about.get("choice")
        return None if found is None else Choice.from_dict(found)

    def _can_be_weighed(self, model: object) -> bool:
        """Whether pseudo-OOD samples can be made: of images by themselves, of others by the user."""
        assert self.auto is not None
        return isinstance(model, nn.Module) or self.auto.kinds is not None

    def _choose(self, data: Data, share: float, progress: bool) -> list[CalibrationScores]:
        """Weigh the fitted pool by a random part of in-distribution data, at most this share of
        them, and make the chosen members the detector. Returns its scores on the rest."""
        assert self.auto is not None
        with torch.no_grad(), Spool() as spool:
            seen = map(self._seen, track(_items(data), "choosing", enabled=progress))
            held = HeldOut(self.auto.held_out, share, self.auto.seed)
            held_out, inputs, others = set_aside(seen, spool, held)
            held_out = self.features_alone(held_out)
            kinds = {
                kind: self._features_of(samples)
                for kind, samples in pseudo_ood(inputs, held_out, self.auto).items()
            }
            names = self.auto.specs(self._can_be_weighed(self.classifier))
            pool = self.detector
            assert isinstance(pool, Ensemble)
            self.detector, choice = choose(pool, names, held_out, kinds, self.auto)
            for note in choice.notes:
                _warn(f"auto: {note}")
            self.about["choice"] = choice.to_dict()
            rest = []
            for batch, hashes in others():
                scores = self.calibration_scores(batch)
                rest.append(scores._replace(hashes=hashes))
        return rest

    def _seen(self, item: Inputs | Batch) -> Seen:
        """What the network says of one batch of held-out data."""
        if isinstance(item, Batch):
            batch = self.features_alone(item)
            return Seen(batch, None, sample_hashes(batch.features))
        inputs, labels = split_batch(item)
        batch = self._require_classifier()(inputs)
        return Seen(batch._replace(labels=labels), inputs, sample_hashes(inputs))

    def _features_of(self, samples: Inputs | Batch) -> Batch:
        """Features of pseudo-OOD samples."""
        if isinstance(samples, Batch):
            return self.features_alone(samples)
        classifier = self._require_classifier()
        batches = [classifier(piece) for piece in in_pieces(split_batch(samples)[0])]
        logits = [required_logits(batch) for batch in batches]
        features = torch.cat([batch.features for batch in batches])
        return Batch(features, logits=torch.cat(logits))

    def _compare(self, stage: str, labels: Tensor | None, predicted: Tensor) -> None:
        """Count where given labels and predictions agree."""
        if labels is not None and len(labels) != len(predicted):
            raise ValueError(
                f"a batch has {len(predicted)} samples and {len(labels)} labels, expected one per sample"
            )
        if labels is not None and labels.ndim == 1 and not labels.is_floating_point():
            self.agreement.setdefault(stage, Agreement(self.head.num_classes)).add(
                labels, predicted
            )

    def warn_of_labels(self, stage: str) -> None:
        """Warn where the labels of a stage ("fit", "calibration") agree with predictions no better
        than chance."""
        names: Any = self.about.get("class_names") or ()
        if stage in self.agreement and (
            text := self.agreement[stage].warning(f"the {stage} data", names)
        ):
            _warn(text)

    def set_threshold(
        self, scores: Tensor, labels: Tensor | None = None, **target: Unpack[Target]
    ) -> None:
        """Calibrate on in-distribution scores (N,) that are already there; labels (N,) are
        predicted classes."""
        threshold = Threshold.of(
            scores, labels, num_classes=self.detector.head.num_classes, **target
        )
        if caution := threshold.caution:
            _warn(caution, FewSamplesWarning)
        self.threshold = threshold
        self._version += 1
        self.about["calibration"] = {**threshold.to_config(), "promise": threshold.guarantee}

    def forward(self, images: Inputs | Batch) -> Decision:
        """The decision on a batch of whatever the model takes."""
        is_quiet = torch.compiler.is_compiling() or not torch.is_grad_enabled()
        with nullcontext() if is_quiet else torch.no_grad():
            logits, scores, _ = self.observe(images)
            return self.decision(logits, scores)

    def decide(self, batch: Batch) -> Decision:
        """The same decision from features, without the network."""
        return cast(Decision, self(as_batch(batch)))

    def score(self, images: Inputs | Batch) -> Tensor:
        """(N,) scores alone; needs no calibration."""
        with torch.no_grad():
            return self.observe(images)[1]

    def explain(self, images: Inputs | Batch) -> Explanation:
        """Where the samples stand: images, or a `Batch` of features. Distances are after shaping
        where there is one."""
        with torch.no_grad():
            logits, scores, scored = self.observe(images)
            return explain(self.decision(logits, scores), scored, self.detector, self.calibrated)

    # ── the stages by themselves, for drivers (Ray, ONNX, jobs)
    # ────────────────────────────────────────────────────

    @property
    def head(self) -> Head:
        """The linear head: the model's with its present weights, or that of the fit where there is
        no model."""
        if self.classifier is not None:
            return self.classifier.head
        if self._head is not None:
            return self._head
        if self.detector.is_fitted:
            return self.detector.head
        raise ValueError(
            "the guard has neither a model nor a head: give Guard(model) or Guard(Head(weight, bias))"
        )

    @property
    def calibrated(self) -> Threshold:
        """The threshold; NotCalibratedError if there is none."""
        if self.threshold is None:
            remedy = "call calibrate(loader, tpr=0.95) on in-distribution data, or use score()"
            raise NotCalibratedError(f"the guard has no threshold: {remedy}")
        return self.threshold

    def require_fitted(self) -> None:
        """Raise NotFittedError unless the guard was fitted or loaded."""
        if self.auto is not None and self.choice is None and self.detector.is_fitted:
            calls = "guard.calibrate(loader), or guard.fit(loader, held_out=other_loader)"
            raise NotFittedError(f'"auto" has not chosen its detectors yet: call {calls}')
        if not self.detector.is_fitted:
            calls = "guard.fit(loader) on training data, then guard.calibrate(loader) on other data"
            raise NotFittedError(f"the guard is not fitted: call {calls}")

    def observe(self, images: Inputs | Batch) -> tuple[Tensor, Tensor, Batch]:
        """Logits (N, C) of the untouched model, scores (N,), and the Batch that was scored. A score
        is −inf if it, or a number that entered the network, is not finite: a saturating activation,
        such as ReLU6, turns an infinite pixel into finite features."""
        self.require_fitted()
        detector, finite = self.detector, None
        if isinstance(images, Batch):
            plain = scored = self.features_alone(images)
        else:
            classifier, inputs = self._require_classifier(), split_batch(images)[0]
            finite = rows_finite(inputs)  # before the network, which may write to them
            if self.perturb is None:
                plain = scored = detector.observe(
                    inputs if detector.needs.network else images, classifier
                )
            else:
                score = detector.score if self.perturb.objective == "score" else None
                plain, moved = self.perturb.seen_and_moved(inputs, classifier, score)
                scored = classifier(moved)
        logits = plain.logits
        if logits is None:
            logits = detector.head(plain.features.to(detector.head.weight.dtype))
        scores = detector.score(scored)
        trusted = scores < torch.inf  # false for NaN, too
        if finite is not None and finite.shape == scores.shape:
            trusted = trusted & finite.to(scores.device)
        return logits, torch.where(trusted, scores, -torch.inf), scored

    def decision(self, logits: Tensor, scores: Tensor) -> Decision:
        """The decision that follows from the model's logits (N, C) and the scores (N,)."""
        labels = logits.argmax(dim=1)
        return Decision(logits, labels, scores, *self.calibrated.decide(scores, labels))

    def training_batch(self, item: Inputs | Batch) -> tuple[Batch, Tensor]:
        """What the detector learns from one batch of training data, and (N,) hashes of its samples.
        Images are not perturbed, since that may need a fitted score. A number that is not finite is
        an error."""
        if isinstance(item, Batch):
            batch = self.features_alone(item)
            return batch, sample_hashes(batch.features)
        inputs, labels = split_batch(item)
        if (finite := rows_finite(inputs)) is not None and not finite.all():
            row = int(finite.int().argmin())
            raise ValueError(
                f"row {row} of a training batch holds NaN or infinity; leave such samples out of the fit"
            )
        batch = self.detector.observe(inputs, self._require_classifier(), labels)
        if labels is not None:
            batch = batch._replace(labels=labels.to(batch.features.device))
        return batch, sample_hashes(inputs)

    def noted(self, batch: Batch, hashes: Tensor) -> Batch:
        """The same training batch; the guard notes its samples and labels for `calibrate` and
        `warn_of_labels`."""
        assert self.seen is not None
        self.seen.add_hashes(hashes)
        logits = batch.logits
        if (
            logits is None and "fit" not in self.agreement
        ):  # only for the first batch, to save the product
            logits = self.head(batch.features.to(self.head.weight))
        if logits is not None and len(logits):
            self._compare("fit", batch.labels, logits.argmax(dim=1))
        return batch

    def calibration_scores(self, item: Inputs | Batch | CalibrationScores) -> CalibrationScores:
        """What `calibrate` asks of one batch of calibration data."""
        if isinstance(item, CalibrationScores):
            return item
        logits, scores, _ = self.observe(item)
        inputs, labels = (
            (item.features, item.labels) if isinstance(item, Batch) else split_batch(item)
        )
        return CalibrationScores(scores, logits.argmax(dim=1), labels, sample_hashes(inputs))

    def features_alone(self, batch: Batch) -> Batch:
        """A batch of features as the detector takes it, on its device; an error where features are
        not enough."""
        lacks_layers = self.detector.needs.layers and batch.layers is None
        if self.detector.needs.network or self.perturb is not None or lacks_layers:
            name = (
                self.detector.label if self.perturb is None else "a guard with input perturbation"
            )
            raise ValueError(
                f"{name} needs the images and the network, features are not enough: call guard(images)"
            )
        batch = batch.to(self.detector.head.weight.device if self.detector.is_fitted else None)
        head = self.detector.head if self.detector.is_fitted else self.head
        for what, width in (("features", head.num_features), ("logits", head.num_classes)):
            part = getattr(batch, what)
            if part is not None and (part.ndim != 2 or part.shape[1] != width):
                raise ValueError(
                    f"{what} have shape {tuple(part.shape)}, expected (N, {width}) as the head has it"
                )
        return batch

    def _require_classifier(self) -> Classifier:
        if self.classifier is None:
            calls = "decide(fdbd.Batch(features)), or give the model to fdbd.Guard(model) or fdbd.load(path, model)"
            raise ValueError(f"the guard has no model, so it takes features: call {calls}")
        return self.classifier

    @property
    def id(self) -> str:
        """Which guard this is: 16 hexadecimal digits that follow from detector, threshold, head and
        the weights of the model, and change when any of them does. Saving and loading keep them.
        Every access reads all weights: keep the id where it is needed often."""
        self.require_fitted()
        return guard_id(self._description_for_id(), self._tensors(), self._weights())

    @property
    def version(self) -> int:
        """How many thresholds the guard has had since its fit; 0 before the first."""
        return self._version

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write detector, threshold and fingerprints of head and model as one safetensors file; the
        model is not in it."""
        self.require_fitted()
        require_name(self.detector)
        tensors = self._tensors()
        if self.seen is not None:
            tensors["seen"] = self.seen.hashes
        # The weights that the detector was fitted with: those of now may have been trained since.
        weights = self._fitted_weights
        if weights is None:
            weights = self._weights()
        description = {
            **self._description(),
            "version": __version__,
            "guard_version": self._version,
            "weights": weights,
            "head_name": None if self.classifier is None else self.classifier.head_name,
            "about": self.about,
        }
        artifact.write(path, description, tensors)

    def restore_identity(self, version: int, weights: str | None) -> None:
        """Take over what a file says of its guard: `version`, and the weights of the fit."""
        self._version = version
        self._fitted_weights = weights

    def has_weights_of_fit(self) -> bool:
        """Whether the model has the weights that the guard was fitted with, as far as is known."""
        return self._fitted_weights in (None, self._weights())

    def _description(self) -> dict[str, object]:
        """The parts of the guard as JSON values, without their tensors."""
        layers: list[str] = []
        autocast = None
        if self.classifier is not None:
            layers = list(self.classifier.layer_names)
            precisions = {dtype: name for name, dtype in PRECISIONS.items()}
            if self.classifier.autocast is not None:
                autocast = precisions[self.classifier.autocast]
        return {
            "head": self.detector.head.fingerprint(),
            "layers": layers,
            "autocast": autocast,
            "detector": self.detector.to_config(),
            "threshold": None if self.threshold is None else self.threshold.to_config(),
            "perturb": None if self.perturb is None else self.perturb.to_config(),
        }

    def _description_for_id(self) -> dict[str, object]:
        description = self._description()
        # Layers are in the detector's options, too; without a model the guard knows only those.
        # A precision belongs to the model as well, and its weights are hashed.
        del description["layers"], description["autocast"]
        description["preprocess"] = self.about.get("preprocess")
        return description

    def _tensors(self) -> dict[str, Tensor]:
        """The fitted state of detector and threshold, by the names in the file."""
        tensors = {}
        for name, tensor in self.detector.state_dict().items():
            tensors[f"detector.{name}"] = tensor
        if self.threshold is not None:
            for name, tensor in self.threshold.state_dict().items():
                tensors[f"threshold.{name}"] = tensor
        return tensors

    def _weights(self) -> str | None:
        """The hash of the model's present weights; without a model, of those of the fit; None: the
        guard was fitted on features, or by an older version of the library."""
        if self.classifier is None:
            return self._fitted_weights
        return weights_hash(self.classifier.model)

    export_onnx = onnx_export.export
    push_to_hub = hub.push


def warn_of_other_weights(guard: Guard, path: str | os.PathLike[str]) -> None:
    """Warn if the model has the head of the fit in front of another backbone."""
    if not guard.has_weights_of_fit():
        _warn(
            f"{os.fspath(path)!r} was fitted on a model with other weights; the head is the same, "
            "but the features have changed, and the threshold does not hold for them: load the "
            "guard with the model that it was fitted on, or fit a new guard"
        )


def _as_auto(detector: object) -> Auto | None:
    if isinstance(detector, Auto):
        return detector
    is_auto = isinstance(detector, str) and detector.strip().lower() == "auto"
    return Auto() if is_auto else None


def _over_all(combine: Callable[[Any], Any] | None, num_rows: int) -> int:
    """The number of training samples of all processes."""
    rows = Count()
    rows.count = num_rows
    if combine is not None:
        rows = combine(rows)
    return rows.count


def _warn(text: str, category: type[UserWarning] = UserWarning) -> None:
    """Warn where code outside this package called it."""
    frame, level = sys._getframe(), 1
    while (
        frame.f_back is not None
        and str(frame.f_globals.get("__name__")).partition(".")[0] == "fdbd"
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def _items(data: Data) -> Iterable[Any]:
    """What to iterate over: a loader as it is, one batch as a list of one."""
    is_batch, pair = isinstance(data, (Tensor, np.ndarray, Batch, Mapping)), cast(Any, data)
    if (
        isinstance(data, (tuple, list))
        and len(data) == 2
        and all(isinstance(d, (Tensor, np.ndarray)) for d in data)
    ):
        inputs, labels = pair  # or two batches: labels have one number per row of the inputs
        is_batch = inputs.ndim > 1 and labels.ndim == 1 and len(inputs) == len(labels)
    if is_batch:
        return [data]
    if not isinstance(data, Iterable):
        raise TypeError(
            f"data are a {type(data).__name__}, expected a data loader or another iterable of batches"
        )
    return data
