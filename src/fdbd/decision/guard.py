"""Guard: all stages as one module that is fitted, calibrated, asked and saved. The stages one by
one are in `stages`, files are read in `guard_file`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from fdbd.core import artifact
from fdbd.core.batch import ArrayLike, Batch, Head, Inputs, as_batch
from fdbd.core.configuration import require_name
from fdbd.core.perturbation import InputPerturbation
from fdbd.decision import hub, onnx_export
from fdbd.decision.answers import Decision, Explanation, explain
from fdbd.decision.choice import Auto, Choice
from fdbd.decision.identity import guard_id
from fdbd.decision.map_threshold import MapThreshold, PixelShares
from fdbd.decision.maps import MapDecision, batch_hashes
from fdbd.decision.record import GuardRecord, warn_caller
from fdbd.decision.show import html_table
from fdbd.decision.stages import CalibrationMaps, CalibrationScores, Stages, batches_in
from fdbd.decision.threshold import FewCalibrationSamplesWarning, Target, Threshold, check_target
from fdbd.detectors import MCM, Detector, Shaped, as_detector, create_shaping
from fdbd.detectors.shaping import Shaping
from fdbd.fitting.driver import fit_detector, over_processes
from fdbd.fitting.overlap import sample_hashes
from fdbd.fitting.spool import Spool
from fdbd.fitting.statistics import Count
from fdbd.networks.classifier import PRECISIONS, Classifier, split_batch
from fdbd.networks.find_head import HeadName
from fdbd.networks.sphere import ZeroShotClassifier
from fdbd.networks.wrapped import is_compiled, weights_hash
from fdbd.util.progress import track
from fdbd.util.version import __version__

Data: TypeAlias = Inputs | Batch | Iterable[Inputs | Batch | CalibrationScores]
"""A data loader, one batch, or an iterable of `Batch`es of features; `calibrate` also takes scores
that are already computed."""
_MOVED_TO_STAGES = (
    "observe",
    "decision",
    "training_batch",
    "calibration_scores",
    "features_alone",
    "require_fitted",
    "warn_of_labels",
)


class _Scored(NamedTuple):
    """What a threshold is set from: rows, or maps with the shares of their pixels."""

    rows: list[CalibrationScores]
    maps: list[CalibrationMaps]
    shares: PixelShares


class Guard(nn.Module):
    """A classifier that knows what it does not know. It runs on the model's device; batches move
    there by themselves.

    Args:
        model: any ``nn.Module`` with a linear head that gives each sample one of C classes, or each
            position of a map, a `Classifier`, or a bare `Head` for features without a network.
        detector: a detector or its name, as in `fdbd.create`; ``"auto"``, or `fdbd.Auto` with
            options, chooses and weighs detectors by itself (experimental).
        shaping: an activation shaping or its name, put before the detector.
        perturb: an `InputPerturbation`, applied to images before they are scored; None: none.
        head: name of the model's linear head, if it is not found by itself.
        layers: names of inner layers whose pooled features the detector reads (multi-layer MDS).

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> guard = Guard(model).fit([torch.randn(500, 4)]).calibrate([torch.randn(500, 4)], tpr=0.95)
    >>> guard
    Guard(fdbd, 3 classes, 8 features, model Sequential, quantile tpr=0.95 from 500 scores)
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
            detector = self.auto.make_pool(self.auto.can_weigh(model))
        assert not isinstance(detector, Auto)
        detector = as_detector(detector)
        if shaping is not None:
            detector = Shaped(create_shaping(shaping, before=type(detector)), detector)
        if perturb is not None:
            _check_perturbation(detector)
        self.detector: Detector = detector
        self.perturb = perturb
        self.threshold: Threshold | None = None
        """None until `calibrate`, and for a model of maps."""
        self.map_threshold: MapThreshold | None = None
        """What `calibrate` sets instead if the model predicts maps."""
        self.classifier: Classifier | None = None
        """The model; None: the guard takes features."""
        self._head: Head | None = None
        if isinstance(model, Head):
            self._head = model
        elif isinstance(model, Classifier):
            self.classifier = model
        elif isinstance(model, nn.Module):
            self.classifier = Classifier(model, head, layers or detector.needs.layers)
            if is_compiled(model):
                warn_caller(
                    "the model is compiled, and the guard runs it uncompiled, since it watches "
                    "the model's head: call guard.compile() to compile both together"
                )
        elif model is not None:
            raise TypeError(
                f"model is a {type(model).__name__}, expected a torch.nn.Module or an fdbd.Head"
            )
        self.about: dict[str, object] = {}
        """JSON values that are saved in the file: the model's origin, class names, how the guard
        was calibrated."""
        self._record = GuardRecord()

    @classmethod
    def zero_shot(
        cls,
        encoder: nn.Module | None,
        text_embeddings: ArrayLike,
        *,
        negatives: ArrayLike | None = None,
        scale: float = 100.0,
        temperature: float | None = None,
        class_names: Sequence[str] = (),
    ) -> Self:
        """A guard around a zero-shot classifier such as CLIP: each class is the direction of its
        prompt's embedding, and nothing is fitted. Call `calibrate` next.

        Args:
            encoder: gives embeddings (N, P) of images, or of texts; None: the guard takes
                embeddings, as `fdbd.Batch(embeddings)`.
            text_embeddings: (C, P), one per class, of any length.
            negatives: (M, P) embeddings of negative prompts, for NegLabel's score instead of MCM's.
            scale: of the logits, which are scaled cosines; CLIP's is 100.
            temperature: of the score, see `fdbd.detectors.MCM`; None: 1, or 0.01 with negatives.
            class_names: one per class, kept in the guard's file.

        >>> guard = Guard.zero_shot(None, torch.eye(3), class_names=["x", "y", "z"])
        >>> guard = guard.calibrate([Batch(torch.eye(3).repeat(20, 1))], alpha=0.05)
        >>> guard.decide(Batch(torch.tensor([[0.0, 2.0, 0.0], [1.0, 1.0, 1.0]]))).is_ood
        tensor([False,  True])
        """
        if temperature is None:
            temperature = 1.0 if negatives is None else 0.01
        head = Head.cosine(text_embeddings, scale)
        if class_names and len(class_names) != head.num_classes:
            raise ValueError(
                f"there are {len(class_names)} class names and {head.num_classes} embeddings: give "
                "one name per class"
            )
        source: nn.Module | Head = head
        if encoder is not None:
            if not isinstance(encoder, nn.Module):
                raise TypeError(
                    f"encoder is a {type(encoder).__name__}, expected a torch.nn.Module that gives "
                    "embeddings, or None"
                )
            source = ZeroShotClassifier(encoder, text_embeddings, scale)
        guard = cls(source, MCM(temperature, negatives))
        # The detector learns nothing from data, but `fit` needs a batch: the classes' directions.
        guard.stages.begin_fit()
        guard.detector.fit(Batch(head.weight), guard.head)
        guard.stages.end_fit()
        if class_names:
            guard.about["class_names"] = [str(name) for name in class_names]
        return guard

    # ── from training data to a threshold

    def fit(self, data: Data, *, held_out: Data | None = None, progress: bool = True) -> Self:
        """Fit the detector on training data, in one streaming pass of the network; a detector that
        needs several passes reads the features from a temporary file. Under torchrun each process
        passes its shard, and all end with the same detector. If the model predicts maps, 256 random
        positions of each image are read.

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
        stages = self.stages
        stages.begin_fit()
        combine = over_processes()
        if self.auto is not None:
            # What an earlier fit has chosen makes room for the whole pool.
            stages.make_pool()
        with torch.no_grad(), Spool() as spool:
            # One iterator for all that follows: what the fit leaves in it is noted at the end.
            items = iter(track(batches_in(data), "fitting", enabled=progress))
            batches: Iterable[Batch] = _training_batches(stages, items)
            if self.auto is not None or self.detector.needs.passes not in (0, 1):
                # The network runs once; further passes read its output from the spool.
                for batch in batches:
                    spool.append(batch)
                batches = spool
            if self.auto is not None:
                # The pool's options depend on the number of samples, which is known only now.
                num_rows = _over_all(combine, spool.num_rows)
                stages.make_pool(num_rows)
            fit_detector(self.detector, batches, self.head, combine)
            # A detector that learns nothing has read no batch; `calibrate` still has to know which
            # samples the fit was given.
            for item in items:
                self._note_unread(item)
        if combine is not None:
            self._record.seen = combine(self._record.seen)
        stages.end_fit()
        if held_out is not None:
            stages.choose_from(held_out, progress=progress)
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
        calibration set can escape if the fit saw many more than 4,096 samples); it cannot know what
        the network was trained on. For a model of maps the images are what is counted, and
        `map_threshold` is set.

        Args:
            data: as for `fit`. With ``"auto"``, and without held-out data in the fit, a random part
                of them weighs the detectors, 300 samples or one half, and the rest sets the
                threshold.
            tpr: fraction of in-distribution samples to accept; 0.95 if neither is given.
            alpha: instead, the largest fraction of false alarms, on average over the draw of the
                calibration data: a conformal threshold.
            per_class: a threshold for each predicted class.
            progress: as for `fit`.
        """
        check_target(tpr, alpha)
        target = Target(tpr=tpr, alpha=alpha, per_class=per_class)
        if self.stages.awaits_choice():
            # Scores of what weighed the detectors would be too good for a threshold.
            chosen = self.stages.choose_from(data, share=0.5, progress=progress)
            self._calibrate_on_rows([part.scores for part in chosen.rest], target)
            return self
        found = self._score_calibration(data, progress)
        if found.maps:
            self.stages.note_calibration(found.maps)
            self._set_map_threshold(found.shares, **target)
        else:
            self._calibrate_on_rows(found.rows, target)
        return self

    def _score_calibration(self, data: Data, progress: bool) -> _Scored:
        """What a threshold needs of calibration data."""
        self.stages.require_fitted()
        found = _Scored([], [], PixelShares())
        with torch.no_grad():
            for item in track(batches_in(data), "calibrating", enabled=progress):
                part = self.stages.calibration_part(item)
                if isinstance(part, CalibrationScores):
                    found.rows.append(part)
                    continue
                # The shares hold all that the threshold needs, so the scores can go.
                found.shares.add(part.scores)
                found.maps.append(part._replace(scores=part.scores[:0]))
        if found.rows and found.maps:
            raise ValueError(
                "some calibration batches hold maps and others single rows: give one kind (an "
                "image whose map has one position is a single row until the guard was given a "
                "larger one)"
            )
        return found

    def _calibrate_on_rows(self, batches: Sequence[CalibrationScores], target: Target) -> None:
        """Set the threshold from the scores of all batches."""
        if not batches:
            raise ValueError(
                "the calibration data hold no samples; give at least one non-empty batch"
            )
        self.stages.note_calibration(batches)
        scores = torch.cat([batch.scores for batch in batches])
        predicted = torch.cat([batch.predicted for batch in batches])
        self.set_threshold(scores, predicted, **target)

    def set_threshold(
        self, scores: Tensor, labels: Tensor | None = None, **target: Unpack[Target]
    ) -> None:
        """Calibrate on in-distribution scores (N,) that are already there; labels (N,) are
        predicted classes."""
        if target.get("per_class") and self.detector.needs.many_labels:
            raise ValueError(
                f"{self.detector.label} is for heads that give a sample several labels at once, so "
                "there is no predicted class to have a threshold of its own: leave per_class out"
            )
        num_classes = self.detector.head.num_classes
        threshold = Threshold.from_scores(scores, labels, num_classes=num_classes, **target)
        if threshold.caution:
            warn_caller(threshold.caution, FewCalibrationSamplesWarning)
        self.threshold = threshold
        self.map_threshold = None
        self._record.version += 1
        self.about["calibration"] = {**threshold.to_config(), "promise": threshold.guarantee}

    def _set_map_threshold(self, shares: PixelShares, **target: Unpack[Target]) -> None:
        """Calibrate on the scores of in-distribution maps."""
        threshold = MapThreshold.from_shares(shares, **target)
        caution = threshold.image_threshold.caution
        if caution:
            warn_caller(caution, FewCalibrationSamplesWarning)
        self.threshold = None
        self.map_threshold = threshold
        self._record.version += 1
        self.about["calibration"] = {**threshold.to_config(), "promise": threshold.guarantee}

    # ── the choice of a detector, with "auto"

    @property
    def choice(self) -> Choice | None:
        """What ``"auto"`` has found and chosen; None: nothing yet, or the detector was given."""
        found = self.about.get("choice")
        if found is None:
            return None
        return Choice.from_dict(found)

    # ── answers

    def forward(self, images: Inputs | Batch) -> Decision | MapDecision:
        """The decision on a batch of whatever the model takes; a `MapDecision` if the model
        predicts a class for each position of a map."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self._decide(images)
        with torch.no_grad():
            return self._decide(images)

    def _decide(self, images: Inputs | Batch) -> Decision | MapDecision:
        stages = self.stages
        seen = stages.observe(images)
        if seen.scored.grid is not None:
            return stages.map_decision(seen)
        return stages.decision(seen.logits, seen.scores)

    def decide(self, batch: Batch) -> Decision:
        """The same decision from features, without the network. Rows with a grid are maps: call
        guard(batch) for these."""
        if as_batch(batch).grid is not None:
            raise ValueError(
                "the rows are positions of maps, on which guard(batch) decides: call that"
            )
        return cast(Decision, self(batch))

    def score(self, images: Inputs | Batch) -> Tensor:
        """(N,) scores alone, or (N, H, W) of maps; needs no calibration."""
        with torch.no_grad():
            seen = self.stages.observe(images)
        if seen.scored.grid is not None:
            return seen.scored.grid.to_maps(seen.scores)
        return seen.scores

    def explain(self, images: Inputs | Batch) -> Explanation:
        """How far the samples are from each class's boundary: images, or a `Batch` of features.
        Distances are those of the shaped features, if there is a shaping."""
        stages = self.stages
        with torch.no_grad():
            seen = stages.observe(images)
            if seen.scored.grid is not None:
                raise ValueError(
                    "explain tells how far a sample is from each class, and the model predicts "
                    "maps: guard(images) gives the scores and verdicts of every position, and "
                    "fdbd explain draws them"
                )
            decision = stages.decision(seen.logits, seen.scores)
            return explain(decision, seen.scored, self.detector, stages.require_threshold())

    # ── what it is

    @property
    def head(self) -> Head:
        """The linear head: the model's with its present weights; without a model, that of the
        fit."""
        if self.classifier is not None:
            return self.classifier.head
        if self._head is not None:
            return self._head
        if self.detector.is_fitted:
            return self.detector.head
        raise ValueError(
            "the guard has neither a model nor a head: give Guard(model) or "
            "Guard(Head(weight, bias))"
        )

    @property
    def id(self) -> str:
        """Which guard this is: 16 hexadecimal digits that follow from detector, threshold, head and
        the weights of the model, and change when any of them does. Saving and loading keep them.
        Every access reads all weights: keep the id if you need it often."""
        self.stages.require_fitted()
        description = self._description()
        # Layers are in the detector's options, too; a guard without its model knows only those.
        # The precision belongs to the model as well.
        del description["layers"], description["autocast"]
        description["preprocess"] = self.about.get("preprocess")
        return guard_id(description, self._tensors(), self._weights())

    @property
    def version(self) -> int:
        """How many thresholds the guard has had since its fit; 0 before the first."""
        return self._record.version

    @property
    def stages(self) -> Stages:
        """The stages one by one, for drivers that run them elsewhere."""
        return Stages(self)

    def __repr__(self) -> str:
        return f"Guard({', '.join(self._facts().values())})"

    def _repr_html_(self) -> str:
        return html_table("Guard", self._facts())

    def _facts(self) -> dict[str, str]:
        """What a person wants to know at a glance, by name."""
        facts = {"detector": self.detector.label}
        if not self.detector.is_fitted:
            facts["state"] = "not fitted"
        else:
            head = self.detector.head
            facts["classes"] = f"{head.num_classes:,} classes"
            facts["features"] = f"{head.num_features:,} features"
        facts["model"] = "takes features"
        if self.classifier is not None:
            facts["model"] = f"model {type(self.classifier.model).__name__}"
        facts["threshold"] = "no threshold"
        if self.threshold is not None:
            facts["threshold"] = self.threshold.summary()
        elif self.map_threshold is not None:
            facts["threshold"] = self.map_threshold.extra_repr()
        return facts

    # ── files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write detector, threshold and fingerprints of head and model as one safetensors file; the
        model is not in it."""
        self.stages.require_fitted()
        require_name(self.detector)
        record = self._record
        tensors = self._tensors()
        if record.seen is not None:
            tensors["seen"] = record.seen.hashes
        # The weights that the detector was fitted with: those of now may have been trained since.
        weights = record.weights
        if weights is None:
            weights = self._weights()
        head_name = None
        if self.classifier is not None:
            head_name = self.classifier.head_name
        description = {
            **self._description(),
            "version": __version__,
            "guard_version": record.version,
            "weights": weights,
            "inputs": record.inputs,
            "gives_maps": record.gives_maps,
            "head_name": head_name,
            "about": self.about,
        }
        artifact.write(path, description, tensors)

    export_onnx = onnx_export.export
    push_to_hub = hub.push

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
            "threshold": _config_of(self._any_threshold()),
            "perturb": _config_of(self.perturb),
        }

    def _tensors(self) -> dict[str, Tensor]:
        """The fitted state of detector and threshold, by the names in the file."""
        tensors = {}
        for name, tensor in self.detector.state_dict().items():
            tensors[f"detector.{name}"] = tensor
        threshold = self._any_threshold()
        if threshold is not None:
            for name, tensor in threshold.state_dict().items():
                tensors[f"threshold.{name}"] = tensor
        return tensors

    def _any_threshold(self) -> Threshold | MapThreshold | None:
        """The threshold of whole samples or of maps, whichever is there."""
        if self.threshold is not None:
            return self.threshold
        return self.map_threshold

    def _weights(self) -> str | None:
        """The hash of the model's present weights; without a model, of those of the fit; None: the
        guard was fitted on features, or by an older version of the library."""
        if self.classifier is None:
            return self._record.weights
        return weights_hash(self.classifier.model)

    def _note_unread(self, item: Any) -> None:
        """Note the samples of a training batch that the detector has no use for."""
        if isinstance(item, Batch):
            hashes = batch_hashes(item)
            labels = as_batch(item).labels
        else:
            inputs, labels = split_batch(item)
            hashes = sample_hashes(inputs)
        assert self._record.seen is not None
        self._record.seen.add_hashes(hashes)
        self._record.count_labels("fit", labels)

    def __getattr__(self, name: str) -> Any:
        # The parts of a module are found here, too, and asked for with every sample.
        parts = self.__dict__.get("_modules")
        if parts is not None and name in parts:
            return parts[name]
        # Names of 0.2, which drivers called.
        if name == "calibrated":
            _warn_of_name(name, "guard.stages.require_threshold()")
            return self.stages.require_threshold()
        if name in _MOVED_TO_STAGES:
            _warn_of_name(name, f"guard.stages.{name}")
            return getattr(self.stages, name)
        if name in ("agreement", "seen"):
            _warn_of_name(name, f"guard.stages.record.{name}")
            return getattr(self._record, name)
        return super().__getattr__(name)


def warn_of_other_weights(guard: Guard, path: str | os.PathLike[str]) -> None:
    """Warn if the model has the head of the fit behind another backbone."""
    fitted = guard.stages.record.weights
    if guard.classifier is None or fitted is None:
        return
    if weights_hash(guard.classifier.model) != fitted:
        warn_caller(
            f"{os.fspath(path)!r} was fitted on a model with other weights; the head is the same, "
            "but the features have changed, and the threshold does not hold for them: load the "
            "guard with the model that it was fitted on, or fit a new guard"
        )


def _config_of(part: Threshold | MapThreshold | InputPerturbation | None) -> object:
    """The part as JSON values; None if the guard does without it."""
    if part is None:
        return None
    return part.to_config()


def _as_auto(detector: object) -> Auto | None:
    if isinstance(detector, Auto):
        return detector
    if isinstance(detector, str) and detector.strip().lower() == "auto":
        return Auto()
    return None


def _over_all(combine: Callable[[Any], Any] | None, num_rows: int) -> int:
    """The number of training samples of all processes."""
    rows = Count()
    rows.count = num_rows
    if combine is not None:
        rows = combine(rows)
    return rows.count


def _check_perturbation(detector: Detector) -> None:
    """ValueError if a perturbation of the images means nothing to this detector."""
    if detector.needs.network:
        raise ValueError(f"{detector.label} perturbs the images by itself: leave perturb out")
    if detector.needs.calibration:
        raise ValueError(f"{detector.label} has p-values of plain images: leave perturb out")


def _training_batches(stages: Stages, items: Iterator[Any]) -> Iterator[Batch]:
    for item in items:
        yield stages.note(stages.training_batch(item))


def _warn_of_name(old: str, new: str) -> None:
    warnings.warn(
        f"Guard.{old} is now {new}; the old name will be removed in 0.4",
        DeprecationWarning,
        stacklevel=3,
    )
