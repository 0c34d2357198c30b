"""The stages of a guard one by one, for drivers that run them elsewhere or on data of their own:
Ray, exports, jobs, the service. Users call `Guard`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fdbd.core.batch import Batch, Inputs, required_logits
from fdbd.core.configuration import NotFittedError
from fdbd.core.grid import Grid
from fdbd.decision.answers import Decision, NotCalibratedError
from fdbd.decision.choice import Pool, choose_members
from fdbd.decision.choice_samples import (
    HeldOut,
    Seen,
    SetAside,
    copied,
    first_pictures,
    in_pieces,
    pseudo_ood,
)
from fdbd.decision.inputs import InputRange
from fdbd.decision.map_threshold import MapThreshold
from fdbd.decision.maps import (
    NOT_FOR_MAPS,
    MapDecision,
    batch_hashes,
    decide_maps,
    draw_positions,
)
from fdbd.decision.record import GuardRecord, warn_caller
from fdbd.decision.threshold import Threshold
from fdbd.fitting.overlap import Sketch, sample_hashes
from fdbd.fitting.spool import Spool
from fdbd.networks.classifier import Classifier, rows_finite, split_batch, sum_in_sight
from fdbd.util.progress import track
from fdbd.util.terminal import one_line
from fdbd.util.torch_compat import is_plain, tracing

if TYPE_CHECKING:
    from fdbd.decision.guard import Data, Guard

REUSED = 0.1
"""Share of calibration samples that the fit has seen, above which the guard warns: a few are equal
by accident."""
_FEW = 256
"""Scores that are looked at one by one faster than by torch."""


class TrainingBatch(NamedTuple):
    """What a fit takes from one batch of training data."""

    batch: Batch
    """What the detector learns from."""
    hashes: Tensor
    """(N,) hashes of the samples, by which `Guard.calibrate` knows them again."""
    inputs: InputRange | None
    """The range of the model's inputs."""
    are_maps: bool = False
    """Whether the rows are positions of maps."""


class CalibrationScores(NamedTuple):
    """What a threshold is set from, for N samples."""

    scores: Tensor
    predicted: Tensor
    """(N,) predicted classes."""
    labels: Tensor | None
    """(N,) given classes."""
    hashes: Tensor
    """(N,) hashes of the samples, by which those of the fit are known again."""


class CalibrationMaps(NamedTuple):
    """What a map threshold is set from, for N images of M positions."""

    scores: Tensor
    """(N, M)."""
    predicted: Tensor
    """(K,) predicted classes at the positions that a fit would draw."""
    labels: Tensor | None
    """(K,) given classes there."""
    hashes: Tensor
    """(N,) hashes of the images, by which those of the fit are known again."""


class ScoredRest(NamedTuple):
    """Held-out samples that did not weigh the detectors, with the scores of those that were
    chosen."""

    batch: Batch
    scores: CalibrationScores


class Chosen(NamedTuple):
    """What `Stages.choose_from` leaves besides the detector."""

    rest: list[ScoredRest]
    pictures: dict[str, Tensor]
    """One image (C, H, W) of each kind, from 0 to 1; none if samples are not images."""


class Observation(NamedTuple):
    """What a guard sees of N samples before it decides."""

    logits: Tensor
    """(N, C) of the untouched model."""
    scores: Tensor
    """(N,)."""
    scored: Batch
    """The batch that the detector scored: of perturbed images, if the guard perturbs."""


class Stages:
    """The stages of one guard; they change it where the guard's own methods would.

    >>> import fdbd
    >>> guard = fdbd.Guard(fdbd.Head(torch.eye(3))).fit([Batch(torch.rand(50, 3))])
    >>> guard.stages.observe(Batch(torch.rand(4, 3))).scores.shape
    torch.Size([4])
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    @property
    def record(self) -> GuardRecord:
        """What the guard noted during fit and calibration."""
        return self._guard._record

    def replace_record(self, record: GuardRecord) -> None:
        """Take over what a file says that the guard noted."""
        self._guard._record = record

    def require_fitted(self) -> None:
        """NotFittedError unless the guard was fitted or loaded."""
        if self.awaits_choice():
            raise NotFittedError(
                '"auto" has not chosen its detectors yet: call guard.calibrate(loader), or '
                "guard.fit(loader, held_out=other_loader)"
            )
        if not self._guard.detector.is_fitted:
            raise NotFittedError(
                "the guard is not fitted: call guard.fit(loader) on training data, then "
                "guard.calibrate(loader) on other data"
            )

    def require_threshold(self) -> Threshold:
        """The threshold of whole samples; NotCalibratedError if there is none, ValueError if it is
        one of maps."""
        if self._guard.map_threshold is not None:
            raise ValueError(NOT_FOR_MAPS)
        if self._guard.threshold is None:
            raise NotCalibratedError(
                "the guard has no threshold: call calibrate(loader, tpr=0.95) on in-distribution "
                "data, or use score()"
            )
        return self._guard.threshold

    def require_any_threshold(self) -> Threshold | MapThreshold:
        """The threshold of whole samples or of maps; NotCalibratedError if there is none."""
        if self._guard.map_threshold is not None:
            return self._guard.map_threshold
        return self.require_threshold()

    def require_map_threshold(self) -> MapThreshold:
        """The threshold of maps; NotCalibratedError if there is none."""
        if self._guard.map_threshold is None:
            raise NotCalibratedError(
                "the guard has no threshold of maps: call calibrate(loader, alpha=0.05) on "
                "in-distribution images, or use score(); a threshold from single rows promises "
                "nothing, since the positions of an image are alike"
            )
        return self._guard.map_threshold

    def require_classifier(self) -> Classifier:
        """The model; ValueError if the guard takes features."""
        if self._guard.classifier is None:
            raise ValueError(
                "the guard has no model, so it takes features: call decide(fdbd.Batch(features)), "
                "or give the model to fdbd.Guard(model) or fdbd.load(path, model)"
            )
        return self._guard.classifier

    # ── fit

    def begin_fit(self) -> None:
        """Forget the threshold, the choice and the notes of an earlier fit."""
        self._guard.about.pop("choice", None)
        self._guard.threshold = None
        self._guard.map_threshold = None
        self._guard._record = GuardRecord(seen=Sketch())

    def training_batch(self, item: Inputs | Batch) -> TrainingBatch:
        """What the detector learns from one batch of training data. Images are not perturbed, since
        that may need a fitted score. ValueError for a number that is not finite."""
        if isinstance(item, Batch):
            batch = self.features_alone(item)
            hashes = batch_hashes(batch)
            are_maps = batch.grid is not None
            if are_maps:
                batch = self._training_positions(batch, hashes)
            return TrainingBatch(batch, hashes, None, are_maps)
        inputs, labels = split_batch(item)
        finite = rows_finite(inputs)
        if finite is not None and not finite.all():
            row = int(finite.int().argmin())
            raise ValueError(
                f"row {row} of a training batch holds NaN or infinity; leave such samples out of "
                "the fit"
            )
        if labels is None and self._guard.detector.needs.labels:
            _refuse_text_labels(item)
        # Before the network, which may write to its inputs.
        hashes = sample_hashes(inputs)
        value_range = InputRange.from_inputs(inputs)
        batch = self._guard.detector.observe(inputs, self.require_classifier(), labels)
        batch = self._with_grid(batch)
        if labels is not None:
            labels = labels.to(batch.features.device)
            if batch.grid is not None:
                labels = batch.grid.label_rows(labels)
            batch = batch._replace(labels=labels)
        are_maps = batch.grid is not None
        if are_maps:
            batch = self._training_positions(batch, hashes)
        return TrainingBatch(batch, hashes, value_range, are_maps)

    def _with_grid(self, batch: Batch) -> Batch:
        """Rows of the model as they lie in maps, if the guard is one of maps. The model's output
        alone does not tell a map of one position from a prediction for the whole image."""
        if not self.record.gives_maps or batch.grid is not None:
            return batch
        return batch._replace(grid=Grid(len(batch.features), 1, 1))

    def _training_positions(self, batch: Batch, hashes: Tensor) -> Batch:
        """The positions of maps that the detector learns from."""
        self.check_takes_maps()
        return draw_positions(batch, hashes, self._guard.head.num_classes)

    def check_takes_maps(self) -> None:
        """ValueError if the guard scores images as a whole, and cannot score maps."""
        guard = self._guard
        if guard.auto is not None:
            raise ValueError(
                '"auto" weighs detectors by whole images, and the model predicts maps: name a '
                "detector, such as fdbd"
            )
        if guard.detector.needs.network or guard.perturb is not None:
            raise ValueError(
                f"{guard.detector.label} with changed images needs one prediction per image, and "
                "the model predicts maps: use a detector that reads features, such as fdbd, "
                "without perturb"
            )

    def note(self, training: TrainingBatch) -> Batch:
        """The batch to learn from; its samples, labels and range are noted, and whether it is of
        maps."""
        record = self.record
        if training.are_maps:
            record.gives_maps = True
        if record.seen is not None:
            record.seen.add_hashes(training.hashes)
        if training.inputs is not None:
            record.inputs = training.inputs.merged(record.inputs)
        batch = training.batch
        logits = batch.logits
        head = self._guard.head
        if logits is None and "fit" not in record.agreement:
            # For the first batch alone, to save the product.
            logits = head(batch.features.to(head.weight))
        if logits is not None and len(logits):
            record.compare("fit", batch.labels, logits.argmax(dim=1), head.num_classes)
        else:
            record.count_labels("fit", batch.labels)
        return batch

    def end_fit(self) -> None:
        """Note the model's weights, and warn if labels and predictions do not agree, or if scores
        depend on the batch."""
        self.record.weights = self._guard._weights()
        self.warn_of_batch_statistics()
        self.warn_of_labels("fit")

    # ── the choice of a detector, with "auto"

    def awaits_choice(self) -> bool:
        """Whether "auto" has a fitted pool and has not chosen from it."""
        guard = self._guard
        return guard.auto is not None and guard.choice is None and guard.detector.is_fitted

    def make_pool(self, num_samples: int | None = None) -> None:
        """Take the unfitted pool of "auto" as the detector, for a fit on `num_samples` samples;
        None: their number is not known yet."""
        guard = self._guard
        assert guard.auto is not None
        guard.detector = guard.auto.make_pool(guard.auto.can_weigh(guard.classifier), num_samples)

    def choose_from(self, data: Data, *, share: float = 1.0, progress: bool = True) -> Chosen:
        """Weigh the fitted pool of "auto" by a random part of in-distribution data, at most this
        share of them, and make the chosen members the detector."""
        guard = self._guard
        auto = guard.auto
        assert auto is not None
        with torch.no_grad(), Spool() as spool:
            batches = track(batches_in(data), "choosing", enabled=progress)
            held = HeldOut(auto.held_out, share, auto.seed)
            divided = SetAside(map(self._seen, batches), spool, held)
            held_out = self.features_alone(divided.features)
            samples = pseudo_ood(divided.inputs, held_out, auto)
            self._take_chosen(held_out, samples)
            rest = []
            for batch, hashes in divided.others():
                scores = self.calibration_scores(batch)
                rest.append(ScoredRest(batch, scores._replace(hashes=hashes)))
            pictures = first_pictures(samples, divided.inputs)
        return Chosen(rest, pictures)

    def _take_chosen(self, held_out: Batch, samples: Mapping[str, Any]) -> None:
        """Make those members of the pool the detector that best tell held-out features from
        pseudo-OOD samples, which come by kind."""
        guard = self._guard
        auto = guard.auto
        pool = guard.detector
        assert auto is not None
        assert isinstance(pool, Pool)
        kinds = {kind: self._features_of_kind(kind, given) for kind, given in samples.items()}
        guard.detector, choice = choose_members(pool, held_out, kinds, auto)
        for note in choice.notes:
            warn_caller(f"auto: {note}")
        # From here on the guard scores by the detector that was chosen.
        guard.about["choice"] = choice.to_dict()

    def _features_of_kind(self, kind: str, samples: Inputs | Batch) -> Batch:
        """Features of pseudo-OOD samples; a ValueError names the kind."""
        if not isinstance(samples, Batch) and self._guard.classifier is None:
            raise ValueError(
                f"the kind {kind!r} is a {type(samples).__name__}, and the guard has no model: "
                "give features as fdbd.Batch(features)"
            )
        try:
            batch = self.features_of(samples)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(
                f"the kind {kind!r} is not what the model takes: {one_line(error)}"
            ) from error
        if len(batch.features) == 0:
            raise ValueError(f"the kind {kind!r} has no samples, expected at least 1, better 50")
        return batch

    def features_of(self, samples: Inputs | Batch) -> Batch:
        """Features and logits of samples, of any number; a batch of features as it is."""
        if isinstance(samples, Batch):
            return self.features_alone(samples)
        classifier = self.require_classifier()
        inputs, _ = split_batch(samples)
        batches = [classifier(piece) for piece in in_pieces(inputs)]
        if not batches:
            return Batch(torch.zeros(0, self._guard.head.num_features))
        logits = [required_logits(batch) for batch in batches]
        features = torch.cat([batch.features for batch in batches])
        return Batch(features, logits=torch.cat(logits))

    def _seen(self, item: Inputs | Batch) -> Seen:
        """What the network says of one batch of held-out data."""
        if isinstance(item, Batch):
            batch = self.features_alone(item)
            return Seen(batch, None, sample_hashes(batch.features))
        inputs, labels = split_batch(item)
        # Before the network, which may write to its inputs.
        hashes = sample_hashes(inputs)
        as_given = copied(inputs)
        batch = self.require_classifier()(inputs)
        if batch.grid is not None:
            self.check_takes_maps()
        return Seen(batch._replace(labels=labels), as_given, hashes)

    # ── calibration

    def calibration_scores(self, item: Inputs | Batch | CalibrationScores) -> CalibrationScores:
        """What `Guard.calibrate` needs of one batch of calibration data; ValueError if the guard
        is one of maps."""
        found = self.calibration_part(item)
        # A guard of maps is calibrated anew by `Guard.calibrate` alone: a driver that gives it rows
        # would take its promise away unnoticed.
        if isinstance(found, CalibrationMaps) or self._guard.map_threshold is not None:
            raise ValueError(NOT_FOR_MAPS)
        return found

    def calibration_part(
        self, item: Inputs | Batch | CalibrationScores
    ) -> CalibrationScores | CalibrationMaps:
        """What `Guard.calibrate` needs of one batch of calibration data, of whole samples or of
        maps."""
        if isinstance(item, CalibrationScores):
            return item
        if isinstance(item, Batch):
            labels = item.labels
            hashes = batch_hashes(item)
        else:
            inputs, labels = split_batch(item)
            hashes = sample_hashes(inputs)
        seen = self.observe(item)
        predicted = seen.logits.argmax(dim=1)
        grid = seen.scored.grid
        if grid is None:
            return CalibrationScores(seen.scores, predicted, labels, hashes)
        self.record.gives_maps = True
        if labels is not None and not isinstance(item, Batch):
            labels = grid.label_rows(labels)
        # Labels and predictions are only compared, for which some positions are enough.
        rows = Batch(predicted[:, None], labels=labels, grid=grid)
        some = draw_positions(rows, hashes, self._guard.head.num_classes)
        scores = grid.to_maps(seen.scores).flatten(1)
        return CalibrationMaps(scores, some.features[:, 0], some.labels, hashes)

    def note_calibration(self, batches: Sequence[CalibrationScores | CalibrationMaps]) -> None:
        """Compare labels with predictions, and warn if the fit has seen the samples."""
        record = self.record
        record.agreement.pop("calibration", None)
        known = Sketch()
        for batch in batches:
            known.add_hashes(batch.hashes)
            num_classes = self._guard.head.num_classes
            record.compare("calibration", batch.labels, batch.predicted, num_classes)
        reused = 0.0 if record.seen is None else known.overlap(record.seen)
        if reused > REUSED:
            warn_caller(
                f"the calibration data were also used for the fit ({reused:.0%} of them): scores "
                "on them are too good, and the threshold will raise more false alarms than asked "
                "for; calibrate on data that neither the fit nor the network's training has seen"
            )
        self.warn_of_labels("calibration")

    def warn_of_labels(self, stage: str) -> None:
        """Warn if the labels of a stage ("fit", "calibration") agree with predictions no better
        than chance, or lack classes of the model."""
        if stage not in self.record.agreement:
            return
        names: Any = self._guard.about.get("class_names") or ()
        agreement = self.record.agreement[stage]
        source = f"the {stage} data"
        mistaken = agreement.warning(source, names)
        if mistaken:
            warn_caller(mistaken)
        missing = agreement.missing(source, names)
        # Labels of maps are positions, of which one image has many.
        if missing and not self.record.gives_maps:
            warn_caller(missing)

    def warn_of_batch_statistics(self) -> None:
        """Warn if the model normalises by the batch at hand: the score of a sample then depends on
        the samples beside it."""
        classifier = self._guard.classifier
        if classifier is None or not classifier.batch_statistics:
            return
        names = ", ".join(classifier.batch_statistics[:3])
        warn_caller(
            f"{len(classifier.batch_statistics)} batch normalisations ({names}, …) use the "
            "statistics of the batch at hand, so a sample's score depends on the samples beside "
            "it, and the threshold holds for such batches alone: call model.eval(), or give the "
            "layers running statistics"
        )

    # ── decision

    def observe(self, images: Inputs | Batch) -> Observation:
        """Logits, scores and the batch that was scored. A score is −inf if it, or a number that
        entered the network, is not finite: a saturating activation, such as ReLU6, turns an
        infinite pixel into finite features."""
        guard = self._guard
        detector = guard.detector
        self.require_fitted()
        finite: Tensor | None = None
        if isinstance(images, Batch):
            plain = self.features_alone(images)
            scored = plain
        else:
            inputs, _ = split_batch(images)
            # Before the network, which may write to its inputs.
            total = sum_in_sight(inputs)
            if total is None or not math.isfinite(total):
                finite = rows_finite(inputs)
            self._warn_of_range(inputs, total)
            plain, scored = self._run_network(images, inputs)
        logits = plain.logits
        if logits is None:
            head = detector.head
            logits = head(plain.features.to(head.weight.dtype))
        scores = detector.score(scored)
        if scored.grid is not None:
            self.check_takes_maps()
            if finite is not None:
                # One number of an image may have entered all of its positions.
                finite = finite[:, None].expand(-1, scored.grid.positions).reshape(-1)
        return Observation(logits, _fail_closed(scores, finite), scored)

    def decision(self, logits: Tensor, scores: Tensor) -> Decision:
        """The decision that follows from the model's logits (N, C) and the scores (N,)."""
        labels = logits.argmax(dim=1)
        p_values, is_ood = self.require_threshold().decide(scores, labels)
        return Decision(logits, labels, scores, p_values, is_ood)

    def map_decision(self, seen: Observation) -> MapDecision:
        """The decision on maps that the guard has seen."""
        assert seen.scored.grid is not None
        return decide_maps(seen.scored.grid, seen.logits, seen.scores, self.require_map_threshold())

    def features_alone(self, batch: Batch) -> Batch:
        """A batch of features as the detector takes it, on its device; ValueError if features are
        not enough."""
        guard = self._guard
        detector = guard.detector
        needs_layers = bool(detector.needs.layers) and batch.layers is None
        if detector.needs.network or guard.perturb is not None or needs_layers:
            name = detector.label
            if guard.perturb is not None:
                name = "a guard with input perturbation"
            raise ValueError(
                f"{name} needs the images and the network, features are not enough: call "
                "guard(images)"
            )
        if detector.is_fitted:
            head = detector.head
            device = head.weight.device
        else:
            head = guard.head
            device = None
        if not _is_on(batch, device):
            batch = batch.to(device)
        _check_width("features", batch.features, head.num_features)
        if batch.logits is not None:
            _check_width("logits", batch.logits, head.num_classes)
        return batch

    def _run_network(self, item: Inputs, inputs: Any) -> tuple[Batch, Batch]:
        """The untouched model's batch, and the batch to score. `item` is what was given, perhaps
        with labels, which the batch then has too; `inputs` is the part that the model takes."""
        guard = self._guard
        detector = guard.detector
        classifier = self.require_classifier()
        if guard.perturb is None:
            given: Any = item
            # `observe` may change the images themselves. And labels of maps belong to positions,
            # which the classifier alone may not know of.
            if detector.needs.network or self.record.gives_maps:
                given = inputs
            plain = self._with_grid(detector.observe(given, classifier))
            return plain, plain
        score = detector.score if guard.perturb.objective == "score" else None
        plain, moved = guard.perturb.seen_and_moved(inputs, classifier, score)
        return plain, classifier(moved)

    def _warn_of_range(self, inputs: Any, total: float | None) -> None:
        """Warn once if a batch, whose numbers have this sum, lies outside of the range of the fit's
        inputs."""
        record = self.record
        if record.inputs is None or record.has_warned_of_inputs or tracing():
            return
        if record.inputs.is_missed_by(inputs, total):
            record.has_warned_of_inputs = True
            low, high = record.inputs
            warn_caller(
                f"this batch lies outside of the inputs of the fit, which were from {low:.4g} to "
                f"{high:.4g}: prepare images in the same way (0…255 or 0…1, normalised or not); "
                "the guard does not say so again"
            )


def batches_in(data: Data) -> Iterable[Any]:
    """What to iterate over: a loader as it is, one batch as a list of one."""
    if isinstance(data, (Tensor, np.ndarray, Batch, Mapping)) or _is_labelled_batch(data):
        return [data]
    if not isinstance(data, Iterable):
        raise TypeError(
            f"data are a {type(data).__name__}, expected a data loader or another iterable of "
            "batches"
        )
    return data


def _is_labelled_batch(data: Any) -> bool:
    """Whether a pair is (inputs, labels), and not a list of two batches: labels have one number per
    row of the inputs."""
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        return False
    inputs, labels = data
    if not isinstance(inputs, (Tensor, np.ndarray)) or not isinstance(labels, (Tensor, np.ndarray)):
        return False
    return inputs.ndim > 1 and labels.ndim == 1 and len(inputs) == len(labels)


def _fail_closed(scores: Tensor, finite: Tensor | None) -> Tensor:
    """The scores (N,), with −inf for each that is not finite, and for each row of inputs that is
    not `finite` (N,)."""
    # A model may give another number of rows than its inputs have.
    if finite is not None and finite.shape != scores.shape:
        finite = None
    # Nearly always all scores are finite, and for few of them Python sees that in a fifth of the
    # time. Not while a graph is traced: there, the number of rows must not decide.
    can_look = finite is None and is_plain(scores)
    if can_look and scores.numel() <= _FEW and math.isfinite(sum(scores.tolist())):
        return scores
    # NaN compares as False.
    is_trusted = scores < torch.inf
    if finite is not None:
        is_trusted = is_trusted & finite.to(scores.device, non_blocking=True)
    return torch.where(is_trusted, scores, -torch.inf)


def _refuse_text_labels(item: Any) -> None:
    """ValueError if the labels of a batch are text, which `split_batch` leaves out, since a second
    element may as well be file names."""
    labels: Any = None
    if isinstance(item, Mapping):
        labels = item.get("labels", item.get("label"))
    elif isinstance(item, (tuple, list)) and len(item) > 1:
        labels = item[1]
    first = labels
    if isinstance(labels, (tuple, list, np.ndarray)) and len(labels):
        first = labels[0]
    if isinstance(first, str):
        raise ValueError(
            f"the labels are text, such as {str(first)!r}, and this detector is fitted by class: "
            "give class indices (N,), the positions of the names in the model's list of classes"
        )


def _is_on(batch: Batch, device: torch.device | None) -> bool:
    """Whether all parts of a batch are tensors on this device already."""
    for part in batch:
        if part is None:
            continue
        if not isinstance(part, Tensor) or part.device != device:
            return False
    return True


def _check_width(what: str, values: Tensor, width: int) -> None:
    if values.ndim != 2 or values.shape[1] != width:
        raise ValueError(
            f"{what} have shape {tuple(values.shape)}, expected (N, {width}) as the head has it"
        )
